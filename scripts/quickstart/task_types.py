"""The types of quick-start tasks. An instance of a task type has an instruction, input files, one correct
command, and checks of the result.

This file is long because it defines all task types.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.quickstart.words import TEXT_ENDINGS, Pool, Words


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One task. Paths are relative to /app, the agent's working directory."""

    task_type: str = ""  # `make_instance` sets it
    instruction: str
    command: str
    files: dict[str, str] = field(default_factory=dict)  # path -> content
    checks: tuple[str, ...] = ()  # bash conditions, all of which must hold after the agent has finished


def make_instance(task_type: str, *, seed: str, pool: Pool) -> Instance:
    """Make an instance of `task_type` with words of `pool`. The same seed gives the same instance."""
    words = Words(random=random.Random(f"{task_type}/{seed}"), pool=pool, used=set())
    return dataclasses.replace(TASK_TYPES[task_type](words), task_type=task_type)


def holds(path: str, content: str) -> str:
    """Return the condition that the file exists and has this content, except for trailing newlines."""
    return f"[ -f {path} ] && [ \"$(cat {path})\" = '{content.rstrip()}' ]"


def missing(path: str) -> str:
    return f"[ ! -e {path} ]"


def is_directory(path: str) -> str:
    return f"[ -d {path} ]"


# --- names and contents ---


def text_file(words: Words, directory: str = "") -> str:
    name = words.word()
    if words.random.random() < 0.15:
        name += f"_{words.word()}"
    return (
        f"{directory}/{name}{words.random.choice(TEXT_ENDINGS)}"
        if directory
        else name + words.random.choice(TEXT_ENDINGS)
    )


def some_directory(words: Words, files: dict[str, str]) -> str:
    """Return an empty string (the working directory) or, with probability 1/4, a new directory. Add a file of
    the new directory to `files`."""
    if words.random.random() < 0.75:
        return ""
    directory = words.word()
    files[f"{directory}/{text_file(words)}"] = "\n".join(words.lines(1)) + "\n"
    return directory


def existing_file(words: Words, files: dict[str, str]) -> str:
    path = text_file(words, some_directory(words, files))
    files[path] = "\n".join(words.lines(2)) + "\n"
    return path


def text(words: Words) -> str:
    """Return a word, two words or a number."""
    draw = words.random.random()
    return words.number() if draw < 0.2 else f"{words.word()} {words.word()}" if draw < 0.35 else words.word()


def say(words: Words, phrasings: str, **slots: object) -> str:
    """Return one of the phrasings (one per line) with its slots filled in."""
    return words.random.choice([line.strip() for line in phrasings.strip().splitlines()]).format(**slots)


# --- single operations ---


def write(words: Words) -> Instance:
    files: dict[str, str] = {}
    path, content = text_file(words, some_directory(words, files)), text(words)
    return Instance(
        instruction=say(
            words,
            """Write {content} to a new file {path}.
            Create a file {path} that contains {content}.
            Make a file named {path} with the text {content}.
            Put the text {content} into a new file {path}.""",
            content=content,
            path=path,
        ),
        command=f"echo {content} > {path}",
        files=files,
        checks=(holds(path, content),),
    )


def append(words: Words) -> Instance:
    files: dict[str, str] = {}
    path = existing_file(words, files)
    content = text(words)
    return Instance(
        instruction=say(
            words,
            """Add the line {content} to the end of {path}.
            Append {content} to the file {path}.
            Append the line {content} to {path}.
            The file {path} exists. Add {content} as its last line.""",
            content=content,
            path=path,
        ),
        command=f"echo {content} >> {path}",
        files=files,
        checks=(holds(path, files[path] + content),),
    )


def mkdir(words: Words) -> Instance:
    files: dict[str, str] = {}
    parent = some_directory(words, files)
    path = f"{parent}/{words.word()}" if parent else words.word()
    return Instance(
        instruction=say(
            words,
            """Create a directory named {path}.
            Make the directory {path}.
            Make a new folder {path}.
            Create an empty folder {path}.""",
            path=path,
        ),
        command=f"mkdir {path}",
        files=files,
        checks=(is_directory(path),),
    )


def copy(words: Words) -> Instance:
    files: dict[str, str] = {}
    source = existing_file(words, files)
    target = text_file(words)
    return Instance(
        instruction=say(
            words,
            """Copy {source} to {target}.
            Make a copy of {source} named {target}.
            Keep a copy of the file {source} as {target}.""",
            source=source,
            target=target,
        ),
        command=f"cp {source} {target}",
        files=files,
        checks=(holds(source, files[source]), holds(target, files[source])),
    )


def rename(words: Words) -> Instance:
    files: dict[str, str] = {}
    source = existing_file(words, files)
    target = text_file(words)
    return Instance(
        instruction=say(
            words,
            """Rename {source} to {target}.
            Give the file {source} the new name {target}.
            The file {source} should be named {target}.""",
            source=source,
            target=target,
        ),
        command=f"mv {source} {target}",
        files=files,
        checks=(missing(source), holds(target, files[source])),
    )


