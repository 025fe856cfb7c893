"""Parse the part of the Dockerfile language that a sandbox supports: one stage, local files, and commands
that need no network.

    FROM (any image; the host's /usr replaces it)  ARG  ENV  WORKDIR  COPY  ADD of local files  RUN  USER root
    SHELL with sh or bash and the options -e, -u, -x and -o pipefail
    ignored: CMD ENTRYPOINT EXPOSE LABEL MAINTAINER VOLUME HEALTHCHECK STOPSIGNAL

Unsupported instructions, forms and options raise a ConfigError with the line number before the build starts.

This file is long because it is one parser.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from docker.utils import exclude_paths

from src.core.errors import ConfigError
from src.envs.sandbox.bubblewrap import Shell
from src.envs.sandbox.launch import BASE_ENVIRONMENT
from src.envs.sandbox.network import PROGRAMS
from src.envs.sandbox.rootfs import installed_packages
from src.envs.sandbox.shell_commands import apt_packages, commands, needs_network

IGNORED = frozenset(
    ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "VOLUME", "HEALTHCHECK", "STOPSIGNAL")
)
DIRECTIVE = re.compile(r"\s*#\s*(\w+)\s*=\s*(.*?)\s*$")  # in the first lines of a file
CONTINUES = re.compile(r"(?<!\\)\\[ \t]*$")  # a backslash at the end of a line
HERE_DOCUMENT_OR_QUOTED = re.compile(
    r"""(?<!\S)\d*<<-?(['"]?)([\w.-]+)\1(?!\S)|'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL
)
RUN_OPTIONS = re.compile(r"(?:--\w+=\S+\s+)*")
QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
LITERAL_DOLLAR = "\ue000"  # stands for a `$` that is not expanded, because of quotes or a backslash
# A word after an operator can contain one more level of braces.
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])((?:[^{}]|\{[^{}]*\})*))?\})")
SHELL_FORM = re.compile(r"(?:\S*/)?(sh|bash)((?: -[eux]+| -[eux]*o pipefail)*) (-[eux]*c)")
USE_DOCKER = "use environment_type=docker for this task"
USE_SANDBOX = "try environment_type=sandbox"


