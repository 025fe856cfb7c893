"""Read the files of a run. Every line is checked against a schema.

A last line without a newline is the result of a crash and is skipped. Any other line that does not match the
schema raises a ConfigError that names the file, the line and the problem.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from src.core.errors import ConfigError

REMEDY = "restore the file from a copy, or start again with another log_path"
# The errors that the conversion of a damaged line may raise.
DAMAGED = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, zlib.error)

Count = Annotated[int, Field(ge=0, lt=2**53)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
LIMIT = 1e300  # `Finite` numbers have a smaller absolute value than this, so that their sums are finite
Finite = Annotated[float, Field(allow_inf_nan=False, gt=-LIMIT, lt=LIMIT)]
Numbers = dict[str, Whole | Finite | None]


def _has_step(metrics: Numbers) -> Numbers:
    step = metrics.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
        raise ValueError("`step` must be a whole number")
    return metrics


MetricsLine = Annotated[Numbers, AfterValidator(_has_step)]
Hashes = dict[str, str]
Group = tuple[Count, str]  # a GroupKey: step and task id


class RolloutFields(TypedDict):
    purpose: Annotated[str, Field(max_length=100)]  # "step", "eval" or "refill-<n>"
    step: Count
    task: str
    member: Count  # the index of the trial in its group


class Started(TypedDict):
    event: Literal["started"]
    resumed_from: Count


class BatchFixed(TypedDict):
    event: Literal["batch_fixed", "begun"]  # earlier releases wrote "begun"
    step: Count
    groups: list[Group]


class RolloutStarted(RolloutFields):
    event: Literal["rollout_started", "admitted"]  # earlier releases wrote "admitted"


class Finished(RolloutFields):
    event: Literal["finished"]
    outcome: str


class GroupFailures(TypedDict):
    """The number of trials of one group, and the number of failures by cause."""

    trials: Count
    causes: dict[str, Count]


class CurriculumState(TypedDict):
    # Task id -> (solved trials, failed trials, index of the task's last group among all groups of the run).
    # The numbers of trials are decayed, so they are not whole.
    evidence: NotRequired[
        dict[str, tuple[Annotated[Finite, Field(ge=0)], Annotated[Finite, Field(ge=0)], Whole]]
    ]
    num_groups: NotRequired[Count]


class StepState(TypedDict):
    strikes: NotRequired[dict[str, Count]]  # task id -> consecutive groups without a graded trial
    quarantined: NotRequired[dict[str, str]]  # task id -> most frequent cause
    recent: NotRequired[list[GroupFailures]]  # the latest groups, oldest first
    curriculum: NotRequired[CurriculumState]


class Trained(TypedDict):
    event: Literal["trained"]
    step: Count
    groups: list[Group]
    state: StepState


class Evaluated(TypedDict):
    event: Literal["evaluated"]
    step: Count


class Discarded(TypedDict):
    event: Literal["discarded"]
    after: Count


class Ended(TypedDict):
    event: Literal["ended"]
    state: str
    cause: NotRequired[str]


class Note(TypedDict):
    """An event that a resumed run does not use."""

    event: Literal["checkpointed", "quarantined"]


JournalLine = Annotated[
    Started | BatchFixed | RolloutStarted | Finished | Trained | Evaluated | Discarded | Ended | Note,
    Field(discriminator="event"),
]


def is_readable(number: float) -> bool:
    """Return whether a file with this number can be read again. The result is False for NaN.

    >>> is_readable(-1e299), is_readable(1e300), is_readable(float("nan"))
    (True, False, False)
    """
    return abs(number) < LIMIT


def read_lines[T](
    path: Path, schema: TypeAdapter[Any], convert: Callable[[Any], T] = lambda value: value
) -> Iterator[T]:
    """Check each line against `schema` and yield its converted value. A missing file has no lines."""
    with _read_errors(path):
        if not path.exists():
            return
        file = path.open("rb")
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # the line is incomplete because of a crash
            yield _checked(line, schema, convert, f"{path}, line {number}")


def read_document[T](path: Path, schema: TypeAdapter[T]) -> T:
    """Read a file that contains one JSON value, check it against `schema` and return the value."""
    with _read_errors(path):
        content = path.read_bytes()
    return parse_document(content, schema, path)


def parse_document[T](content: bytes, schema: TypeAdapter[T], path: Path) -> T:
    """Return the JSON value in `content`, which was read from the file `path`, checked against `schema`."""
    return _checked(content, schema, lambda value: value, str(path))


def read_word(path: Path) -> str:
    """Read a file that contains one line of text, such as an id."""
    with _read_errors(path):
        content = path.read_bytes()
    if re.fullmatch(rb"[\x21-\x7e][\x20-\x7e]{0,999}\n?", content) is None:
        raise ConfigError(f"{path}: not one line of text; {REMEDY}")
    return content.decode().strip()


def _checked[T](content: bytes, schema: TypeAdapter[Any], convert: Callable[[Any], T], where: str) -> T:
    try:
        return convert(schema.validate_json(content, strict=True))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])[:100]
        raise ConfigError(
            f"{where}: {_shown(f'{field}: ' if field else '')}{_shown(first['msg'])}; {REMEDY}"
        ) from error
    except DAMAGED as error:
        raise ConfigError(f"{where}: {_shown(f'{type(error).__name__}: {error}')}; {REMEDY}") from error


def _shown(text: str) -> str:
    """Return at most 200 characters of a text, with "?" for each character that is not printable."""
    return "".join(character if character.isprintable() else "?" for character in text)[:200]


@contextmanager
def _read_errors(path: Path) -> Generator[None]:
    """Convert OSError to a ConfigError that names the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {REMEDY}") from error
