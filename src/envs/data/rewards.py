"""The reward functions of `env=data`: `reward=exact|number|regex|math`, or the user's own function.

    def grade(answer: str, row: Mapping[str, Any]) -> float: ...        # reward=my_module:grade

`answer` is the agent's last answer without thoughts (the text between `<think>` and `</think>`). `row`
contains the columns of the question's row. The function may be async. It returns a number, or a mapping with
`reward`, optionally `message`, and any other numbers, which become metrics. A message is sent to the agent,
which answers again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from inspect import isawaitable
from typing import Any, Protocol

from src.core.errors import AgentFault, ConfigError
from src.core.process import in_thread
from src.core.trajectory import ZeroReason
from src.envs.data.rows import Question, require_reference
from src.envs.service.subprocess_pool import WorkerLost, WorkerPool, WorkerSettings, WorkerTimeout
from src.envs.user_code import load_function

BUILT_IN = ("exact", "number", "regex", "math")
MARKER = "####"  # GSM8K writes the result of a solution after this marker
BRACE = re.compile(r"\\boxed\s*\{|[{}]")
NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<![\w.])[-+]?\.\d+"
)
LATEX_COMMA = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3})")  # before three digits, as in 1{,}000
NUM_WORKERS = 2
GRADING_TIMEOUT_S = 10.0
MAX_TRIES = 2  # maximum number of tries of a comparison whose worker exits before the time limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """The result of grading one answer."""

    reward: float
    message: str = ""  # sent to the agent, which then answers again; empty: no message
    metrics: Mapping[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Grades the answers to questions."""

    def check(self, question: Question) -> None:
        """Raise ConfigError with file and line for a row that cannot be graded."""
        ...

    async def grade(self, answer: str, question: Question) -> Graded:
        """Grade an answer from which thoughts have been removed."""
        ...

    async def close(self) -> None: ...


def open_reward(name: str) -> Reward:
    """Return the reward function of `reward=NAME`. Raises ConfigError if NAME names no function."""
    match name:
        case "exact":
            return ComparedReward(lambda answer, reference: marked(answer) == marked(reference))
        case "number":
            return NumberReward()
        case "regex" | "math":
            return WorkerReward(name)
        case _ if ":" in name:
            return FunctionReward(load_function(name, option="reward"))
        case _:
            raise ConfigError(
                f"reward={name} is none of {', '.join(BUILT_IN)}; choose one, or give your own as "
                "reward=module:function"
            )


def marked(text: str) -> str:
    r"""Return the final result of a solution: the text after the last `####`, else the content of the last
    `\boxed{}`, else the whole text.

    >>> marked("6 * 7 = 42 #### 42"), marked(r"so \boxed{\frac{\sqrt{3}}{2}}."), marked(" 42\n")
    ('42', '\\frac{\\sqrt{3}}{2}', '42')
    """
    if MARKER in text:
        return text.rpartition(MARKER)[2].strip()
    start, end = 0, len(text)
    open_braces: list[re.Match[str]] = []
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces and (opening := open_braces.pop())[0] != "{":
            start, end = opening.end(), brace.start()
    return text[start:end].strip()


def last_number(text: str) -> Decimal | None:
    """Return the last number in the final result of a text, or None if there is no number or if its exponent
    is too large.

    >>> last_number("First 3, then 1,250.50 dollars."), last_number("x2"), last_number("-4e1 #### $7.00")
    (Decimal('1250.50'), None, Decimal('7.00'))
    """
    plain = LATEX_COMMA.sub(",", marked(text).replace("\N{MINUS SIGN}", "-"))
    numbers = NUMBER.findall(plain)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:  # the exponent is too large
        return None


class ComparedReward:
    """The reward is 1 if `compare(answer, reference)` is true, else 0. Implements `Reward`."""

    def __init__(self, compare: Callable[[str, str], bool]) -> None:
        self._compare = compare

    def check(self, question: Question) -> None:
        require_reference(question)

    async def grade(self, answer: str, question: Question) -> Graded:
        return Graded(reward=float(self._compare(answer, require_reference(question))))

    async def close(self) -> None:
        """There is nothing to release."""


