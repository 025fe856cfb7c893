"""Which of an agent's files are taken into the fresh environment that grades its trial, and a clean archive of them.

Everything here runs on the host. The listing and the archive come from the agent's environment, where the agent may have replaced every
program: they are data that the agent made. Whatever they say, the result is a set of files that the agent could have made itself, less
the places in `SEARCHED` and `STARTUP`, from which the programs of a verifier load code.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath
from typing import IO

from src.core.errors import AgentFault
from src.core.trajectory import ZeroReason

MAX_MEMBERS = 100_000
MAX_BYTES = 2**30
MAX_LISTING_BYTES = 64 * 2**20
MAX_NAME_BYTES = 4096

# Nothing at or below these paths is taken. `*` stands for any characters but a slash.
SEARCHED = (  # programs, shared libraries, modules of interpreters
    *(
        "/bin",
        "/sbin",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/usr",
        "/snap",
        "/etc/alternatives",
        "/node_modules",
    ),
    *("/home/*/bin", "/root/bin", "/home/*/node_modules", "/root/node_modules"),
)
STARTUP = (  # files that programs read when they start
    *(
        "/etc/ld.so.*",
        "/etc/environment",
        "/etc/profile",
        "/etc/profile.d",
        "/etc/bash*",
        "/etc/z*",
        "/etc/csh*",
        "/etc/fish",
    ),
    *(
        "/etc/security",
        "/etc/pam.d",
        "/etc/nsswitch.conf",
        "/etc/cron*",
        "/etc/init.d",
        "/etc/rc*",
        "/etc/systemd",
        "/var/spool/cron",
    ),
    *(
        "/etc/perl",
        "/etc/python*",
        "/etc/node*",
        "/etc/npmrc",
        "/etc/ruby*",
        "/etc/php*",
        "/etc/R",
        "/etc/pip.conf",
        "/etc/uv",
    ),
    *(
        "/etc/gitconfig",
        "/etc/ssl/openssl.cnf",
        "/etc/ssh",
        "/etc/tmux.conf",
        "/etc/screenrc",
        "/etc/vim",
        "/etc/inputrc",
    ),
    *("/etc/wgetrc", "/etc/curlrc"),
    *(
        "/home/*/.*",
        "/root/.*",
    ),  # every hidden file of a home directory: shells, git, pip, ~/.local with its interpreters' modules
    *(
        f"{place}/{name}"  # pytest looks for these from its tests upwards
        for place in ("", "/root", "/home/*")
        for name in ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
    ),
)
NEVER_FILES = (
    "/tests",
    "/logs/verifier",
    "/proc",
    "/sys",
    "/dev",
    "/.sandbox",
    "/.dockerenv",
    "/etc/hosts",
    "/etc/hostname",
)
NEVER_FILES += ("/etc/resolv.conf", "/etc/mtab", "/var/lib/apt", "/var/cache/apt")
# Exceptions to the above: no program loads code from them.
TAKEN = ("/usr/local/share", "/usr/local/src", "/dev/shm")
NOT_TAKEN_AFTER_ALL = ("/usr/local/share/perl", "/usr/local/share/python*", "/usr/local/share/sandbox")
# Where no symbolic link of the agent's may lead: the verifier would read the expected answer, or its own input, in place of a file.
VERIFIER_PLACES = (
    "/tests",
    "/logs/verifier",
    "/proc",
    "/sys",
    "/dev/fd",
    "/dev/stdin",
    "/dev/stdout",
    "/dev/stderr",
    "/.sandbox",
)
PROBE_FILE = "/var/tmp/grading-probe"
MODULE_DIRECTORIES = ("site-packages", "dist-packages")  # where they existed before the agent acted
ANYWHERE = re.compile(r"/(?:site|user)customize(?:[./]|$)|/__pycache__/(?:site|user)customize\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file of a listing."""

    kind: str  # as find says it: f, d, l, ...
    mode: int
    size: int
    stamp: str = ""  # changes with every change of the file, which its modification time need not


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What an agent changed, in the places that are taken."""

    taken: Mapping[str, Entry] = field(default_factory=dict)
    removed: Sequence[str] = ()  # to be removed before the archive is unpacked
    symlinks: frozenset[str] = frozenset()  # of the environment as it was before, less those removed

    @property
    def any(self) -> bool:
        return bool(self.taken or self.removed)


class CarryRules:
    """The table above, with what a task's own environment variables add to it.

    >>> rules = CarryRules({"PATH": "/opt/tool/bin:/usr/bin"})
    >>> [rules.takes(path, Entry(kind="f", mode=0o755, size=1)) for path in ("/app/run", "/opt/tool/bin/cat", "/root/.bashrc", "/root/a")]
    [True, False, False, True]
    """

    def __init__(self, environment: Mapping[str, str], modules: Iterable[str] = ()) -> None:
        """`modules` are directories of interpreters' modules that were there before the agent."""
        own = [path for path in environment.get("PATH", "").split(":") if path.startswith("/")]
        libraries = [
            path for path in environment.get("LD_LIBRARY_PATH", "").split(":") if path.startswith("/")
        ]
        home = environment.get("HOME", "/root").rstrip("/")
        homes = [f"{home}/.*", f"{home}/bin"] if home else []
        patterns = [*SEARCHED, *STARTUP, *NEVER_FILES, *homes, *map(_plain, [*libraries, *modules])]
        self._programs = {_plain(path) for path in own}
        self._never = _matching(patterns)
        self._taken = _matching(TAKEN)
        self._not_after_all = _matching(NOT_TAKEN_AFTER_ALL)
        everything = [*patterns, *NOT_TAKEN_AFTER_ALL, *(f"{path}/*" for path in self._programs)]
        self._above = {str(parent) for pattern in everything for parent in PurePosixPath(pattern).parents}

    def takes(self, path: str, entry: Entry) -> bool:
        """Whether the agent's version of `path` is taken."""
        if entry.kind not in "fdl" or not self._is_free(path):
            return False
        if entry.kind != "d" and (
            path in self._above or (entry.kind == "l" and re.fullmatch(r"/home/[^/]+", path))
        ):
            return False  # it would stand in for a directory in which programs look
        in_path = str(PurePosixPath(path).parent) in self._programs
        return not (in_path and (entry.kind == "l" or (entry.kind == "f" and entry.mode & 0o111)))

    def removes(self, path: str) -> bool:
        """Whether `path` is removed where the agent removed it."""
        return (
            self._is_free(path)
            and path not in self._above
            and str(PurePosixPath(path).parent) not in self._programs
        )

    def _is_free(self, path: str) -> bool:
        if ANYWHERE.search(path) or path == "/":
            return False
        if self._taken.match(path):
            return not self._not_after_all.match(path)
        return not self._never.match(path)


