"""The paths from which the programs of a task load code, according to its environment variables."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence

# Matches variables of the loader and of common programs that name files, or directories of files, with code
# or settings. Not every variable counts, because a task can name its data with a variable such as OUTPUT_DIR.
LOADED = re.compile(
    r"(?:LD|GCONV|OPENSSL|CURL|CCACHE|GIT_EXEC|GIT_TEMPLATE)_\w+|(?:GIT|NPM|PIP|UV|XDG)_CONFIG_\w+"
    r"|PYTHON(?!PATH)[A-Z]+|BASH_ENV|ENV|INPUTRC|WGETRC|HGRCPATH|PSQLRC|R_PROFILE|R_ENVIRON|ZDOTDIR",
    re.IGNORECASE,
)
# The variables that name the directories in which interpreters look for modules, or which contain programs.
MODULE_VARIABLES = (
    *("PYTHONPATH", "PERL5LIB", "NODE_PATH", "RUBYLIB", "R_LIBS", "R_LIBS_USER"),
    *("CARGO_HOME", "RUSTUP_HOME", "JAVA_HOME", "GRADLE_USER_HOME"),
)
# Programs read the hidden files of HOME. PWD is needed because a directory in /opt that contains the working
# directory of the task does not count as an installed program (`CarryRules`).
OTHER_VARIABLES = ("PATH", "HOME", "PWD")
TOOL = re.compile("/opt/[^/]+(?=/)")  # the directory of a program that is not in a standard directory
MAX_LINKS = 40  # on the way to one path, as in the kernel

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
    """Return the `search_variables` of all environments with the targets of symbolic links and with the
    tools to which links in PATH lead. HOME also contains the home directories of `accounts`, the contents of
    /etc/passwd.
    """
    variables = search_variables(*environments)
    homes = {"HOME": home_directories(accounts, variables["PWD"])}
    tools = await with_linked_tools(search_variables(variables, homes), run)
    return await with_link_targets(tools, run)


async def with_link_targets(variables: Mapping[str, str], run: RunScript) -> dict[str, str]:
    """Return `variables`, in which each path is followed by the paths to which its symbolic links lead. An
    agent could change the files there instead. `run` runs a script in the environment before the agent acts.
    """
    chains = {path: [path] for item in variables.items() for path in paths_of(*item) if path.startswith("/")}
    targets: dict[str, str] = {}  # path -> target of the link, or an empty text if the path is no link
    for _ in range(MAX_LINKS):
        unknown = {prefix for chain in chains.values() for prefix in _prefixes(chain[-1])} - targets.keys()
        targets |= await _read_links(sorted(unknown), run)
        followed = {path: _follow_first_link(chain[-1], targets) for path, chain in chains.items()}
        new = {path: next_path for path, next_path in followed.items() if next_path not in chains[path]}
        if not new:
            break
        for path, next_path in new.items():
            chains[path].append(next_path)
    return {
        name: ":".join(linked for path in paths_of(name, value) for linked in chains.get(path, [path]))
        for name, value in variables.items()
    }


async def with_linked_tools(variables: Mapping[str, str], run: RunScript) -> dict[str, str]:
    """Return `variables` with /opt/NAME/bin added to PATH for each directory /opt/NAME to which a link in a
    directory of PATH leads, such as /usr/local/bin/yarn -> /opt/yarn/bin/yarn. A directory that contains the
    working directory of the task is not added. `run` runs a script in the environment before the agent acts.
    """
    directories = [path for path in variables.get("PATH", "").split(":") if path.startswith("/")]
    quoted = " ".join(map(shlex.quote, dict.fromkeys([*directories, "/etc/alternatives"])))
    output = await run(
        f"for path in {quoted}; do printf '%s\\000' \"$path\"; ls -l -- \"$path\"; printf '\\000'; done"
    )
    fields = output.decode("utf-8", "surrogateescape").split("\0")
    linked = {
        posixpath.normpath(posixpath.join(directory, line.rpartition(" -> ")[2]))
        for directory, listing in zip(fields[::2], fields[1::2], strict=False)
        for line in listing.splitlines()
        if line.startswith("l")
    }
    tools = {match[0] for path in sorted(linked) if (match := TOOL.match(path))}
    workdirs = variables.get("PWD", "").split(":")
    tools = [
        tool for tool in sorted(tools) if not any(f"{path}/".startswith(f"{tool}/") for path in workdirs)
    ]
    return {**variables, "PATH": ":".join([*directories, *(f"{tool}/bin" for tool in tools)])}


def paths_of(name: str, value: str) -> list[str]:
    """Return the paths of the variable `name`. Only LD_PRELOAD may also be separated by spaces."""
    return re.split("[: ]" if name == "LD_PRELOAD" else ":", value)


async def _read_links(paths: Sequence[str], run: RunScript) -> dict[str, str]:
    if not paths:
        return {}
    quoted = " ".join(map(shlex.quote, paths))
    output = await run(f'for path in {quoted}; do printf \'%s\\000\' "$(readlink -- "$path")"; done')
    return dict(zip(paths, output.decode("utf-8", "surrogateescape").split("\0"), strict=False))


def _follow_first_link(path: str, targets: Mapping[str, str]) -> str:
    """Return `path` with the target of its first link in place of this link.

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
