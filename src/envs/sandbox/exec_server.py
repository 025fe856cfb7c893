"""The program that runs as pid 1 of a sandbox. It starts commands, reports their exit status and reaps
orphaned processes.

An agent cannot trace the program or access its memory: the program makes itself non-dumpable before the first
command starts, and no process of the sandbox has capabilities. Signals from inside have no effect, because
the kernel delivers a signal to pid 1 of a pid namespace only if pid 1 has a handler for it. The seccomp
filter denies `prlimit` and scheduling calls that address pid 1.

The program reads one request per line from stdin and writes one answer per line to stdout. No other process
of the sandbox has these pipes, so no command can report the status of another one:

    run NUMBER TOKEN SHELL
                       start `SHELL requests/NUMBER.sh` in a process group of its own; its output goes
                       to the FIFOs requests/TOKEN.{stdout,stderr}
    kill NUMBER        kill the process group of the command NUMBER
    killall NUMBER     kill all processes except pid 1 and wait until they have ended
    stat NUMBER PATH   report the `PathKind` of PATH, a path in hexadecimal
    ready              the first answer: the program has started
    exit NUMBER STATUS the answer to run (the exit status of the command), stat (the kind) and killall (0)
    failed NUMBER WHY  the answer to run if no process could be created

The program is written in Perl, because perl-base is an essential package of Debian and Ubuntu, starts in 3 ms
and can make system calls without a module. Python takes 15 ms to start and may be absent from /usr. A shell
cannot call prctl.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from enum import IntEnum

from src.envs.sandbox.system_calls import call_numbers

CONTROL = "/.sandbox"
INTERPRETER = "/usr/bin/perl"


class PathKind(IntEnum):
    """The kind of file at a path inside a sandbox, after following symbolic links."""

    MISSING = 0
    OTHER = 1  # any file that is not a directory
    EMPTY_DIRECTORY = 2
    DIRECTORY = 3  # not empty, or without permission to list it


_PROGRAM = r"""
use strict;
@INC = ();  # agents can write to its directories in /usr/local: load no module after this line
my ($prctl, $prlimit64, $rt_sigprocmask, $signalfd4, @limits) = map { $_ + 0 } @ARGV;
sub check { return if $_[1] == 0; print STDERR "the exec server cannot use $_[0]: $!\n"; exit 1 }

umask 022;
check('PR_SET_DUMPABLE', syscall($prctl, 4, 0, 0, 0, 0));
check('PR_SET_NO_NEW_PRIVS', syscall($prctl, 38, 1, 0, 0, 0));
while (my ($resource, $most) = splice @limits, 0, 2) {
    check('prlimit', syscall($prlimit64, 0, $resource, pack('QQ', $most, $most), 0));
}
sub must { return if $_[1]; print STDERR "cannot create $_[0] in the sandbox: $!\n"; exit 1 }
sub copy {
    my ($source, $target) = @_;
    my $mode = (lstat $source)[2] & 0777;
    if (-l _) { return must($target, symlink readlink($source), $target) }
    if (-d _) {
        must($target, -d $target || mkdir $target, $mode);
        must($target, opendir my $directory, $source);
        for my $name (readdir $directory) {
            copy("$source/$name", "$target/$name") if $name ne '.' && $name ne '..';
        }
        return;
    }
    must($source, sysopen my $in, $source, 0);
    must($target, sysopen my $out, $target, 0301, $mode);  # O_WRONLY, O_CREAT, O_EXCL
    my $size;
    while ($size = sysread $in, my $data, 1 << 20) { must($target, $size == (syswrite($out, $data) // -1)) }
    must($source, defined $size);
}
copy('/.sandbox/skeleton', '/.');
my $child_signal = pack('Q', 1 << 16);
check('rt_sigprocmask', syscall($rt_sigprocmask, 0, $child_signal, 0, 8));
my $descriptor = syscall($signalfd4, -1, $child_signal, 8, 0x80800);  # CLOEXEC, NONBLOCK
check('signalfd', $descriptor < 0);
open(my $ended, '<&=', $descriptor) or exit 1;

my (%number_of, %group_of);
sub answer { my $line = join(' ', @_) . "\n"; syswrite STDOUT, $line }

sub reap {
    my ($flags) = @_;
    while ((my $pid = waitpid(-1, $flags)) > 0) {
        my $status = $? & 127 ? 128 + ($? & 127) : $? >> 8;
        my $number = delete $number_of{$pid};
        next unless defined $number;
        delete $group_of{$number};
        answer('exit', $number, $status);
    }
}

sub run {
    my ($number, $token, $shell) = @_;
    my $pid = fork;
    return answer('failed', $number, $!) unless defined $pid;
    if ($pid) {
        setpgrp($pid, $pid);
        $number_of{$pid} = $number;
        $group_of{$number} = $pid;
        return;
    }
    setpgrp(0, 0);
    syscall($rt_sigprocmask, 1, $child_signal, 0, 8);
    if (open(my $score, '>', '/proc/self/oom_score_adj')) { syswrite $score, '500'; close $score }
    my $requests = '/.sandbox/requests';
    open(STDIN, '<', '/dev/null') && sysopen(STDOUT, "$requests/$token.stdout", 1)
        && sysopen(STDERR, "$requests/$token.stderr", 1)
        && exec { "/usr/bin/$shell" } $shell, "$requests/$number.sh";
    exit 127;
}

sub kind_of {
    my ($path) = @_;
    return 0 unless stat $path;
    return 1 unless -d _;
    opendir(my $directory, $path) or return 3;
    while (defined(my $name = readdir $directory)) { return 3 if $name ne '.' && $name ne '..' }
    return 2;
}

answer('ready');
open(STDERR, '>', '/dev/null');
my ($waiting, $received) = ('', '');
vec($waiting, 0, 1) = 1;
vec($waiting, $descriptor, 1) = 1;
while (1) {
    my $ready = $waiting;
    next if select($ready, undef, undef, undef) < 0;
    if (vec($ready, $descriptor, 1)) { sysread $ended, my $signals, 4096; reap(1) }
    next unless vec($ready, 0, 1);
    sysread(STDIN, $received, 65536, length $received) or exit 0;
    while ($received =~ s/^([^\n]*)\n//) {
        my ($verb, $number, $token, $shell) = split / /, $1;
        if ($verb eq 'run') { run($number, $token, $shell) }
        elsif ($verb eq 'stat') { answer('exit', $number, kind_of(pack('H*', $token))) }
        elsif ($verb eq 'kill') { kill 'KILL', -$group_of{$number} if $group_of{$number} }
        elsif ($verb eq 'killall') { kill 'KILL', -1; reap(0); answer('exit', $number, 0) }
    }
}
"""


def exec_server_command(limits: Mapping[int, int]) -> list[str]:
    """Return the command line of pid 1. `limits` maps `resource.RLIMIT_*` to limits of every process."""
    numbers = call_numbers(("prctl", "prlimit64", "rt_sigprocmask", "signalfd4"))
    pairs = [str(value) for pair in {**limits, resource.RLIMIT_CORE: 0}.items() for value in pair]
    return [INTERPRETER, "-e", _PROGRAM, "--", *map(str, numbers), *pairs]