def carry_rules(environment: Mapping[str, str], modules: Iterable[str] = ()) -> CarryRules:
    """`CarryRules`, made once for all trials whose environments are equal."""
    return _carry_rules(tuple(sorted(environment.items())), tuple(sorted(modules)))


@lru_cache(maxsize=64)
def _carry_rules(environment: tuple[tuple[str, str], ...], modules: tuple[str, ...]) -> CarryRules:
    return CarryRules(dict(environment), modules)


def parse_listing(listing: bytes) -> dict[str, Entry]:
    """The records of `LISTING_FORMAT`, each ended by a NUL. AgentFault for anything else."""
    if len(listing) >= MAX_LISTING_BYTES:
        raise AgentFault(
            ZeroReason.FILES_TOO_LARGE, f"the agent left more files than {MAX_LISTING_BYTES} bytes can list"
        )
    found: dict[str, Entry] = {}
    try:
        for record in listing.decode("utf-8", "surrogateescape").split("\0")[:-1]:
            kind, mode, size, stamp, path = record.split(" ", 4)
            found[path] = Entry(kind=kind, mode=int(mode, 8), size=int(size), stamp=stamp)
    except ValueError as error:
        raise AgentFault(
            ZeroReason.FILES_UNREADABLE, "the listing of the agent's files cannot be read"
        ) from error
    return found


LISTING_FORMAT = r"%y %m %s %C@/%i %p\0"  # of find's -printf


def module_directories(files: Mapping[str, Entry]) -> list[str]:
    return [path for path, entry in files.items() if entry.kind == "d" and path.endswith(MODULE_DIRECTORIES)]


def changes_between(before: Mapping[str, Entry], after: Mapping[str, Entry], rules: CarryRules) -> Changes:
    """What is to be taken and removed so that a copy of `before` becomes `after`. AgentFault where that is too much."""
    changed = {path: entry for path, entry in after.items() if before.get(path) != entry}
    taken = {path: entry for path, entry in changed.items() if rules.takes(path, entry)}
    replaced = [path for path, entry in taken.items() if path in before and before[path].kind != entry.kind]
    gone = [path for path in before if path not in after]
    removed = _outermost(path for path in [*gone, *replaced] if rules.removes(path))
    check_bounds(len(taken), sum(entry.size for entry in taken.values() if entry.kind == "f"))
    links = frozenset(path for path, entry in before.items() if entry.kind == "l").difference(removed)
    return Changes(taken=taken, removed=removed, symlinks=links)