class NumberReward(ComparedReward):
    """The reward is 1 if the last number in the final result of the answer equals that of the reference, else
    0."""

    def __init__(self) -> None:
        super().__init__(lambda answer, reference: last_number(answer) == last_number(reference))

    def check(self, question: Question) -> None:
        if last_number(reference := require_reference(question)) is None:
            raise ConfigError(
                f"{question.record.where}: the answer {reference[:60]!r} has no number; correct it, or use "
                "another reward"
            )


class WorkerReward:
    """The rewards `math` and `regex`, which worker processes compute. Implements `Reward`."""

    def __init__(self, name: str) -> None:
        self._name = name
        command = (sys.executable, "-m", "src.envs.data.grading_worker", name)
        self._pool = WorkerPool(
            WorkerSettings(
                command=command, environment={}, num_workers=NUM_WORKERS, step_timeout_s=GRADING_TIMEOUT_S
            )
        )

    def check(self, question: Question) -> None:
        reference = require_reference(question)
        if self._name == "regex":
            try:
                re.compile(reference)
            except re.error as error:
                raise ConfigError(
                    f"{question.record.where}: the answer {reference[:60]!r} is not a regular expression "
                    f"({error}); correct it, or use another reward"
                ) from error
            if all(re.search(reference, text) for text in ("", "\0")):
                raise ConfigError(
                    f"{question.record.where}: the regular expression {reference[:60]!r} matches every "
                    "answer; correct it"
                )

    async def grade(self, answer: str, question: Question) -> Graded:
        """Compare the answer with the reference in a worker.

        Raises AgentFault if the comparison exceeds the time limit, WorkerLost if its worker exits in each of
        MAX_TRIES tries, and SandboxError if no worker starts.
        """
        reference = require_reference(question)
        if self._name == "math":
            reference = marked(reference)
        request = {"reference": reference, "answer": answer}
        for number in range(MAX_TRIES):
            try:
                return Graded(reward=float(await self._is_equal(request)))
            except WorkerTimeout as error:
                detail = f"reward={self._name}: no result within {GRADING_TIMEOUT_S:g} s for {answer[-60:]!r}"
                raise AgentFault(ZeroReason.VERIFIER_TIMEOUT, detail) from error
            except WorkerLost:
                if number + 1 == MAX_TRIES:
                    raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._pool.aclose()

    async def _is_equal(self, request: Mapping[str, object]) -> bool:
        slot = self._pool.reserve()
        try:
            reply = None
            while reply is None:  # None: another request ended the worker
                worker = await self._pool.worker(slot)
                reply = await worker.ask(request, timeout_s=GRADING_TIMEOUT_S)
            return bool(reply["equal"])
        finally:
            self._pool.release(slot)


class FunctionReward:
    """The reward of a function that the user wrote. Implements `Reward`."""

    def __init__(self, function: Callable[[str, Mapping[str, Any]], Awaitable[Any] | Any]) -> None:
        self._function = function

    def check(self, question: Question) -> None:
        """Accept every row, because a function can grade without a reference answer."""

    async def grade(self, answer: str, question: Question) -> Graded:
        """Call the function in a thread, because it may block, and await the result of an async function."""
        result = await in_thread(lambda: self._function(answer, question.record.values))
        if isawaitable(result):
            result = await result
        values = dict(result) if isinstance(result, Mapping) else {"reward": result}
        try:
            reward = float(values.pop("reward"))
            message = str(values.pop("message", None) or "")
            metrics = {str(name): float(value) for name, value in values.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise TypeError(
                f"the function of reward= returned {result!r:.80}; return a number, or a mapping with "
                "`reward`, optionally `message`, and other numbers"
            ) from error
        return Graded(reward=reward, message=message, metrics=metrics)

    async def close(self) -> None:
        """There is nothing to release."""
