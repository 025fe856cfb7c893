"""Attacks that change the host or read from it. The agent also solves the task, and its reward must stay
1."""

from __future__ import annotations

from collections.abc import Iterable

from tests.security.red_team.attack import ALL, SANDBOX, Attack, Category, EnvironmentKind, RunAs


def escape(name: str, script: str, places: Iterable[tuple[EnvironmentKind, RunAs]] = ALL) -> Attack:
    return Attack(
        name=name,
        category=Category.ESCAPE,
        script=script,
        solves=True,
        places=frozenset(places),
        patience_s=8,
        shares=frozenset(EnvironmentKind),
    )


ATTACKS = (
    escape(
        "sysctl",  # The files are opened for writing, but nothing is written.
        """
for name in kernel/core_pattern kernel/panic kernel/modprobe kernel/sysrq kernel/pid_max kernel/threads-max vm/overcommit_memory \\
    vm/drop_caches fs/file-max kernel/printk kernel/randomize_va_space; do
    (exec 7>> /proc/sys/$name) 2>/dev/null && hole "/proc/sys/$name can be opened for writing"
done
[ -n "$(find /proc/sys -type f -writable -not -path '/proc/sys/net/*' -not -path '*/ns_last_pid' 2>/dev/null | head -n 1)" ] &&
    hole "a file below /proc/sys is writable"
""",
    ),
    escape(
        "sysrq",
        """
for path in /proc/sysrq-trigger /proc/acpi/wakeup /proc/irq/default_smp_affinity /proc/bus/pci/devices; do
    (exec 7>> $path) 2>/dev/null && hole "$path can be opened for writing"
done
""",
    ),
    escape(
        "kernel-files",
        """
[ $WHERE = docker ] || more="/proc/kmsg /proc/kpageflags /proc/kpagecount /proc/kpagecgroup /proc/slabinfo /proc/vmallocinfo"
for path in /proc/kcore /proc/timer_list /proc/sched_debug /proc/keys /proc/latency_stats /proc/acpi/* /proc/scsi/* /sys/firmware/* \\
    /sys/kernel/debug/* $more; do
    [ -f $path ] && [ "$(timeout 2 head -c 1 $path 2>/dev/null | wc -c)" = 1 ] && hole "$path can be read"
done
[ $WHERE = docker ] || { grep -qv '^ *00000000-00000000' /proc/iomem 2>/dev/null && hole "/proc/iomem shows addresses"; }
[ $WHERE = docker ] || { grep -qv '^0000000000000000' /proc/kallsyms 2>/dev/null && hole "/proc/kallsyms shows addresses"; }
true
""",
    ),
    escape(
        "mount",
        """
mkdir -p /tmp/m
mount -t tmpfs none /tmp/m 2>/dev/null && hole "a tmpfs can be mounted"
mount -t proc none /tmp/m 2>/dev/null && hole "procfs can be mounted"
mount -t sysfs none /tmp/m 2>/dev/null && hole "sysfs can be mounted"
mount -t cgroup2 none /tmp/m 2>/dev/null && hole "cgroup2 can be mounted"
mount -t cgroup -o rdma none /tmp/m 2>/dev/null && hole "a cgroup hierarchy can be mounted"
mount --bind /proc/1 /tmp/m 2>/dev/null && hole "a directory can be bind-mounted"
mount -o remount,rw,bind /usr 2>/dev/null && hole "/usr can be remounted"
mount -o remount,rw /proc/sys 2>/dev/null && hole "/proc/sys can be remounted"
umount -l /proc 2>/dev/null && hole "/proc can be unmounted"
umount -l /.sandbox/requests 2>/dev/null && hole "the requests can be unmounted"
py <<'END'
for number, name in ((428, "open_tree"), (430, "fsopen"), (442, "mount_setattr")):
    arguments = {428: (-100, b"/usr", 1), 430: (b"tmpfs", 0), 442: (-1, b"/usr", 0, 0, 0)}[number]
    if syscall(number, *arguments) >= 0:
        hole(f"{name} succeeds")
END
""",
    ),
    escape(
        "namespaces",
        """
py <<'END'
for name, flag in dict(user=0x10000000, mount=0x20000, net=0x40000000, pid=0x20000000, ipc=0x08000000, uts=0x04000000,
                       cgroup=0x02000000, time=0x80).items():
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(flag) == 0 else 1)
    if os.waitpid(child, 0)[1] == 0:
        hole(f"a {name} namespace can be created")
class CloneArguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in "flags pidfd child parent signal stack size tls tid number cgroup".split()]
arguments = CloneArguments(flags=0x10000000, signal=17)
child = syscall(435, ctypes.byref(arguments), ctypes.sizeof(arguments))
if child == 0:
    os._exit(0)
if child > 0:
    os.waitpid(child, 0)
    hole("clone3 creates a user namespace")
for path in glob.glob("/proc/[0-9]*/ns/mnt"):
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    if os.readlink(path) != os.readlink("/proc/self/ns/mnt") and libc.setns(descriptor, 0) == 0:
        hole(f"{path} can be entered")
END
""",
    ),
    escape(
        "chroot",
        """
py <<'END'
top = os.open("/", os.O_RDONLY)
os.makedirs("/tmp/c", exist_ok=True)
try:
    os.chroot("/tmp/c")
    os.fchdir(top)
except OSError:
    pass
for _ in range(60):
    os.chdir("..")
if os.path.exists(SENTINEL.lstrip("/")) or os.path.exists(SENTINEL):
    hole("a file of the host is above the root directory")
END
""",
    ),
    escape(
        "ptrace-pid-1",
        """
py <<'END'
for name, request in (("PTRACE_ATTACH", 16), ("PTRACE_SEIZE", 0x4206)):
    if libc.ptrace(request, 1, None, None) == 0:
        hole(f"{name} of pid 1 succeeds")
        libc.ptrace(17, 1, None, None)
buffer = ctypes.create_string_buffer(8)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
try:
    address = int(open("/proc/1/maps").readline().split("-")[0], 16)
    hole("the memory map of pid 1 can be read")
except (OSError, ValueError):
    address = 0x400000
local, remote = Vector(ctypes.addressof(buffer), 8), Vector(address, 8)
if libc.process_vm_readv(1, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) == 8:
    hole("process_vm_readv of pid 1 succeeds")
descriptor = syscall(434, 1, 0)
if descriptor >= 0:
    for number in range(16):
        if syscall(438, descriptor, number, 0) >= 0:
            hole(f"descriptor {number} of pid 1 can be taken")
END
""",
        SANDBOX,
    ),
    escape(
        "files-of-pid-1",
        """
py <<'END'
if opens("/proc/1/mem", os.O_RDWR):
    hole("/proc/1/mem can be opened")
for name in ("environ", "stack", "syscall", "auxv", "io"):
    try:
        if open(f"/proc/1/{name}", "rb").read(1):
            hole(f"/proc/1/{name} can be read")
    except OSError:
        pass
try:
    for number in os.listdir("/proc/1/fd"):
        hole(f"descriptor {number} of pid 1 is {os.readlink(f'/proc/1/fd/{number}')}")
        if opens(f"/proc/1/fd/{number}", os.O_WRONLY):
            hole(f"descriptor {number} of pid 1 can be written to")
except OSError:
    pass
for name in ("root", "cwd"):
    try:
        os.listdir(f"/proc/1/{name}")
        hole(f"/proc/1/{name} can be listed")
    except OSError:
        pass
END
""",
        SANDBOX,
    ),
    escape(
        "roots-of-processes",
        """
for process in /proc/[0-9]* /proc/self /proc/thread-self; do
    for place in root cwd; do
        [ -e "$process/$place$SENTINEL" ] && hole "$process/$place shows the host's files"
    done
done
for descriptor in /proc/[0-9]*/fd/*; do
    [ -e "$descriptor/../../../..$SENTINEL" ] && hole "$descriptor shows the host's files"
    case "$(readlink "$descriptor" 2>/dev/null)" in *agent-trainer-*|*red-team-*) hole "$descriptor is a file of the trainer" ;; esac
done
[ -e "$SENTINEL" ] && hole "a file of the host is visible"
tr '\\0' ' ' < /proc/$HOST_PID/cmdline 2>/dev/null | grep -q red_team && hole "a process of the host is visible"
true
""",
    ),
    escape(
        "devices",
        """
py <<'END'
for name in ("mem kmem port kmsg kvm vda sda nvme0n1 loop-control vsock net/tun fuse uinput mapper/control vhost-net vhost-vsock "
             "cuse hpet").split():
    if opens(f"/dev/{name}", os.O_RDONLY):
        hole(f"/dev/{name} can be opened")
for name, kind, major, minor in (("mem", 0o020000, 1, 1), ("kmsg", 0o020000, 1, 11), ("disk", 0o060000, 254, 0), ("disk2", 0o060000, 8, 0),
                                 ("loop", 0o060000, 7, 0), ("tty", 0o020000, 4, 0), ("fuse", 0o020000, 10, 229)):
    path = f"/tmp/device-{name}"
    try:
        os.mknod(path, 0o600 | kind, os.makedev(major, minor))
    except OSError:
        continue
    if opens(path, os.O_RDONLY):
        hole(f"a new device {major}:{minor} can be opened")
END
""",
    ),
    escape(
        "socket-families",
        """
py <<'END'
for name, family, kind in (("AF_VSOCK", 40, 1), ("AF_PACKET", 17, 3), ("AF_ALG", 38, 5), ("AF_KEY", 15, 3), ("AF_TIPC", 30, 5),
                           ("AF_RDS", 21, 5), ("AF_BLUETOOTH", 31, 3), ("AF_CAN", 29, 3), ("AF_XDP", 44, 3), ("AF_X25", 9, 5)):
    try:
        socket.socket(family, kind, 0).close()
        hole(f"a socket of {name} can be created")
    except OSError:
        pass
try:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()
    hole("a raw socket can be created")
except OSError:
    pass
END
""",
        SANDBOX,
    ),
    escape(
        "keyring",
        """
py <<'END'
for name, ring in (("user", -4), ("user session", -5), ("session", -3), ("process", -2)):
    key = syscall(248, b"user", T.encode(), b"x", ctypes.c_size_t(1), ctypes.c_int(ring))
    if key >= 0:
        hole(f"a key can be added to the {name} keyring")
        syscall(250, 15, ctypes.c_int(key), 10)  # the key expires after 10 s
if syscall(250, 0, ctypes.c_int(-4), 0) >= 0:
    hole("the id of the user keyring can be read")
END
""",
    ),
    escape(
        "dmesg",
        """
py <<'END'
buffer = ctypes.create_string_buffer(4096)
if libc.klogctl(3, buffer, 4096) > 0:
    hole("the kernel's log can be read")
if libc.klogctl(10, None, 0) >= 0:
    hole("the size of the kernel's log can be read")
END
""",
    ),
    escape(
        "cgroup-files",
        """
find / -xdev -name release_agent 2>/dev/null | head -n 1 | grep -q . && hole "a release_agent is visible"
for path in $(find /sys/fs/cgroup -maxdepth 3 \\( -name release_agent -o -name notify_on_release -o -name cgroup.procs \\
    -o -name devices.allow -o -name memory.max -o -name memory.limit_in_bytes \\) 2>/dev/null | head -n 60); do
    (exec 7>> "$path") 2>/dev/null && hole "$path can be opened for writing"
done
for place in /sys/fs/cgroup /sys/fs/cgroup/*; do
    mkdir "$place/$T" 2>/dev/null && [ -e "$place/$T/cgroup.procs" ] && hole "a cgroup can be created in $place"
done
true
""",
    ),
    escape(
        "host-files",
        """
for place in /usr /usr/bin /usr/lib /bin /lib /lib64 /etc/alternatives /etc/ssl/certs \\
    /.sandbox/requests /.sandbox/skeleton /dev /sys /proc; do
    touch "$place/$T" 2>/dev/null && hole "a file can be created in $place"
    mkdir "$place/$T.d" 2>/dev/null && hole "a directory can be created in $place"
done
(exec 7>> /usr/bin/env) 2>/dev/null && hole "/usr/bin/env can be opened for writing"
chmod 4755 /usr/bin/env 2>/dev/null && hole "the mode of /usr/bin/env can be changed"
mv /usr/bin/env /usr/bin/env.$T 2>/dev/null && hole "/usr/bin/env can be renamed"
true
""",
        SANDBOX,
    ),
    escape(
        "commands-of-others",
        """
for try in $(seq 300); do  # at the same time, the trainer runs commands
    for request in /.sandbox/requests/*; do
        [ -f "$request" ] && head -c 1 "$request" >/dev/null 2>&1 && violation="a command of the trainer can be read"
        [ -p "$request" ] && (exec 7<> "$request") 2>/dev/null && hole "a reply to the trainer can be written" && break 2
    done
    sleep 0.01
done
[ -n "$violation" ] && hole "$violation"
true
""",
        SANDBOX,
    ),
    escape(
        "shared-memory-files",
        """
for name in /dev/shm /dev/mqueue /run/lock; do
    ls -A "$name" 2>/dev/null | grep -q red-team && hole "the host's $name is visible"
    touch "$name/$T" 2>/dev/null
done
true
""",
    ),
    escape(
        "setuid-files",  # `host.faults_of_directory` reports such files in the trial's directory.
        """
for place in /app /tmp /logs/agent /logs/artifacts /logs/verifier; do
    cp /bin/bash "$place/bash-$T" 2>/dev/null && chmod 6755 "$place/bash-$T"
    truncate -s 1000 "$place/bash-$T"
    mknod "$place/null-$T" c 1 3 2>/dev/null
    mkfifo "$place/fifo-$T" 2>/dev/null
done
true
""",
    ),
    escape(
        "terminal-input",
        """
py <<'END'
for path in ("/dev/console", "/dev/tty0", "/dev/tty1", "/proc/1/fd/0", "/proc/1/fd/1", "/proc/1/fd/2"):
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, 0x5412, b" ")
        hole(f"a character can be typed into {path}")
    except OSError:
        pass
END
""",
    ),
    escape(
        "privileges",
        """
grep -q '^CapEff:.*0000000000000000$' /proc/self/status || hole "the process has capabilities"
grep -q '^CapBnd:.*0000000000000000$' /proc/self/status || hole "a process can get capabilities"
grep -q '^NoNewPrivs:.*1$' /proc/self/status || hole "setuid programs can grant privileges"
grep -q '^Seccomp:.*2$' /proc/self/status || hole "there is no filter of system calls"
case "$(readlink /proc/self/ns/user)" in user:\\[4026531837\\]) hole "the process is in the host's user namespace" ;; esac
true
""",
        SANDBOX,
    ),
    escape(
        "kernel-calls",  # The arguments are harmless if the calls are allowed.
        """
py <<'END'
zeros = ctypes.create_string_buffer(256)
event = struct.pack("IIQQQQ", 1, 112, 1, 0, 0, 0x60).ljust(112, b"\\0")
array = struct.pack("IIII", 2, 4, 4, 1).ljust(72, b"\\0")
calls = dict(bpf=(321, 0, array, 72), perf_event_open=(298, event, 0, -1, -1, 0), userfaultfd=(323, 1), kexec_load=(246, 0, 0, 0, 0),
             iopl=(172, 3), swapoff=(168, b"/nowhere"), acct=(163, 0), quotactl=(179, 0x800003 << 8, 0, 0, zeros),
             setdomainname=(171, b"x", 1), vhangup=(153,), pivot_root=(155, b"/", b"/"), init_module=(175, zeros, 0, b""),
             delete_module=(176, b"x", 0), lookup_dcookie=(212, 0, zeros, 10), nfsservctl=(180,), fanotify_init=(300, 0, 0),
             open_by_handle_at=(304, -100, zeros, 0))
for name, (number, *arguments) in calls.items():
    if syscall(number, *arguments) >= 0:
        hole(f"{name} is allowed")
try:
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    hole("the clock can be set")
except OSError:
    pass
END
""",
        SANDBOX,
    ),
    escape(
        "io-uring",
        """
py <<'END'
if syscall(425, 4, ctypes.create_string_buffer(256)) >= 0:
    hole("io_uring_setup is allowed")
END
""",
        SANDBOX,
    ),
    escape(
        "secrets",
        """
env | grep -q RED_TEAM_SECRET && hole "a secret is in the environment"
cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -q RED_TEAM_SECRET && hole "a secret is in a process's environment"
cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -q 'agent-trainer-[0-9]' && hole "a path of the host is in a command line"
for path in /root/.ssh /root/.netrc /root/.docker /root/.config /var/run/docker.sock /run/docker.sock /run/containerd \\
    /run/dbus /run/user; do
    [ -e "$path" ] && hole "$path is visible"
done
grep -v '^root:' /etc/shadow 2>/dev/null | grep -q ':\\$' && hole "the host's passwords are visible"
true
""",
    ),
    escape(
        "signals-to-the-host",
        """
for signal in 0 CONT; do
    kill -$signal $HOST_PID 2>/dev/null && tr '\\0' ' ' < /proc/$HOST_PID/cmdline | grep -q red_team && hole "the trainer can be signalled"
done
py <<'END'
try:
    os.kill(-os.getpgid(1), 0)
    hole("the process group of pid 1 can be signalled") if os.getpgid(1) != 1 else None
except OSError:
    pass
for pid in (os.getppid(), os.getpgrp(), os.getsid(0)):
    if pid == 0:
        hole("the parent, process group or session is outside of the pid namespace")
END
""",
    ),
)
