"""Select the files of an agent that are carried over to the fresh environment in which the verifier runs.

This module runs on the host. It reads a listing and an archive from the agent's environment, in which the
agent may have replaced every program. Both are therefore treated as untrusted data. Each member of the
archive is checked, so even a forged archive adds only files that the agent could have created in its
environment. The paths in `SEARCHED` and `STARTUP` are not carried over, because the programs of a verifier
load code from them.

This file is long because the tables of paths and the checks that apply them belong together.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePosixPath
from typing import IO

from src.core.errors import AgentFault
from src.core.trajectory import ZeroReason
from src.envs.harbor.search_paths import LOADED, MODULE_VARIABLES, paths_of

MAX_MEMBERS = 100_000
MAX_BYTES = 2**30
MAX_LISTING_BYTES = 64 * 2**20
MAX_NAME_BYTES = 4096

# Tables of path patterns, in which `*` stands for any characters except a slash. Nothing at or below a path
# of the first four tables is carried over, except what `EXCEPTIONS` lists.

# fmt: off
SEARCHED = (  # directories of programs, shared libraries and modules of interpreters
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/snap", "/etc/alternatives",
    "/node_modules", "/home/*/bin", "/root/bin", "/home/*/node_modules", "/root/node_modules",
    "/var/lib/gems", "/var/lib/ghc", "/home/*/R", "/root/R",
    # Caches of compiled JavaScript, which node, yarn, jest and jiti load without a complete check.
    *(
        f"{directory}/{name}"
        for directory in ("/tmp", "/var/tmp")
        for name in ("node-compile-cache", "v8-compile-cache*", "jest_*", "jiti")
    ),
)
STARTUP = (  # files that programs read when they start
    "/etc/ld.so.*", "/etc/ld-musl*", "/etc/environment", "/etc/profile", "/etc/profile.d", "/etc/bash*",
    "/etc/z*", "/etc/csh*", "/etc/fish", "/etc/security", "/etc/pam.d", "/etc/nsswitch.conf", "/etc/cron*",
    "/etc/init.d", "/etc/rc*", "/etc/systemd", "/var/spool/cron", "/etc/perl", "/etc/python*", "/etc/node*",
    "/etc/npmrc", "/etc/ruby*", "/etc/php*", "/etc/R", "/etc/pip.conf", "/etc/uv", "/etc/gitconfig",
    "/etc/ssl/openssl.cnf", "/etc/ssh", "/etc/tmux.conf", "/etc/screenrc", "/etc/vim", "/etc/inputrc",
    "/etc/wgetrc", "/etc/curlrc", "/etc/apt/apt.conf*",
    "/etc/dpkg/dpkg.cfg*", "/etc/gdb", "/etc/mercurial", "/etc/ccache*",
    "/home/*/.*", "/root/.*",  # hidden files of shells, git and pip, and modules in ~/.local
    *(
        f"{directory}/{name}"  # pytest looks for these in the parent directories of the tests
        for directory in ("", "/root", "/home/*")
        for name in (
            *("conftest.py", "pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml"),
            *("tox.ini", "setup.cfg"),
        )
    ),
)
NOT_FILES_OF_THE_AGENT = (
    "/tests", "/logs/verifier", "/proc", "/sys", "/dev", "/.sandbox", "/.dockerenv", "/etc/hosts",
    "/etc/hostname", "/etc/resolv.conf", "/etc/mtab",
    # The settings and databases of package managers. A database of the agent would list programs that are not
    # carried over.
    "/etc/apt", "/etc/dpkg", "/var/lib/apt", "/var/cache/apt", "/var/lib/dpkg", "/etc/yum*", "/etc/dnf",
    "/var/lib/rpm", "/etc/apk",
)
SETTINGS = (  # more files that programs read
    # Grading in place does not remove these, because a package that the agent installed may need them.
    # su and sudo set environment variables such as PATH.
    "/etc/login.defs", "/etc/default/locale", "/etc/default/su", "/etc/default/runuser", "/etc/sudo*",
    "/etc/xdg", "/etc/maven*", "/etc/java*", "/etc/conda", "/etc/rustup", "/etc/julia", "/etc/ipython",
    "/etc/jupyter", "/etc/emacs", "/etc/octave*", "/etc/*rc", "/etc/magic*", "/etc/ImageMagick*",
    "/etc/postgresql-common", "/etc/krb5*", "/etc/gss", "/etc/odbc*", "/etc/pkcs11", "/etc/OpenCL",
    "/etc/dotnet", "/etc/ant*", "/etc/clang*", "/etc/gitattributes", "/etc/swi-prolog", "/etc/texmf",
    # Programs look for these in the parent directories of the tests.
    "/.*", "/package.json", "/tsconfig.json", "/deno.json*", "/jest.config.*", "/babel.config.*", "/uv.toml",
    "/rust-toolchain*", "/Cargo.toml", "/go.mod", "/go.work", "/Gemfile*", "/Rakefile", "/pom.xml",
    "/Directory.Build.*", "/Directory.Packages.props", "/nuget.config", "/NuGet.Config", "/global.json",
    "/eslint.config.*", "/pnpm-workspace.yaml", "/settings.gradle*", "/cabal.project*", "/stack.yaml",
    "/dune-project", "/dune-workspace", "/justfile", "/Justfile", "/Taskfile.y*", "/taskfile.y*", "/tasks.py",
    "/Pipfile", "/postcss.config.*", "/ruff.toml",
)
EXCEPTIONS = ("/usr/local/share", "/usr/local/src", "/dev/shm")  # No program loads code from these.
EXCLUDED_FROM_EXCEPTIONS = tuple(
    f"/usr/local/share/{name}"
    for name in (
        *("perl", "python*", "sandbox", "lua", "guile", "ruby", "gems", "julia", "octave", "tcltk", "emacs"),
        *("fish", "zsh", "bash-completion", "cmake*", "pkgconfig", "aclocal", "jupyter", "vim", "nvim"),
        *("gdb", "git-core", "common-lisp", "awk", "texmf", "misc", "autoconf*", "automake*", "ImageMagick*"),
        ".*",
    )
)
# No symbolic link of the agent may lead to these paths. Otherwise the verifier could read the expected
# answer, or its own input, instead of a file of the agent.
VERIFIER_PATHS = (
    "/tests", "/logs/verifier", "/proc", "/sys", "/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr",
    "/.sandbox",
)
# fmt: on
ACCOUNTS = "/etc/passwd"
MAX_ACCOUNTS_BYTES = 2**20
PROBE_FILE = "/var/tmp/grading-probe"
OWNER_ACCESS = 0o700  # without it, root in the sandbox, which has no capabilities, cannot change a directory
MODULE_DIRECTORIES = ("site-packages", "dist-packages")  # excluded if they existed before the agent acted
INTERPRETERS = ("/bin/python", "/bin/python3")
PROGRAMS_OF_TOOL = re.compile(r"(/opt/.+)/s?bin")  # group 1 is the directory of the whole tool
CUSTOMIZE_MODULES = re.compile(r"/(?:site|user)customize(?:[./]|$)|/__pycache__/(?:site|user)customize\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a listing."""

    kind: str  # the type letter of `find`: f, d, l, ...
    mode: int
    size: int  # bytes
    stamp: str = ""  # change time and inode, which an agent cannot set, unlike the modification time


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChanges:
    """The changes of an agent that are carried over."""

    carried: Mapping[str, FileEntry] = field(default_factory=dict)  # created or changed files by path
    removed: Sequence[str] = ()  # paths to remove before the archive is unpacked
    emptied: Sequence[str] = ()  # directories to empty before the archive is unpacked
    unlocked: Sequence[str] = ()  # directories that need OWNER_ACCESS for these changes
    symlinks: frozenset[str] = frozenset()  # links that existed before the agent acted, minus `removed`


