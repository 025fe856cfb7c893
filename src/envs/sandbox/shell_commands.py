"""Find the commands that a shell script runs, and tell which of them need the network or install a package.

The lexer handles quotes, escapes, comments, here-documents, substitutions, redirections and separators. It
does not expand variables. Names of programs in comments and strings do not count as commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
KEYWORDS = frozenset(
    {"if", "then", "elif", "else", "while", "until", "do", "!", "{", "}", "time", "done", "fi"}
)
WRAPPERS = frozenset(
    {"sudo", "env", "exec", "command", "nice", "nohup", "timeout", "xargs", "eval", "stdbuf", "retry"}
)
WITHOUT_NETWORK = frozenset({"--version", "--help", "-V", "--no-index", "--offline"})
LOCAL = re.compile(r"^(?:https?://)?(?:localhost|127\.\d+\.\d+\.\d+|\[?::1\]?|0\.0\.0\.0)(?:[:/]|$)|^file:")
ADDRESS = re.compile(r"://|\w\.\w")
REMOTE = re.compile(r"^(?:https?|git|ssh|ftp)://|^[\w.-]+@[\w.-]+:")
# Program -> subcommands, of one or two words, that need the network. An empty set means that the subcommand
# is not checked.
INSTALLERS = {
    "curl": frozenset[str](),
    "wget": frozenset[str](),
    "uvx": frozenset[str](),
    "npx": frozenset[str](),
    "pip": frozenset({"install", "download"}),
    "pipx": frozenset({"install", "run"}),
    "uv": frozenset(
        {
            *("add", "sync", "pip install", "pip sync", "pip compile"),
            *("tool install", "tool run", "tool upgrade", "python install", "python upgrade"),
        }
    ),
    "npm": frozenset({"install", "i", "ci", "add"}),
    "pnpm": frozenset({"install", "i", "add"}),
    "yarn": frozenset({"install", "add"}),
    "gem": frozenset({"install"}),
    "cargo": frozenset({"install", "fetch"}),
    "go": frozenset({"get", "install"}),
    "conda": frozenset({"install", "create"}),
    "mamba": frozenset({"install", "create"}),
    "git": frozenset({"clone", "fetch", "pull"}),
}


def commands(script: str) -> list[list[str]]:
    """Return the simple commands of a script as lists of words, without assignments, keywords and wrappers
    such as `sudo`.

    >>> commands("cd /app && A=1 sudo -E pip install 'a b'  # wget\\necho \\"curl $(uname -s)\\"")
    [['cd', '/app'], ['pip', 'install', 'a b'], ['uname', '-s'], ['echo', 'curl ']]
    """
    lexer = _Lexer(script)
    lexer.run()
    return lexer.commands


def needs_network(words: Sequence[str]) -> str | None:
    """Return the program of a command that clearly needs the network, else None. The subcommand is added if
    only some subcommands of the program need the network.
    """
    program, *arguments = words
    program = program.rpartition("/")[2]
    if re.fullmatch(r"python[\d.]*", program) and arguments[:1] == ["-m"]:
        program, *arguments = arguments[1:] or [""]
    program = re.sub(r"^pip[\d.]+$", "pip", program)
    verbs = INSTALLERS.get(program)
    plain = [argument for argument in arguments if not argument.startswith("-")]
    if verbs is None or not plain or set(arguments) & WITHOUT_NETWORK:
        return None
    verb = next((verb for verb in (" ".join(plain[:2]), plain[0]) if verb in verbs), None)
    if verbs and verb is None:
        return None
    if program in ("curl", "wget") and (
        any(LOCAL.match(argument) for argument in plain)
        or not any(ADDRESS.search(argument) for argument in plain)
    ):
        return None
    if (
        program == "git"
        and plain[0] == "clone"
        and not any(REMOTE.match(argument) or "$" in argument for argument in plain)
    ):
        return None
    return f"{program} {verb}" if verbs else program


APT_OPTIONS_WITH_VALUE = {
    "-o",
    "--option",
    "-t",
    "--target-release",
    "--default-release",
    "-c",
    "--config-file",
}
"""Options of apt-get whose value may be the next argument."""


def apt_packages(words: Sequence[str]) -> list[str]:
    """Return the packages that a command installs with apt or apt-get."""
    program, *arguments = words
    previous = ["", *arguments]
    plain = [
        argument
        for argument, option in zip(arguments, previous, strict=False)
        if not argument.startswith("-") and option not in APT_OPTIONS_WITH_VALUE
    ]
    return plain[1:] if program.rpartition("/")[2] in ("apt", "apt-get") and plain[:1] == ["install"] else []


class _Lexer:
    """Splits a script into simple commands. `run` appends them to `commands`."""

    def __init__(self, script: str) -> None:
        self.commands: list[list[str]] = []
        self._text = script
        self._at = 0
        self._word: str | None = None  # None between two words
        self._words: list[str] = []
        self._is_quoted = False  # whether the current position is between double quotes
        self._is_target = False  # whether the next word is the target of a redirection
        # (end marker, whether a shell reads the body) of each here-document of this line
        self._here: list[tuple[str, bool]] = []

    def run(self) -> None:
        while self._at < len(self._text):
            self._step(self._text[self._at])
        self._end_command()

    def _step(self, char: str) -> None:
        text, at = self._text, self._at
        if char == "\\":
            self._at += 2
            if text[at + 1 : at + 2] != "\n":
                self._add(text[at + 1 : at + 2])
        elif char == '"':
            self._at += 1
            self._add("")
            self._is_quoted = not self._is_quoted
        elif text.startswith("$(", at) or char == "`":
            self._add("")
            self._substitution()
        elif self._is_quoted:
            self._add(char)
            self._at += 1
        elif char == "'":
            end = _find(text, "'", at + 1)
            self._add(text[at + 1 : end])
            self._at = end + 1
        elif char == "#" and self._word is None:
            self._at = _find(text, "\n", at)
        elif char in " \t\r":
            self._end_word()
            self._at += 1
        elif char in "<>":
            self._redirection()
        elif char in ";&|()\n":
            self._end_command()
            self._at += 1
            if char == "\n":
                self._here_documents()
        else:
            self._add(char)
            self._at += 1

    def _add(self, piece: str) -> None:
        self._word = (self._word or "") + piece

    def _end_word(self) -> None:
        if self._word is not None:
            if not self._is_target:
                self._words.append(self._word)
            self._is_target = False
        self._word = None

    def _end_command(self) -> None:
        self._end_word()
        self._is_target = False
        words = list(_stripped(self._words))
        self._words = []
        if not words:
            return
        if words[0].rpartition("/")[2] in SHELLS and (script := _inline_script(words)) is not None:
            self.commands += commands(script)
        else:
            self.commands.append(words)

    def _substitution(self) -> None:
        """Read $(commands), `commands` or $((arithmetic)) at the current position."""
        text, start = self._text, self._at
        if text[start] == "`":
            end = _find(text, "`", start + 1)
            self.commands += commands(text[start + 1 : end])
            self._at = end + 1
            return
        depth, at = 0, start + 1
        while at < len(text):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
            if depth == 0:
                break
        if not text.startswith("$((", start):
            self.commands += commands(text[start + 2 : at - 1])
        self._at = at

    def _redirection(self) -> None:
        if self._word is not None and self._word.isdigit():
            self._word = None
        self._end_word()
        match = re.compile(r"<<<|<<-?|>>|[<>]&\d*-?|<>|>\||[<>]").match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        if match.group() in ("<<", "<<-"):
            if marker := re.compile(r"\s*(['\"\\]?)([\w.-]+)['\"]?").match(self._text, self._at):
                is_script = (
                    bool(self._words) and [*_stripped(self._words), ""][0].rpartition("/")[2] in SHELLS
                )
                self._here.append((marker.group(2), is_script))
                self._at = marker.end()
        elif not re.fullmatch(r"[<>]&[\d-]+", match.group()):
            self._is_target = True

    def _here_documents(self) -> None:
        for marker, is_script in self._here:
            end = re.compile(rf"^[ \t]*{re.escape(marker)}[ \t]*$", re.MULTILINE).search(self._text, self._at)
            body = self._text[self._at : end.start() if end else len(self._text)]
            if is_script:
                self.commands += commands(body)
            self._at = end.end() if end else len(self._text)
        self._here = []


def _stripped(words: Sequence[str]) -> Iterator[str]:
    """Yield the words without leading assignments, keywords and wrappers.

    Options of wrappers are also removed, but their values are not, for example the user in `sudo -u user`.
    After `timeout`, `nice` and `retry`, numbers and durations are removed too.
    """
    remaining = list(words)
    while remaining:
        name = remaining[0].rpartition("/")[2]
        if re.match(r"[A-Za-z_]\w*\+?=", remaining[0]) or remaining[0] in KEYWORDS:
            remaining = remaining[1:]
        elif name == "command" and remaining[1:2] in (["-v"], ["-V"]):
            break
        elif name in WRAPPERS and len(remaining) > 1:
            remaining = remaining[1:]
            while remaining and (
                remaining[0].startswith("-")
                or (name in ("timeout", "nice", "retry") and re.fullmatch(r"[\d.]+[smhd]?", remaining[0]))
            ):
                remaining = remaining[1:]
        else:
            break
    yield from remaining


def _inline_script(words: Sequence[str]) -> str | None:
    """Return the script of `bash -ec 'script'`, or None."""
    for position, word in enumerate(words[1:], start=1):
        if re.fullmatch(r"-\w*c", word):
            return words[position + 1] if len(words) > position + 1 else None
        if not word.startswith("-"):
            return None
    return None


def _find(text: str, substring: str, start: int) -> int:
    """Return the position of `substring`, or the end of the text."""
    position = text.find(substring, start)
    return len(text) if position < 0 else position
