"""Generate demonstrations that a model learns to imitate before reinforcement learning.

`demonstrate` has two demonstrators. The careful one almost always solves the task. The hasty one makes an
error in most tasks of every type. A model that imitates both solves about the same share of the tasks as the
demonstrations do, and reinforcement learning can make it imitate the careful demonstrator more often.
`write_chats` uses neither demonstrator: the commands of its chats are correct, but most of them are not run.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from scripts.quickstart.task_types import TRAINING, Instance, make_instance
from scripts.quickstart.terminal import NO_JSON, Screen, confirmation_message, first_message
from scripts.quickstart.words import Pool


class Slip(StrEnum):
    """The errors that a demonstrator can make. OVERWRITE needs a command that contains >>."""

    NONE = "none"
    NO_NEWLINE = "no newline"  # the command is typed, but does not run
    NO_COMMAND = "no command"  # the task is declared complete at once
    ONLY_LOOK = "only look"  # the command only lists the files
    WRONG_NAME = "wrong name"  # the last path of the command loses its directory or extension
    OVERWRITE = "overwrite"  # the command contains > instead of >>
    MALFORMED = "malformed"  # a quote is missing, so the answer is not JSON


@dataclass(frozen=True, kw_only=True)
class Style:
    """The texts of one demonstrator and the probabilities of its errors."""

    analyses: tuple[str, ...]
    plans: tuple[str, ...]
    slips: dict[Slip, float]  # the probability of each error except OVERWRITE (OVERWRITE_RATE)


CAREFUL = Style(
    analyses=(
        "The terminal is ready and nothing is done yet.",
        "A fresh shell, no work is done yet.",
        "The shell waits for the first command.",
    ),
    plans=(
        "Run one complete command with the exact names.",
        "Type the whole command and end it with a newline.",
        "Use the names as given, then finish.",
    ),
    slips={Slip.NO_NEWLINE: 0.02, Slip.WRONG_NAME: 0.02, Slip.MALFORMED: 0.01, Slip.NO_COMMAND: 0.01},
)
HASTY = Style(
    analyses=("This looks easy.", "Simple task.", "Nothing special here."),
    plans=("Do it fast.", "Just finish.", "Be quick."),
    slips={
        Slip.NO_NEWLINE: 0.27,
        Slip.NO_COMMAND: 0.18,
        Slip.ONLY_LOOK: 0.14,
        Slip.WRONG_NAME: 0.16,
        Slip.MALFORMED: 0.08,
    },
)
FIXED_TEXTS = (CAREFUL.analyses[1], CAREFUL.plans[2])  # analysis and plan in the chats of `write_chats`
TWO_OPERATIONS = ("collect", "pair", "pipe")  # task types whose command combines two operations
CAREFUL_SHARE = 0.28
# Probability that the hasty demonstrator makes the error OVERWRITE. The error is drawn only if the
# command contains >> and no other error was drawn.
OVERWRITE_RATE = 0.15
# Probability that a command that has not run is run when Terminus-2 requests confirmation.
REPAIR_RATE = 0.15
LATE_PROMPT_RATE = 0.1  # share of first screens that do not show the shell prompt yet

CONFIRMED = (("The command ran.", "Confirm."), ("The work is done.", "Confirm that it is complete."))
REPAIRED = (
    ("The command has not run yet.", "Run it now."),
    ("Nothing was done yet.", "Run the command now."),
)


@dataclass(frozen=True, kw_only=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A complete conversation, and whether its commands solve the task."""

    messages: tuple[Message, ...]
    solved: bool


def demonstrate(
    instance: Instance,
    rng: random.Random,
    *,
    careful_share: float = CAREFUL_SHARE,
) -> Demonstration:
    """Generate a conversation. The demonstrator is careful with the probability `careful_share`.

    After a malformed answer, the demonstrator and its error are drawn again.
    """
    screen, first = _opening(instance, rng)
    messages = [first]
    while True:
        style = CAREFUL if rng.random() < careful_share else HASTY
        slip = _draw_slip(style, instance, rng)
        keys, output = _keystrokes(instance, slip)
        text = answer(rng.choice(style.analyses), rng.choice(style.plans), keys)
        if slip is not Slip.MALFORMED:
            break
        text = text.replace('", "duration"', ', "duration"')
        messages += [Message(role="assistant", content=text), Message(role="user", content=NO_JSON)]
    if keys:
        screen.type(keys, output)
    messages += [
        Message(role="assistant", content=text),
        Message(role="user", content=confirmation_message(screen.observe())),
    ]
    repaired = slip in (Slip.NO_NEWLINE, Slip.NO_COMMAND, Slip.ONLY_LOOK) and rng.random() < REPAIR_RATE
    if repaired:
        last = answer(*rng.choice(REPAIRED), "\n" if slip is Slip.NO_NEWLINE else instance.command + "\n")
    else:
        last = answer(*rng.choice(CONFIRMED), "")
    return Demonstration(
        messages=(*messages, Message(role="assistant", content=last)), solved=slip is Slip.NONE or repaired
    )