def move(words: Words) -> Instance:
    files: dict[str, str] = {}
    source = text_file(words)
    files[source] = "\n".join(words.lines(2)) + "\n"
    directory = words.word()
    files[f"{directory}/{text_file(words)}"] = "\n".join(words.lines(1)) + "\n"
    return Instance(
        instruction=say(
            words,
            """Move {source} into the directory {directory}.
            Put the file {source} into the folder {directory}.
            Move the file {source} to the folder {directory}.""",
            source=source,
            directory=directory,
        ),
        command=f"mv {source} {directory}/",
        files=files,
        checks=(missing(source), holds(f"{directory}/{source}", files[source])),
    )


def delete(words: Words) -> Instance:
    files: dict[str, str] = {}
    path = existing_file(words, files)
    other = existing_file(words, files)
    return Instance(
        instruction=say(
            words,
            """Delete the file {path}.
            Remove {path}.
            Delete {path} and nothing else.
            Get rid of the file {path}.""",
            path=path,
        ),
        command=f"rm {path}",
        files=files,
        checks=(missing(path), holds(other, files[other])),
    )


def executable(words: Words) -> Instance:
    path = words.word() + ".sh"
    files = {path: f"#!/bin/bash\necho {words.word()}\n"}
    return Instance(
        instruction=say(
            words,
            """Make the script {path} executable.
            Make {path} executable.
            The script {path} should be executable.""",
            path=path,
        ),
        command=f"chmod +x {path}",
        files=files,
        checks=(f"[ -x {path} ]", holds(path, files[path])),
    )


def mode(words: Words) -> Instance:
    files: dict[str, str] = {}
    path = existing_file(words, files)
    bits = words.mode()
    return Instance(
        instruction=say(
            words,
            """Set the permissions of {path} to {bits}.
            Change the mode of {path} to {bits}.
            Give {path} the permissions {bits}.""",
            path=path,
            bits=bits,
        ),
        command=f"chmod {bits} {path}",
        files=files,
        checks=(f'[ "$(stat -c %a {path})" = {bits} ]',),
    )


def link(words: Words) -> Instance:
    files: dict[str, str] = {}
    source = existing_file(words, files)
    target = words.word()
    return Instance(
        instruction=say(
            words,
            """Make a symbolic link {target} to {source}.
            Create a symbolic link named {target} that points to {source}.
            Link {target} to the file {source}.""",
            source=source,
            target=target,
        ),
        command=f"ln -s {source} {target}",
        files=files,
        checks=(f"[ -L {target} ]", holds(target, files[source])),
    )


def empty(words: Words) -> Instance:
    files: dict[str, str] = {}
    path = text_file(words, some_directory(words, files))
    return Instance(
        instruction=say(
            words,
            """Create an empty file {path}.
            Make an empty file named {path}.
            Make a new empty file {path}.""",
            path=path,
        ),
        command=f"touch {path}",
        files=files,
        checks=(f"[ -f {path} ] && [ ! -s {path} ]",),
    )


def replace(words: Words) -> Instance:
    old, new = words.word(), words.word()
    path = text_file(words)
    lines = words.lines(3)
    lines[words.random.randrange(3)] = f"{old} {words.word()}"
    files = {path: "\n".join(lines) + "\n"}
    return Instance(
        instruction=say(
            words,
            """Replace {old} by {new} in {path}.
            In {path}, change {old} to {new}.
            Replace the word {old} in the file {path} by {new}.""",
            old=old,
            new=new,
            path=path,
        ),
        command=f"sed -i s/{old}/{new}/ {path}",
        files=files,
        checks=(holds(path, files[path].replace(old, new)),),
    )


def join(words: Words) -> Instance:
    files: dict[str, str] = {}
    first, second = existing_file(words, files), existing_file(words, files)
    target = text_file(words)
    return Instance(
        instruction=say(
            words,
            """Join {first} and {second} into {target}.
            Write the lines of {first} and then those of {second} to {target}.
            Put {first} and {second} together in a new file {target}.""",
            first=first,
            second=second,
            target=target,
        ),
        command=f"cat {first} {second} > {target}",
        files=files,
        checks=(holds(target, files[first] + files[second]),),
    )


# --- filters: one or two operations on the lines of a file, whose result is written to another file ---


@dataclass(frozen=True, kw_only=True)
class Filter:
    """An operation on lines: its wording as the first and as a later step, its command and its effect."""

    first_step: str
    later_step: str
    command: str
    effect: Callable[[list[str]], list[str]]