class _InvalidLine(ValueError):
    """An instruction is invalid or not supported. `parse_dockerfile` adds the file and the line number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A shell script to run in `workdir`."""

    script: str
    workdir: str
    environment: Mapping[str, str]
    line: int
    shell: Shell = "sh"


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Files and directories of the build context to copy, each with its absolute path in the sandbox."""

    files: tuple[tuple[Path, str], ...]
    mode: int | None  # None: keep the modes of the files
    line: int
    is_one_file: bool = False  # True: if the path in the sandbox is a directory, the file is copied into it


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeDirectory:
    """A directory to create with its parents."""

    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildPlan:
    """The build steps of a Dockerfile in order, and the environment and working directory of the commands
    that run in the built sandbox."""

    steps: tuple[Run | Copy | MakeDirectory, ...] = ()
    environment: Mapping[str, str]
    workdir: str = "/"
    image: str | None = None  # named by FROM, but the sandbox does not use it; None: no Dockerfile


def parse_dockerfile(path: Path) -> BuildPlan:
    """Parse a Dockerfile whose directory is the build context. Raises ConfigError if the Dockerfile is
    invalid or needs something that the sandbox does not support.
    """
    steps: list[Run | Copy | MakeDirectory] = []
    environment: dict[str, str] = {}
    arguments: dict[str, str] = {}
    workdir = "/"
    stages, image = 0, ""
    shell: Shell = "sh"
    shell_options = ""  # a line that sets the options of the shell
    context = path.parent.resolve()
    is_excluded = _ignore_rules(path)

    for line, instruction, value in _instructions(path):
        try:
            variables = {"PATH": BASE_ENVIRONMENT["PATH"], **arguments, **environment}
            match instruction:
                case "FROM":
                    stages += 1
                    if stages > 1:
                        raise _refusal("build more than one stage")
                    words = [word for word in _split(value) if not word.startswith("--")]
                    image = _expand(words[0], variables) if words else ""
                case "ARG":
                    for item in _split(value):
                        name, has_default, default = item.partition("=")
                        if has_default or name not in arguments:
                            arguments[name] = _expand(default, variables)
                case "ENV":
                    environment.update(_environment(value, variables))
                case "WORKDIR":
                    workdir = str(PurePosixPath(workdir) / _expand(_unquoted(value), variables))
                    steps.append(MakeDirectory(path=workdir))
                case "USER":
                    if value.split(":")[0] not in ("root", "0"):
                        raise _refusal(f"run as the user {value}")
                case "COPY" | "ADD":
                    unpacks = instruction == "ADD"
                    steps.append(
                        _copy(line, value, variables, workdir, context, is_excluded, unpacks=unpacks)
                    )
                case "SHELL":
                    if (form := SHELL_FORM.fullmatch(" ".join(_words(value)))) is None:
                        raise _refusal(f"use SHELL {value}")
                    shell = "bash" if form[1] == "bash" else "sh"
                    options = f"{form[2]} {form[3].removesuffix('c').rstrip('-')}".strip()
                    shell_options = f"set {options}\n" if options else ""
                case "RUN":
                    script = _run_script(value)
                    if reason := why_not_runnable(script):
                        raise _refusal(reason)
                    run_shell = shell
                    if interpreter := re.match(r"#!\s*(.*)", script):
                        run_shell = _interpreter_shell(interpreter[1].strip())
                    else:
                        script = f"{shell_options}{script}"
                    steps.append(
                        Run(
                            script=script,
                            workdir=workdir,
                            environment=variables,
                            line=line,
                            shell=run_shell,
                        )
                    )
                case _ if instruction in IGNORED:
                    pass
                case _:
                    raise _refusal(f"execute {instruction}")
        except _InvalidLine as error:
            raise ConfigError(f"{path}:{line}: {error}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}:{line}: {instruction}: {error}; correct this line") from None
    if stages == 0:
        raise ConfigError(f"{path}: no FROM line; add one")
    return BuildPlan(steps=tuple(steps), environment=environment, workdir=workdir, image=image)


def why_not_runnable(script: str) -> str | None:
    """Return the first action of a RUN script that the sandbox cannot do, such as installing a missing
    package. Return None if no such action is found; the script can still fail.
    """
    for words in commands(script):
        missing = [
            package for package in apt_packages(words) if not is_installed(re.split("[=:]", package)[0])
        ]
        if missing:
            return f"install {' '.join(missing)}"
        if network_command := needs_network(words):
            return f"reach the network for `{network_command}`"
    return None


def is_installed(package: str) -> bool:
    """Return whether the host, and therefore every sandbox, has a package or a program with this name."""
    return shutil.which(package, path=PROGRAMS) is not None or package in installed_packages()


def _ignore_rules(dockerfile: Path) -> Callable[[Path], bool]:
    """Return a function that tells whether .dockerignore excludes a path of the build context.

    As in Docker, a file `NAME.dockerignore` beside the Dockerfile `NAME` replaces .dockerignore. The file
    .dockerignore itself is never excluded. Raises ConfigError for an invalid pattern.
    """
    context = dockerfile.parent.resolve()
    specific = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
    file = specific if specific.is_file() else context / ".dockerignore"
    if not file.is_file():
        return lambda path: False
    lines = map(str.strip, file.read_text(encoding="utf-8", errors="replace").splitlines())
    patterns = [line for line in lines if line and not line.startswith("#")]
    try:
        # Without `dockerfile=""`, the Dockerfile would never be excluded.
        included = exclude_paths(str(context), patterns, dockerfile="")
    except re.error as error:
        raise ConfigError(f"{file} has an invalid pattern ({error})") from error
    return lambda path: path != context and path.relative_to(context).as_posix() not in included


def _instructions(path: Path) -> list[tuple[int, str, str]]:
    """Return (line number, INSTRUCTION, value) tuples. Continuation lines are joined. The value of `RUN` with
    a here-document contains the lines of the here-document.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if (directive := DIRECTIVE.match(line)) is None:
            break
        if directive[1].lower() == "escape" and directive[2] != "\\":
            refusal = _refusal(f"use the escape character {directive[2]}")
            raise ConfigError(f"{path}:{number}: {refusal}")
    instructions: list[tuple[int, str, str]] = []
    index = 0
    while index < len(lines):
        first, text = index, lines[index].strip()
        index += 1
        if not text or text.startswith("#"):
            continue
        while CONTINUES.search(text) and index < len(lines):
            following = lines[index]
            index += 1
            if following.strip() and not following.lstrip().startswith("#"):
                text = CONTINUES.sub("", text) + following
        name, *values = text.split(maxsplit=1)
        value = values[0] if values else ""
        # Group 2 is the end marker of a here-document. Matches of quoted text have no group 2.
        marker = next((match for match in HERE_DOCUMENT_OR_QUOTED.finditer(value) if match[2]), None)
        if marker and name.upper() in ("COPY", "ADD"):
            raise ConfigError(f"{path}:{first + 1}: {_refusal(f'{name.upper()} a here-document')}")
        if marker and name.upper() == "RUN":
            end = next((i for i in range(index, len(lines)) if lines[i].strip() == marker[2]), len(lines))
            body = lines[index:end]
            index = end + 1
            # `RUN <<EOF` runs the body. With a command before or after the marker, the body is the input of
            # that command.
            command = RUN_OPTIONS.sub("", value, count=1)
            value = (
                value.removesuffix(command) + "\n".join(body)
                if command.strip() == marker[0]
                else f"{value}\n" + "\n".join([*body, marker[2]])
            )
        instructions.append((first + 1, name.upper(), value.strip()))
    return instructions