def write_chats(path: Path, count: int) -> None:
    """Write `count` demonstrations to the JSON lines file `path`, in the format of `python -m src.sft`.

    All commands are correct, but three of four chats omit the newline that runs the command. A model that
    imitates them fails in most trials for this reason alone, and reinforcement learning can add the newline.
    Half of the tasks need two operations. The texts around the commands are always the same, so that after
    the fine-tuning only the tokens of the commands have a gradient. Three of four chats end with the first
    answer, because the answers to the request for confirmation are easier to learn. The content depends only
    on `count` and on the installed version of Harbor.
    """
    rng = random.Random("demonstrations of the warm start")
    single = [task_type for task_type in TRAINING if task_type not in TWO_OPERATIONS]
    with path.open("w", encoding="utf-8") as chats:
        for number in range(count):
            task_type = rng.choice(TWO_OPERATIONS if number % 2 else single)
            instance = make_instance(task_type, seed=f"warm-start-{number}", pool=Pool.TRAIN)
            screen, first = _opening(instance, rng)
            keys = instance.command + ("\n" if number % 8 < 2 else "")
            messages = [first, Message(role="assistant", content=answer(*FIXED_TEXTS, keys))]
            if number % 8 in (0, 3):  # two of eight chats, one of which has two operations
                screen.type(keys, [])
                messages += [
                    Message(role="user", content=confirmation_message(screen.observe())),
                    Message(role="assistant", content=answer(*CONFIRMED[0], "")),
                ]
            chats.write(json.dumps({"messages": [asdict(message) for message in messages]}) + "\n")


def _opening(instance: Instance, rng: random.Random) -> tuple[Screen, Message]:
    """Return the terminal, which may not show the shell prompt yet, and the first message."""
    screen = Screen()
    if rng.random() >= LATE_PROMPT_RATE:
        screen.show_prompt()
    return screen, Message(role="user", content=first_message(instance.instruction + "\n", screen.observe()))


def answer(analysis: str, plan: str, keys: str) -> str:
    """Return an answer in the JSON format of Terminus-2, without a command if `keys` is empty. Only newlines
    are escaped.
    """
    escaped = keys.replace("\n", "\\n")
    commands = f'{{"keystrokes": "{escaped}", "duration": 0.1}}' if keys else ""
    return f'{{"analysis": "{analysis}", "plan": "{plan}", "commands": [{commands}], "task_complete": true}}'


def _draw_slip(style: Style, instance: Instance, rng: random.Random) -> Slip:
    """Draw the error of a demonstrator. WRONG_NAME becomes NO_NEWLINE if it cannot apply to the command."""
    draw = rng.random()
    for slip, rate in style.slips.items():
        draw -= rate
        if draw < 0:
            return (
                Slip.NO_NEWLINE if slip is Slip.WRONG_NAME and _wrong_name(instance.command) is None else slip
            )
    if style is HASTY and ">>" in instance.command and rng.random() < OVERWRITE_RATE:
        return Slip.OVERWRITE
    return Slip.NONE


def _keystrokes(instance: Instance, slip: Slip) -> tuple[str, list[str]]:
    """Return the typed keys and the output of the shell."""
    match slip:
        case Slip.NO_COMMAND:
            return "", []
        case Slip.ONLY_LOOK:
            names = sorted({path.split("/")[0] for path in instance.files})
            return "ls\n", ["  ".join(names)] if names else []
        case Slip.NO_NEWLINE:
            return instance.command, []
        case Slip.OVERWRITE:
            return instance.command.replace(">>", ">") + "\n", []
        case Slip.WRONG_NAME:
            wrong = _wrong_name(instance.command)
            assert wrong is not None
            return wrong + "\n", _missing_file_output(wrong)
        case _:
            return instance.command + "\n", []


def _wrong_name(command: str) -> str | None:
    """Return the command with a wrong last path: without its directory, or without its extension if it has
    no directory. None: the path has neither."""
    head, _, path = command.rpartition(" ")
    if "/" in path.rstrip("/"):
        return f"{head} {path.rpartition('/')[2]}"
    return f"{head} {path.rpartition('.')[0]}" if "." in path else None


def _missing_file_output(command: str) -> list[str]:
    """Return what the shell prints for a command whose file does not exist."""
    last = command.split(" && ")[-1]
    program, name = last.split(" ")[0], last.split(" ")[-1]
    if ">" in last:
        return []
    match program:
        case "rm":
            return [f"rm: cannot remove '{name}': No such file or directory"]
        case "chmod":
            return [f"chmod: cannot access '{name}': No such file or directory"]
        case "sed":
            return [f"sed: can't read {name}: No such file or directory"]
        case _:
            return []


def spoken_words() -> set[str]:
    """Return all words of the analyses and plans, for the vocabulary of the tokenizer."""
    texts = [
        *CAREFUL.analyses,
        *CAREFUL.plans,
        *HASTY.analyses,
        *HASTY.plans,
        *(part for pair in (*CONFIRMED, *REPAIRED) for part in pair),
    ]
    return set(re.findall(r" ?[A-Za-z]+", " ".join(texts)))