class CarryRules:
    """The tables above, extended by the search paths in the environment variables of a task and by the files
    that the programs in these paths load.

    >>> rules = CarryRules({"PATH": "/opt/tool/bin:/usr/bin"})
    >>> program = FileEntry(kind="f", mode=0o755, size=1)
    >>> paths = ("/app/run", "/opt/tool/bin/cat", "/root/.bashrc", "/root/a")
    >>> [rules.carries(path, program) for path in paths]
    [True, False, False, True]
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        modules: Iterable[str] = (),
        interpreters: Iterable[str] = (),
        tools: Iterable[str] = (),
    ) -> None:
        """`modules` are the module directories that existed before the agent acted, `interpreters` are the
        directories that contained a Python interpreter, and `tools` are the `linked_tools`.
        """
        paths = {
            name: [_normalize(path) for path in paths_of(name, value) if path.startswith("/")]
            for name, value in environment.items()
        }
        workdirs = paths.get("PWD", [])
        loaded = [path for name in paths if LOADED.fullmatch(name) for path in paths[name]]
        module_paths = [
            path
            for name in MODULE_VARIABLES
            for path in paths.get(name, [])
            if not any(is_same_or_below(path, work) or is_same_or_below(work, path) for work in workdirs)
        ]
        homes = [home for home in paths.get("HOME", ["/root"]) if home != "/"]
        self._path_directories = {*paths.get("PATH", []), *map(_normalize, interpreters)}
        path_tools = {
            match[1] for path in self._path_directories if (match := PROGRAMS_OF_TOOL.fullmatch(path))
        }
        # A path that contains the working directory is not excluded, because the work would be left out.
        whole = [
            path
            for path in (*loaded, *path_tools, *tools)
            if not any(is_same_or_below(work, path) for work in workdirs)
        ]
        libraries = [f"{path}/*.so*" for path in paths.get("LD_LIBRARY_PATH", [])]
        patterns = [
            *(*SEARCHED, *STARTUP, *NOT_FILES_OF_THE_AGENT, *SETTINGS),
            *(f"{home}/{name}" for home in homes for name in (".*", "bin")),
            *(*whole, *libraries, *module_paths, *map(_normalize, modules)),
            *(pattern for path in self._path_directories for pattern in _files_of_programs(path)),
        ]
        self._excluded = _compile(patterns)
        self._exceptions = _compile(EXCEPTIONS)
        self._excluded_from_exceptions = _compile(EXCLUDED_FROM_EXCEPTIONS)
        programs = [f"{path}/*" for path in self._path_directories]
        all_patterns = [*patterns, *EXCLUDED_FROM_EXCEPTIONS, *programs]
        self._parents = {str(parent) for pattern in all_patterns for parent in PurePosixPath(pattern).parents}

    def carries(self, path: str, entry: FileEntry) -> bool:
        """Return whether the agent's version of `path` is carried over.

        Links and executable files are not carried over if their directory is in PATH or contained a Python
        interpreter.
        """
        if entry.kind not in "fdl" or not self._is_allowed(path):
            return False
        if entry.kind != "d" and (
            path in self._parents or (entry.kind == "l" and re.fullmatch(r"/home/[^/]+", path))
        ):
            return False  # The entry would replace a directory that contains an excluded path.
        in_path = (path.rpartition("/")[0] or "/") in self._path_directories
        return not (in_path and (entry.kind == "l" or (entry.kind == "f" and entry.mode & 0o111)))

    def removes(self, path: str) -> bool:
        """Return whether the removal of `path` by the agent is carried over."""
        return (
            self._is_allowed(path)
            and path != ACCOUNTS
            and path not in self._parents
            and (path.rpartition("/")[0] or "/") not in self._path_directories
        )

    def _is_allowed(self, path: str) -> bool:
        if CUSTOMIZE_MODULES.search(path) or path == "/":
            return False
        if self._exceptions.match(path):
            return not self._excluded_from_exceptions.match(path)
        return not self._excluded.match(path)


def parse_listing(listing: bytes) -> dict[str, FileEntry]:
    """Parse a listing in `LISTING_FORMAT`. Return a map from path to entry.

    Raises AgentFault if the listing is malformed or too large.
    """
    if len(listing) >= MAX_LISTING_BYTES:
        raise AgentFault(
            ZeroReason.FILES_TOO_LARGE, f"the listing of the agent's files exceeds {MAX_LISTING_BYTES} bytes"
        )
    entries: dict[str, FileEntry] = {}
    try:
        for record in listing.decode("utf-8", "surrogateescape").split("\0")[:-1]:
            kind, mode, size, stamp, path = record.split(" ", 4)
            entries[path] = FileEntry(kind=kind, mode=int(mode, 8), size=int(size), stamp=stamp)
    except ValueError as error:
        raise AgentFault(
            ZeroReason.FILES_UNREADABLE, "the listing of the agent's files cannot be read"
        ) from error
    return entries


LISTING_FORMAT = r"%y %m %s %C@/%i %p\0"  # for the action -printf of `find`


def module_directories(files: Mapping[str, FileEntry]) -> list[str]:
    return [path for path, entry in files.items() if entry.kind == "d" and path.endswith(MODULE_DIRECTORIES)]


def interpreter_directories(files: Mapping[str, FileEntry]) -> list[str]:
    """Return the directories named `bin` that contain a Python interpreter."""
    return sorted(
        {
            path.rpartition("/")[0]
            for path, entry in files.items()
            if path.endswith(INTERPRETERS) and entry.kind != "d"
        }
    )


def changes_between(
    before: Mapping[str, FileEntry], after: Mapping[str, FileEntry], rules: CarryRules
) -> FileChanges:
    """Return the changes from `before` to `after`. Raises AgentFault if they exceed the limits."""
    changed = {path: entry for path, entry in after.items() if before.get(path) != entry}
    carried = {path: entry for path, entry in changed.items() if rules.carries(path, entry)}
    # The directories whose owner lacks a part of OWNER_ACCESS. The archive restores their modes, so it must
    # contain the parents of changed files.
    locked = {
        path
        for path, entry in before.items()
        if entry.kind == "d" and entry.mode & OWNER_ACCESS != OWNER_ACCESS
    }
    for parent in locked.intersection([path.rpartition("/")[0] for path in carried], after):
        if rules.carries(parent, after[parent]):
            carried[parent] = after[parent]
    replaced = [path for path, entry in carried.items() if path in before and before[path].kind != entry.kind]
    missing = [path for path in before if path not in after]
    removed = _outermost(path for path in [*missing, *replaced] if rules.removes(path))
    check_limits(len(carried), sum(entry.size for entry in carried.values() if entry.kind == "f"))
    links = frozenset(path for path, entry in before.items() if entry.kind == "l").difference(removed)
    removed_paths = {*removed}
    affected = {*carried, *removed, *(path.rpartition("/")[0] for path in removed)}
    unlocked = [path for path in locked if path in affected or is_below(path, removed_paths)]
    return FileChanges(carried=carried, removed=removed, unlocked=unlocked, symlinks=links)


def check_limits(num_members: int, num_bytes: int) -> None:
    """Raise AgentFault if the changed files are too many or too large."""
    if num_members > MAX_MEMBERS:
        raise AgentFault(
            ZeroReason.FILES_TOO_LARGE,
            f"the agent changed {num_members} files; at most {MAX_MEMBERS} are graded",
        )
    if num_bytes > MAX_BYTES:
        raise AgentFault(
            ZeroReason.FILES_TOO_LARGE,
            f"the files that the agent changed have {num_bytes} bytes; at most {MAX_BYTES} are graded",
        )


@dataclass(kw_only=True, slots=True)
class ArchiveSize:
    """The number of members of an archive and of the bytes of their contents."""

    members: int = 0
    bytes: int = 0


class FilteredArchive:
    """A tar archive of the members that the rules carry over. Its methods block; call them in a thread.

    `accounts` is the content of /etc/passwd before the agent acted. `baseline` is the size of the members
    that do not count towards the limits, because they existed before the agent acted.
    """

    def __init__(
        self,
        target: IO[bytes],
        rules: CarryRules,
        changes: FileChanges,
        *,
        accounts: bytes = b"",
        baseline: ArchiveSize | None = None,
    ) -> None:
        self._archive = tarfile.TarFile(
            fileobj=target, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape"
        )
        self._rules = rules
        self._changes = changes
        self._accounts = accounts
        self._baseline = baseline or ArchiveSize()
        self._links = set(changes.symlinks)
        self._below_link: dict[str, bool] = {}  # directory -> whether it is a link or below one
        self._file_modes: dict[str, int] = {}  # path -> mode of each regular file that was added
        self._added_names: dict[str, str] = {}  # path of a file that was not added -> its hard link that was
        self._locked: dict[str, tarfile.TarInfo] = {}  # path -> entry with the original mode
        self.size = ArchiveSize()

    def add(
        self,
        source: IO[bytes],
        directory: str = "/",
        *,
        keep: Callable[[str], bool] = lambda path: True,
        max_members: int | None = None,
    ) -> None:
        """Add the members of the archive `source` that are carried over and for whose path `keep` is true.
        Only the first `max_members` members are read (None: all). The names of the members in `source` are
        relative to `directory`. A hard link to a file that is not added becomes a file with the contents of
        that file.

        Raises AgentFault if `source` is not a tar archive or exceeds the limits.
        """
        files: dict[str, tarfile.TarInfo] = {}
        source.seek(0)
        try:
            with tarfile.open(fileobj=source, mode="r:", errors="surrogateescape") as archive:
                for member in islice(archive, max_members):
                    path = _normalize(f"{directory}/{member.name}")
                    if member.isreg():
                        files[path] = member
                    if keep(path):
                        self._add(archive, member, directory, files)
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
            raise AgentFault(
                ZeroReason.FILES_UNREADABLE, f"the agent's files cannot be read: {error}"
            ) from error

    def close(self) -> None:
        """Add the modes of the locked directories, the deepest first, and end the archive."""
        for path in sorted(self._locked, reverse=True):
            if path not in self._links and not self._is_below_link(path):
                self._archive.addfile(self._locked[path])
        self._archive.close()

    def _add(
        self,
        archive: tarfile.TarFile,
        member: tarfile.TarInfo,
        directory: str,
        files: Mapping[str, tarfile.TarInfo],
    ) -> None:
        """Add a member. `files` are the regular files of the archive up to this member."""
        path = _normalize(f"{directory}/{member.name}")
        kind = _kind(member)
        listed = self._changes.carried.get(path)
        mode = member.mode if listed is None else listed.mode
        if ".." in path.split("/") or len(path.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            return
        if "\0" in f"{path}{member.linkname}":
            return  # The archive is forged: the program that unpacks it would cut the name at this byte.
        link_target = _normalize(f"{directory}/{member.linkname}")
        if member.islnk():  # A hard link has the mode of its file.
            name = self._added_names.get(link_target, link_target)
            if name in self._file_modes:
                link_target, mode = name, self._file_modes[name]
            elif link_target in files:
                member = files[link_target]
                mode = member.mode
            else:
                return
        if not self._rules.carries(path, FileEntry(kind=kind, mode=mode, size=member.size)):
            return
        if self._is_below_link(path):
            return  # Unpacking would follow the link.
        if path == ACCOUNTS and not (member.isreg() and member.size <= MAX_ACCOUNTS_BYTES):
            return
        copy = tarfile.TarInfo(path.lstrip("/"))
        copy.mode = mode & 0o7777
        copy.uid, copy.gid, copy.mtime = member.uid, member.gid, int(member.mtime)
        if member.islnk():
            copy.type, copy.linkname = tarfile.LNKTYPE, link_target.lstrip("/")
        elif member.issym():
            if leads_to_verifier(path, member.linkname):
                return
            copy.type, copy.linkname = tarfile.SYMTYPE, member.linkname
            self._set_link(path, True)
        elif member.isdir():
            copy.type = tarfile.DIRTYPE
            self._set_link(path, False)
            self._locked.pop(path, None)
            if mode & OWNER_ACCESS != OWNER_ACCESS:
                self._locked[path] = copy
                copy = copy.replace(mode=copy.mode | OWNER_ACCESS)
        else:
            copy.size = member.size
            self._file_modes[path] = mode
            if (name := _normalize(f"{directory}/{member.name}")) != path:
                self._added_names[name] = path
        self.size.members += 1
        self.size.bytes += copy.size
        check_limits(self.size.members - self._baseline.members, self.size.bytes - self._baseline.bytes)
        content = archive.extractfile(member) if copy.isreg() else None
        if path == ACCOUNTS and content is not None:
            accounts = merged_accounts(self._accounts, content.read())
            copy.size, content = len(accounts), io.BytesIO(accounts)
        self._archive.addfile(copy, content)

    def _is_below_link(self, path: str) -> bool:
        """Return whether a directory above `path` is a symbolic link.

        An agent can nest thousands of directories, so the result for each directory is kept.
        """
        directories = []
        directory = path.rpartition("/")[0]
        while directory and directory not in self._below_link:
            directories.append(directory)
            directory = directory.rpartition("/")[0]
        is_below_link = self._below_link[directory] if directory else False
        for directory in reversed(directories):
            is_below_link = is_below_link or directory in self._links
            self._below_link[directory] = is_below_link
        return is_below_link

    def _set_link(self, path: str, is_link: bool) -> None:
        if is_link != (path in self._links):
            (self._links.add if is_link else self._links.remove)(path)
            if path in self._below_link:
                self._below_link.clear()


def merged_accounts(before: bytes, after: bytes) -> bytes:
    """Return the lines of an earlier /etc/passwd, and then the lines of users that only a later one has.

    A changed entry, or an entry before that of the same user, could give the verifier another shell or
    another home directory.

    >>> merged_accounts(b"root:x:0:0::/root:/bin/sh", b"root:x:0:0::/app:/app/sh\\na:x:7:7::/a:/bin/sh\\n")
    b'root:x:0:0::/root:/bin/sh\\na:x:7:7::/a:/bin/sh\\n'
    """
    lines = before.splitlines()
    names = {line.partition(b":")[0] for line in lines}
    new = [line for line in map(bytes.strip, after.splitlines()) if line.partition(b":")[0] not in names]
    return b"".join(line + b"\n" for line in [*lines, *new] if line)


def leads_to_verifier(path: str, target: str) -> bool:
    """Return whether a symbolic link at `path` leads to one of `VERIFIER_PATHS`, to a path below it, or to a
    directory that contains it.

    A target with `..` after a name also counts, because its destination depends on other links.

    >>> targets = ("answer.txt", "/tests/a", "../tests/a", "..", "x/../../tests/a")
    >>> [leads_to_verifier("/app/link", target) for target in targets]
    [False, True, True, True, True]
    """
    parts = [] if target.startswith("/") else [part for part in path.split("/")[:-1] if part]
    has_name = False
    for part in target.split("/"):
        if part == "..":
            if has_name:
                return True
            del parts[-1:]
        elif part not in ("", "."):
            has_name = True
            parts.append(part)
    destination = f"/{'/'.join(parts)}"
    prefix = f"{destination.rstrip('/')}/"
    return any(
        destination == reserved or destination.startswith(f"{reserved}/") or reserved.startswith(prefix)
        for reserved in VERIFIER_PATHS
    )


def is_below(path: str, directories: Collection[str]) -> bool:
    """Return whether an absolute path is below one of `directories`, which are not `/`.

    >>> is_below("/a/b/c", {"/a"}), is_below("/a", {"/a"})
    (True, False)
    """
    end = path.find("/", 1)
    while end > 0:
        if path[:end] in directories:
            return True
        end = path.find("/", end + 1)
    return False


def is_same_or_below(path: str, directory: str) -> bool:
    """Return whether an absolute path is `directory` or is below it.

    >>> is_same_or_below("/a/b", "/a"), is_same_or_below("/ab", "/a"), is_same_or_below("/a", "/")
    (True, False, True)
    """
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def probe_changes(archive: IO[bytes]) -> FileChanges:
    """Write an archive with one empty file that no verifier reads. Return the changes that the archive
    contains. Unpacking the archive shows whether an environment accepts files.
    """
    with tarfile.TarFile(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo(PROBE_FILE.lstrip("/")))
    return FileChanges(carried={PROBE_FILE: FileEntry(kind="f", mode=0o644, size=0)})


def _kind(member: tarfile.TarInfo) -> str:
    """Return the type letter that `find` has for a member; a hard link is a file."""
    if member.isdir():
        return "d"
    if member.issym():
        return "l"
    return "f" if member.isreg() or member.islnk() else "?"


def _normalize(path: str) -> str:
    """Return an absolute path without empty and `.` components.

    >>> _normalize("./app//x/")
    '/app/x'
    """
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def _files_of_programs(directory: str) -> list[str]:
    """Return patterns of the files that the programs in `directory` load: shared libraries (RPATH), the
    standard library of Python, pyvenv.cfg, which can name another standard library, and the scripts that
    activate a virtual or conda environment.
    """
    prefix = directory.rpartition("/")[0]
    libraries = [f"{prefix}/{name}/{file}" for name in ("lib", "lib64") for file in ("python3*", "*.so*")]
    settings = [f"{prefix}/{name}" for name in ("pyvenv.cfg", "condabin", "etc/conda", "etc/profile.d")]
    return [f"{directory}/pyvenv.cfg", f"{directory}/activate*", *settings, *libraries]


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return `paths` without those that are below another path of `paths`."""
    outermost: set[str] = set()
    for path in sorted(set(paths), key=lambda path: path.count("/")):
        if not is_below(path, outermost):
            outermost.add(path)
    return sorted(outermost)


def _compile(patterns: Iterable[str]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(pattern).replace(r"\*", "[^/]*") for pattern in patterns)
    return re.compile(f"(?:{alternatives})(?:/|$)", re.DOTALL)