def _interpreter_shell(interpreter: str) -> Shell:
    """Return the shell that the first line of a script names. Other interpreters are refused."""
    name = interpreter.removeprefix("/usr/bin/env ").rpartition("/")[2]
    if name not in ("sh", "bash"):
        raise _refusal(f"run a here-document with {interpreter}")
    return "bash" if name == "bash" else "sh"


def _run_script(value: str) -> str:
    while match := re.match(r"--(mount|network|security)=(\S+)\s+", value):
        if match[1] == "mount" and not {"type=cache", "type=tmpfs"} & set(match[2].split(",")):
            raise _refusal(f"RUN with {match[0].strip()}")
        value = value[match.end() :]
    if value.startswith("["):
        try:
            return shlex.join(_words(value))
        except ValueError:  # the `[` command of a shell
            return value
    return value


def _words(value: str) -> list[str]:
    """Return the words of `a "b c"` or `["a", "b c"]`. Raises ValueError otherwise."""
    if not value.startswith("["):
        return _split(value)
    words = json.loads(value)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("a list of strings is expected")
    return words


def _refusal(action: str) -> _InvalidLine:
    return _InvalidLine(f"the sandbox cannot {action}; {USE_DOCKER}")


def _copy(
    line: int,
    value: str,
    variables: Mapping[str, str],
    workdir: str,
    context: Path,
    is_excluded: Callable[[Path], bool],
    *,
    unpacks: bool,
) -> Copy:
    """Parse COPY or ADD (`unpacks`). ADD of an archive is refused, because the sandbox does not unpack it."""
    instruction = "ADD" if unpacks else "COPY"
    mode, value = _copy_options(value, instruction=instruction)
    words = [_expand(word, variables) for word in _words(value)]
    if len(words) < 2:
        raise _InvalidLine(f"{instruction} needs a source and a destination")
    *sources, target = words
    into_directory = target.endswith("/") or target in (".", "./") or len(sources) > 1
    files: list[tuple[Path, str]] = []
    for source in sources:
        if re.match(r"(https?|git|ssh)://|git@", source):
            raise _refusal(f"fetch {source}")
        if unpacks and source.lower().endswith((".tar", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2")):
            raise _refusal(f"unpack {source} with ADD")
        files += _copied(
            source,
            PurePosixPath(workdir) / target,
            context,
            is_excluded,
            into_directory=into_directory,
            unpacks=unpacks,
        )
    is_one_file = len(files) == 1 and files[0][0].is_file() and not into_directory
    return Copy(files=tuple(files), mode=mode, line=line, is_one_file=is_one_file)


def _copy_options(value: str, *, instruction: str) -> tuple[int | None, str]:
    """Return the mode of --chmod and the text after the options."""
    mode: int | None = None
    while match := re.match(r"--(\w+)(?:=(\S+))?\s+", value):
        option, setting = match.groups()
        value = value[match.end() :]
        if option == "chmod" and setting and re.fullmatch(r"[0-7]{3,4}", setting):
            mode = int(setting, 8)
        elif option == "chown" and setting and set(setting.split(":")) <= {"root", "0"}:
            pass
        elif option != "link":
            raise _refusal(f"{instruction} with {match[0].strip()}")
    return mode, value


def _copied(
    source: str,
    target: PurePosixPath,
    context: Path,
    is_excluded: Callable[[Path], bool],
    *,
    into_directory: bool,
    unpacks: bool,
) -> list[tuple[Path, str]]:
    """Return the files of the build context that match `source`, each with its path in the sandbox."""
    relative = source.lstrip("/") or "."
    matches = [context / relative]
    if any(c in relative for c in "*?["):
        matches = [
            match for match in sorted(context.glob(relative)) if not (match.is_file() and is_excluded(match))
        ]
    files: list[tuple[Path, str]] = []
    for name, match in [(match.name, match.resolve()) for match in matches]:
        if (
            not match.is_relative_to(context)
            or not match.exists()
            or (match.is_file() and is_excluded(match))
        ):
            raise _InvalidLine(
                f"{source} does not exist in the build context {context}, or .dockerignore excludes it"
            )
        if match.is_dir():
            items = [item for item in sorted(match.rglob("*")) if not is_excluded(item)] or [match]
            files += [
                (item, str(PurePosixPath(target, item.relative_to(match).as_posix()))) for item in items
            ]
        elif unpacks and _is_archive(match):
            raise _refusal(f"unpack {source} with ADD")
        else:
            files.append((match, str(target / name if into_directory or len(matches) > 1 else target)))
    if not matches:
        raise _InvalidLine(
            f"{source} matches no file of the build context {context} that .dockerignore does not exclude"
        )
    return files


def _is_archive(file: Path) -> bool:
    """Return whether ADD unpacks a file. Docker decides by the content and not by the name."""
    try:
        with tarfile.open(file) as archive:
            return archive.next() is not None
    except Exception:  # tarfile and the modules for compression raise many types of exceptions
        return False


def _environment(value: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Parse `ENV a=1 b="2 3"` or the old form `ENV a 1`."""
    first, *rest = value.split(maxsplit=1)
    if "=" in first:
        pairs = [item.partition("=") for item in _split(value)]
        return {name: _expand(setting, variables) for name, _, setting in pairs}
    if not rest:
        raise ValueError(f"{first} has no value")
    return {first: _expand(_unquoted(rest[0]), variables)}


def _split(text: str) -> list[str]:
    """Split a text into words without quotes. A `$` that must not be expanded becomes LITERAL_DOLLAR."""
    return shlex.split(_protected(text))


def _unquoted(text: str) -> str:
    """Return a text without quotes, as `_split` returns a word, but with its white space."""
    lexer = shlex.shlex(_protected(text), posix=True, punctuation_chars=False)
    lexer.whitespace = lexer.commenters = ""
    lexer.whitespace_split = True
    return "".join(lexer)


def _protected(text: str) -> str:
    def protect(match: re.Match[str]) -> str:
        if match[0].startswith("'"):
            return match[0].replace("$", LITERAL_DOLLAR)
        return re.sub(r"\\(.)", lambda pair: LITERAL_DOLLAR if pair[1] == "$" else pair[0], match[0])

    return QUOTED.sub(protect, text)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand $NAME, ${NAME}, ${NAME:-default}, ${NAME:+alternative}, ${NAME-default} and ${NAME+alternative}
    as Docker does. Unknown names expand to nothing. Raises ValueError for other forms.
    """

    def value(match: re.Match[str]) -> str:
        plain, name, operator, word = match.groups()
        setting = variables.get(plain or name)
        is_used = setting is not None if operator in ("-", "+") else bool(setting)
        if operator in ("+", ":+"):
            return _expand(word, variables) if is_used else ""
        return (
            setting if setting is not None and (is_used or not operator) else _expand(word or "", variables)
        )

    expanded = VARIABLE.sub(value, text)
    if unknown := re.search(r"\$\{[^}]*\}?", VARIABLE.sub("", text)):
        raise ValueError(f"the sandbox cannot expand {unknown[0]}")
    return expanded.replace(LITERAL_DOLLAR, "$")
