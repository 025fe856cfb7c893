"""The paths from which the programs of a task load code, according to its environment variables."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import batched

from src.core.errors import SandboxError

# Matches variables of the loader and of common programs that name files, or directories of files, with code
# or settings. Not every variable counts, because a task can name its data with a variable such as OUTPUT_DIR.
LOADED = re.compile(
    r"(?:LD|GCONV|OPENSSL|CURL|GIT_EXEC|GIT_TEMPLATE)_\w+|CCACHE_(?!BASEDIR)\w+|(?:NPM|PIP|UV|XDG)_CONFIG_\w+"
    r"|GIT_CONFIG_(?!COUNT|KEY|VALUE)\w+|PYTHON(?!PATH)[A-Z]+|R_(?:PROFILE|ENVIRON)(?:_USER)?|BASH_ENV|ENV"
    r"|INPUTRC|WGETRC|HGRCPATH|PSQLRC|ZDOTDIR",
    re.IGNORECASE,
)
# The variables that name the directories in which interpreters look for modules, or which contain programs.
MODULE_VARIABLES = (
    *("PYTHONPATH", "PERL5LIB", "NODE_PATH", "RUBYLIB", "R_LIBS", "R_LIBS_USER", "R_LIBS_SITE"),
    *("CARGO_HOME", "RUSTUP_HOME", "JAVA_HOME", "GRADLE_USER_HOME"),
)
# Programs read the hidden files of HOME. PWD is needed because a directory in /opt that contains the working
# directory of the task does not count as an installed program (`CarryRules`).
OTHER_VARIABLES = ("PATH", "HOME", "PWD")
TOOL = re.compile("/opt/[^/]+")  # a tool that is not in a standard directory
MAX_LINKS = 40  # on the way to one path, as in the kernel
MAX_PATHS = 500  # in one script, because Linux limits the length of an argument to 128 KiB
MAX_RUNS = 3  # of an incomplete script
END_OF_OUTPUT = b"end of output"  # a script prints this text last

# Takes a shell script and returns its standard output.
RunScript = Callable[[str], Awaitable[bytes]]


def search_variables(*environments: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in the tables above, with the paths of all environments, separated by colons."""
    variables: dict[str, str] = {}
    for environment in environments:
        for name, value in environment.items():
            if LOADED.fullmatch(name) or name in MODULE_VARIABLES or name in OTHER_VARIABLES:
                variables[name] = f"{variables[name]}:{value}" if name in variables else value
    return variables


def home_directories(accounts: bytes, workdirs: str) -> str:
    """Return the home directories in the contents of /etc/passwd, separated by colons, without `/` and
    without the working directories of the task.

    >>> home_directories(b"root:x:0:0::/root:/bin/sh\\nweb:x:7:7::/srv/web/:\\na:x:8:8::/app:", "/app")
    '/root:/srv/web'
    """
    fields = [line.split(":") for line in accounts.decode("utf-8", "surrogateescape").splitlines()]
    homes = dict.fromkeys(line[5].rstrip("/") for line in fields if len(line) > 5)
    return ":".join(home for home in homes if home.startswith("/") and home not in workdirs.split(":"))


async def search_paths(accounts: bytes, run: RunScript, *environments: Mapping[str, str]) -> dict[str, str]:
    """Return the `search_variables` of all environments with the targets of symbolic links. HOME also
    contains the home directories of `accounts`, the contents of /etc/passwd.
    """
    variables = search_variables(*environments)
    homes = {"HOME": home_directories(accounts, variables["PWD"])}
    return await with_link_targets(search_variables(variables, homes), run)


async def with_link_targets(variables: Mapping[str, str], run: RunScript) -> dict[str, str]:
    """Return `variables`, in which each path is followed by the paths to which its symbolic links lead. An
    agent could change the files there instead. `run` runs a script in the environment before the agent acts.
    """
    paths = {path for item in variables.items() for path in paths_of(*item) if path.startswith("/")}
    chains = await _link_chains(paths, run)
    return {
        name: ":".join(linked for path in paths_of(name, value) for linked in chains.get(path, [path]))
        for name, value in variables.items()
    }