def check_bounds(num_members: int, num_bytes: int) -> None:
    if num_members > MAX_MEMBERS:
        raise AgentFault(
            ZeroReason.FILES_TOO_LARGE,
            f"the agent left {num_members} changed files; at most {MAX_MEMBERS} are graded",
        )
    if num_bytes > MAX_BYTES:
        raise AgentFault(
            ZeroReason.FILES_TOO_LARGE,
            f"the agent left {num_bytes} bytes of changed files; at most {MAX_BYTES} are graded",
        )


class CleanArchive:
    """An archive that holds nothing but what the rules take. Blocking: fill it in a thread."""

    def __init__(self, target: IO[bytes], rules: CarryRules, changes: Changes) -> None:
        self._archive = tarfile.TarFile(
            fileobj=target, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape"
        )
        self._rules = rules
        self._changes = changes
        self._links = set(changes.symlinks)
        self._files: set[str] = set()
        self.num_members = 0
        self._num_bytes = 0

    def add(self, source: IO[bytes], place: str = "/", *, stream: bool = False) -> None:
        """Every member of an archive that lies below `place` and is taken. AgentFault where it is no archive, or too large."""
        try:
            with tarfile.open(
                fileobj=source, mode="r|" if stream else "r:", errors="surrogateescape"
            ) as archive:
                for member in archive:
                    self._add(archive, member, place)
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
            raise AgentFault(
                ZeroReason.FILES_UNREADABLE, f"the agent's files cannot be read: {error}"
            ) from error

    def close(self) -> None:
        self._archive.close()

    def _add(self, archive: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> None:
        path = _plain(f"{place}/{member.name}")
        kind = (
            "d"
            if member.isdir()
            else "l"
            if member.issym()
            else "f"
            if member.isreg() or member.islnk()
            else "?"
        )
        listed = self._changes.taken.get(path)
        mode = member.mode if listed is None else listed.mode
        if ".." in path.split("/") or len(path.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            return
        if not self._rules.takes(path, Entry(kind=kind, mode=mode, size=member.size)):
            return
        if any(str(parent) in self._links for parent in PurePosixPath(path).parents):
            return  # unpacking would follow the link
        clean = tarfile.TarInfo(path.lstrip("/"))
        clean.mode, clean.uid, clean.gid, clean.mtime = (
            mode & 0o7777,
            member.uid,
            member.gid,
            int(member.mtime),
        )
        if member.islnk():
            target = _plain(f"{place}/{member.linkname}")
            if target not in self._files:
                return
            clean.type, clean.linkname = tarfile.LNKTYPE, target.lstrip("/")
        elif member.issym():
            if leads_to_the_verifier(path, member.linkname):
                return
            clean.type, clean.linkname = tarfile.SYMTYPE, member.linkname
            self._links.add(path)
        elif member.isdir():
            clean.type = tarfile.DIRTYPE
            self._links.discard(path)
        else:
            clean.size = member.size
            self._files.add(path)
        self.num_members += 1
        self._num_bytes += clean.size
        check_bounds(self.num_members, self._num_bytes)
        self._archive.addfile(clean, archive.extractfile(member) if clean.isreg() else None)


def leads_to_the_verifier(path: str, target: str) -> bool:
    """Whether a symbolic link at `path` leads to, or to a directory above, a place of `VERIFIER_PLACES`.

    A target with `..` after a name is refused: where it leads depends on other links.

    >>> [leads_to_the_verifier("/app/link", target) for target in ("answer.txt", "/tests/a", "../tests/a", "..", "x/../../tests/a")]
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
    place = f"/{'/'.join(parts)}"
    below = f"{place.rstrip('/')}/"
    return any(
        place == other or place.startswith(f"{other}/") or other.startswith(below)
        for other in VERIFIER_PLACES
    )


def one_empty_file(archive: IO[bytes]) -> Changes:
    """Write an archive of one file that no verifier looks at, to try whether files can be laid down at all."""
    with tarfile.TarFile(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo(PROBE_FILE.lstrip("/")))
    return Changes(taken={PROBE_FILE: Entry(kind="f", mode=0o644, size=0)})


def _plain(path: str) -> str:
    """An absolute path without empty or `.` components.

    >>> _plain("./app//x/")
    '/app/x'
    """
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def _outermost(paths: Iterable[str]) -> list[str]:
    """Paths of which none lies below another."""
    chosen: set[str] = set()
    for path in sorted(set(paths), key=lambda path: path.count("/")):
        if not any(str(parent) in chosen for parent in PurePosixPath(path).parents):
            chosen.add(path)
    return sorted(chosen)


def _matching(patterns: Iterable[str]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(pattern).replace(r"\*", "[^/]*") for pattern in patterns)
    return re.compile(f"(?:{alternatives})(?:/|$)", re.DOTALL)
