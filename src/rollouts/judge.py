"""A judge model that reviews finished conversations, and the bonus that it adds to training rewards.

The judge answers with a JSON object of fourteen booleans: for each failure mode of MAST (Cemri et al. 2025,
arXiv 2503.13657; the descriptions are our own), whether it occurred. Any other answer is an error of the
judge and gives no bonus.

    {"task_rules_broken": false, ..., "wrong_check": true}  one failure, alpha 1  ->  bonus 1 / (1 + 1)
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from src.core.errors import BackendError
from src.core.trajectory import Trajectory
from src.policy.chat import Message
from src.policy.openai_client import ChatModel
from src.rollouts.options import JudgeOptions

logger = logging.getLogger(__name__)

MODES = {  # in MAST's order, 1.1 to 3.3
    "task_rules_broken": "The agent acted against a rule or limit that it was given for the task.",
    "role_left": (
        "The agent did what is not its part, for instance spoke for the customer or decided in the "
        "customer's place."
    ),
    "steps_repeated": "The agent did again, for no reason, what it had done already.",
    "history_lost": "The agent forgot or undid something from earlier in the conversation.",
    "end_not_seen": "The agent did not see that its work was over and went on.",
    "conversation_restarted": (
        "The agent began the conversation anew without cause, as if nothing had been said."
    ),
    "question_not_asked": "Something was unclear or missing, and the agent guessed instead of asking.",
    "off_course": "The agent drifted away from what was to be done.",
    "information_kept_back": (
        "The agent knew something that the customer or a colleague needed and did not say it."
    ),
    "input_ignored": "The agent passed over what the customer, a colleague or a tool told it.",
    "words_and_deeds_differ": "What the agent did is not what it had reasoned or announced.",
    "ended_too_early": "The conversation ended before everything was done that had to be.",
    "check_missing": "The agent did not check, or checked only in part, what had to be checked.",
    "wrong_check": "The agent checked something and took a wrong result for right.",
}

INSTRUCTIONS = (
    "You review conversations of a service agent with a customer, tools included, for failures of the "
    "agent.\n"
    "Answer with one JSON object and nothing else. It has exactly these keys, each true where the failure "
    "occurred and false where not:\n" + "\n".join(f'  "{name}": {meaning}' for name, meaning in MODES.items())
)
TEMPERATURE = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judge's result for one conversation."""

    failures: frozenset[str] | None  # keys of MODES; None: the judge gave no usable answer
    cost_usd: float = 0.0


class Judge:
    """Judges conversations. Equal conversations share one request and one verdict. After an unusable answer,
    the next equal conversation is judged again."""

    def __init__(self, endpoint: ChatModel, options: JudgeOptions) -> None:
        self._endpoint = endpoint
        self._options = options
        self._verdicts: dict[str, asyncio.Future[Verdict]] = {}

    async def judged(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with its bonus; the reward is unchanged.

        Raises nothing except cancellation.
        """
        key = hashlib.sha256(transcript(trajectory.conversation).encode()).hexdigest()
        pending, is_new = self._verdicts.get(key), False
        if pending is None or pending.cancelled():
            is_new = True
            pending = self._verdicts[key] = asyncio.ensure_future(self._verdict(trajectory.conversation))
        verdict = await asyncio.shield(pending)
        if verdict.failures is None and self._verdicts.get(key) is pending:
            del self._verdicts[key]  # the next equal conversation is judged again
        bonus = 0.0 if verdict.failures is None else bonus_of(len(verdict.failures), self._options)
        metrics = {
            "judge_bonus": bonus,
            "judge_errors": float(verdict.failures is None),
            "judge_calls": float(is_new),
            "judge_cost_usd": verdict.cost_usd if is_new else 0.0,
        }
        metrics |= {} if verdict.failures is None else {"judge_failures": float(len(verdict.failures))}
        return replace(trajectory, bonus=bonus, metrics={**trajectory.metrics, **metrics})

    async def _verdict(self, conversation: Sequence[Message]) -> Verdict:
        question: list[Message] = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": transcript(conversation)},
        ]
        try:
            reply = await self._endpoint.reply(question, temperature=TEMPERATURE, seed=0)
        except BackendError as error:
            logger.warning("the judge did not answer: %s", error)
            return Verdict(failures=None)
        options = self._options
        costs = (  # in millionths of a USD
            reply.num_prompt_tokens * options.judge_prompt_price,
            reply.num_completion_tokens * options.judge_completion_price,
        )
        failures = failures_in(reply.text)
        if failures is None:
            logger.warning(
                "the judge's answer is not an object of %d booleans: %.200r", len(MODES), reply.text
            )
        return Verdict(failures=failures, cost_usd=sum(costs) / 1e6)


def failures_in(answer: str) -> frozenset[str] | None:
    """Return the failures that an answer states; None unless it is a JSON object of fourteen booleans.

    >>> sorted(failures_in(json.dumps({name: name == "wrong_check" for name in MODES})))
    ['wrong_check']
    >>> failures_in("2.5 Ignored other agent's input: yes") is None, failures_in("") is None
    (True, True)
    """
    try:
        values = json.loads(answer, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(values, dict)
        or values.keys() != MODES.keys()
        or not all(type(value) is bool for value in values.values())
    ):
        return None
    return frozenset(name for name, value in values.items() if value)


def bonus_of(num_failures: int, options: JudgeOptions) -> float:
    """Return the bonus. With `inverse_failures`, one failure gives the same bonus as none."""
    match options.taxonomy_formula:
        case "one_plus_failures":
            return options.taxonomy_alpha / (1 + num_failures)
        case "inverse_failures":
            return options.taxonomy_alpha / max(1, num_failures)


def transcript(conversation: Sequence[Message]) -> str:
    """Return the conversation as JSON lines, so that the agent's text cannot imitate another role. Unpaired
    surrogates become question marks."""
    text = "\n".join(
        json.dumps(message, ensure_ascii=False, sort_keys=True, default=str) for message in conversation
    )
    return text.encode("utf-8", "replace").decode()


def _unique_keys(pairs: Sequence[tuple[str, object]]) -> Mapping[str, object]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)