async def linked_tools(search_path: str, run: RunScript) -> list[str]:
    """Return each path /opt/NAME to which a link in a directory of `search_path`, the value of PATH, or in
    /etc/alternatives leads, such as /opt/yarn for /usr/local/bin/yarn -> /opt/yarn/bin/yarn. `run` runs a
    script in the environment before the agent acts.
    """
    directories = {path for path in search_path.split(":") if path.startswith("/")} | {"/etc/alternatives"}
    output = await complete_output(
        # These variables of the image would change the format of the lines.
        "unset TIME_STYLE QUOTING_STYLE; export LC_ALL=C\n"
        f"for path in {_quoted(directories)}; do "
        "printf '%s\\000' \"$path\"; ls -l -- \"$path/\"; printf '\\000'; done",
        run,
    )
    fields = output.decode("utf-8", "surrogateescape").split("\0")
    linked = {
        posixpath.normpath(posixpath.join(directory, line.rpartition(" -> ")[2]))
        for directory, listing in zip(fields[:-1:2], fields[1::2], strict=True)
        for line in listing.splitlines()
        if line.startswith("l")
    }
    # A link to a file of these directories leads elsewhere only if this file is a link, which is listed too.
    linked = {path for path in linked if posixpath.dirname(path) not in directories}
    chains = await _link_chains(linked, run)
    return sorted({match[0] for chain in chains.values() for path in chain if (match := TOOL.match(path))})


def paths_of(name: str, value: str) -> list[str]:
    """Return the paths of the variable `name`. Only LD_PRELOAD may also be separated by spaces."""
    return re.split("[: ]" if name == "LD_PRELOAD" else ":", value)


async def _link_chains(paths: Iterable[str], run: RunScript) -> dict[str, list[str]]:
    """Return for each path the list of the path and of the paths to which its symbolic links lead, one link
    after the other.
    """
    known: dict[str, str] = {}  # path -> target of the link, or an empty text if the path is no link
    chains = {path: [path] for path in paths}
    for _ in range(MAX_LINKS):
        unknown = {prefix for chain in chains.values() for prefix in _prefixes(chain[-1])} - known.keys()
        known |= await _read_links(sorted(unknown), run)
        followed = {path: _follow_first_link(chain[-1], known) for path, chain in chains.items()}
        new = {path: next_path for path, next_path in followed.items() if next_path not in chains[path]}
        if not new:
            break
        for path, next_path in new.items():
            chains[path].append(next_path)
    return chains


async def _read_links(paths: Sequence[str], run: RunScript) -> dict[str, str]:
    targets: dict[str, str] = {}
    for batch in batched(paths, MAX_PATHS):
        output = await complete_output(
            f"for path in {_quoted(batch)}; do target=; "
            'if [ -L "$path" ]; then target=$(readlink -- "$path") || exit 1; fi; '
            "printf '%s\\000' \"$target\"; done",
            run,
        )
        fields = output.decode("utf-8", "surrogateescape").split("\0")
        targets |= zip(batch, fields[:-1], strict=True)
    return targets


async def complete_output(script: str, run: RunScript) -> bytes:
    """Return the output of a script that only reads, without the end that this function adds.

    On a loaded machine, the Docker engine sometimes loses the output of a command, so an incomplete script is
    run again, up to MAX_RUNS times. Then SandboxError is raised, because incomplete search paths would let
    the agent's programs into the environment of the verifier.
    """
    output = b""
    for _ in range(MAX_RUNS):
        output = await run(f"{script}\nprintf '{END_OF_OUTPUT.decode()}'")
        if output.endswith(END_OF_OUTPUT):
            return output.removesuffix(END_OF_OUTPUT)
    end = output[-200:].decode(errors="replace")
    raise SandboxError(f"the search paths of the task could not be read completely: {end!r}")


def _quoted(paths: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, sorted(paths)))


def _follow_first_link(path: str, targets: Mapping[str, str]) -> str:
    """Return `path` with the target of its first link in place of this link. `targets` maps each prefix of
    the path to the target of the link, or to an empty text if the prefix is no link.

    >>> _follow_first_link("/opt/tool/bin", {"/opt/tool": "tool-1.0"})
    '/opt/tool-1.0/bin'
    """
    for prefix in _prefixes(path):
        if target := targets.get(prefix):
            return posixpath.normpath(posixpath.join(posixpath.dirname(prefix), target) + path[len(prefix) :])
    return path


def _prefixes(path: str) -> list[str]:
    """Return the directories above `path` and `path` itself, beginning with the shortest.

    >>> _prefixes("/opt/tool/bin/")
    ['/opt', '/opt/tool', '/opt/tool/bin']
    """
    path = path.rstrip("/")
    return [path[:end] for end in range(1, len(path)) if path[end] == "/"] + ([path] if path else [])