def a_filter(name: str, words: Words, lines: list[str]) -> Filter:
    """Return the filter `name` with random parameters. For `search`, four elements of `lines` are replaced in
    place by lines that match."""
    number = words.count()
    match name:
        case "sort":
            return Filter(
                first_step="Sort the lines of {source}", later_step="sort them", command="sort", effect=sorted
            )
        case "first":
            return Filter(
                first_step=f"Take the first {number} lines of {{source}}",
                later_step=f"keep the first {number}",
                command=f"head -n {number}",
                effect=lambda rows: rows[:number],
            )
        case "last":
            return Filter(
                first_step=f"Take the last {number} lines of {{source}}",
                later_step=f"keep the last {number}",
                command=f"tail -n {number}",
                effect=lambda rows: rows[-number:],
            )
        case "count":
            return Filter(
                first_step="Count the lines of {source}",
                later_step="count them",
                command="wc -l",
                effect=lambda rows: [str(len(rows))],
            )
        case "search":
            pattern = words.word()
            for row in words.random.sample(range(len(lines)), 4):
                lines[row] = (
                    f"{words.word()} {pattern}"
                    if words.random.random() < 0.5
                    else f"{pattern} {words.word()}"
                )
            return Filter(
                first_step=f"Find the lines of {{source}} that contain {pattern}",
                later_step=f"keep those that contain {pattern}",
                command=f"grep {pattern}",
                effect=lambda rows: [row for row in rows if pattern in row],
            )
    raise AssertionError(name)


def filtered(words: Words, names: tuple[str, ...], *, to_end: bool) -> Instance:
    """Return an instance whose command applies the filters `names` in order and writes the result to another
    file. With `to_end`, the command appends the result to this file."""
    lines = words.lines(words.random.randint(20, 26))
    filters = [a_filter(name, words, lines) for name in names]
    source, target = text_file(words), text_file(words)
    files = {source: "\n".join(lines) + "\n"}
    result, before = lines, ""
    for each_filter in filters:
        result = each_filter.effect(result)
    if to_end:
        files[target] = before = "\n".join(words.lines(2)) + "\n"
    ending = say(words, TO_END if to_end else TO_NEW, target=target)
    first = filters[0].first_step.format(source=source)
    rest = "".join(f", {later.later_step}" for later in filters[1:])
    head = f"{filters[0].command} < {source}" if names[0] == "count" else f"{filters[0].command} {source}"
    command = " | ".join([head, *(later.command for later in filters[1:])])
    return Instance(
        instruction=f"{first}{rest} {ending}",
        command=f"{command} {'>>' if to_end else '>'} {target}",
        files=files,
        checks=(holds(target, before + "\n".join(result)), holds(source, files[source])),
    )


TO_NEW = """and write the result to {target}.
    and save the result in {target}.
    and put the result into {target}."""
TO_END = """and append the result to {target}.
    and add the result to the end of {target}."""
HELD_OUT_PIPES = (("search", "count"),)
PIPES = tuple(
    (first, second)
    for first in ("sort", "first", "last", "search")
    for second in ("sort", "first", "last", "count", "search")
    if first != second and (first, second) not in HELD_OUT_PIPES
)


def pipe(words: Words) -> Instance:
    return filtered(words, words.random.choice(PIPES), to_end=False)


def collect(words: Words) -> Instance:
    return filtered(words, (words.random.choice(("sort", "first", "search", "count")),), to_end=True)


# --- two operations in one task ---

SINGLE = {
    "write": write,
    "append": append,
    "mkdir": mkdir,
    "copy": copy,
    "rename": rename,
    "delete": delete,
    "executable": executable,
    "mode": mode,
    "link": link,
    "empty": empty,
}
HELD_OUT_PAIRS = (("mkdir", "append"), ("delete", "copy"), ("rename", "mode"))
PAIRS = tuple(
    (first, second)
    for first in SINGLE
    for second in SINGLE
    if first != second and (first, second) not in HELD_OUT_PAIRS
)


def two(words: Words, names: tuple[str, str]) -> Instance:
    first, second = SINGLE[names[0]](words), SINGLE[names[1]](words)
    return Instance(
        instruction=f"{first.instruction} {second.instruction}",
        command=f"{first.command} && {second.command}",
        files=first.files | second.files,
        checks=first.checks + second.checks,
    )


def pair(words: Words) -> Instance:
    return two(words, words.random.choice(PAIRS))


Maker = Callable[[Words], Instance]


def _filter_maker(*names: str, to_end: bool = False) -> Maker:
    return lambda words: filtered(words, names, to_end=to_end)


TRAINING: dict[str, Maker] = {
    **SINGLE,
    "move": move,
    "replace": replace,
    "join": join,
    "count": _filter_maker("count"),
    "search": _filter_maker("search"),
    "sort": _filter_maker("sort"),
    "first": _filter_maker("first"),
    "last": _filter_maker("last"),
    "collect": collect,
    "pipe": pipe,
    "pair": pair,
}
"""Task types that occur in demonstrations and in training tasks."""

UNSEEN: dict[str, Maker] = {
    "count-matches": _filter_maker("search", "count"),
    "collect-last": _filter_maker("last", to_end=True),
    "folder-and-line": lambda words: two(words, ("mkdir", "append")),
    "delete-and-copy": lambda words: two(words, ("delete", "copy")),
    "rename-and-mode": lambda words: two(words, ("rename", "mode")),
}
"""Task types that only held-out tasks have: operations of TRAINING in new combinations."""

TASK_TYPES: dict[str, Maker] = TRAINING | UNSEEN
