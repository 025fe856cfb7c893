"""Demonstrations of deliberately mixed quality: what the warm start imitates.

Two people wrote them. The careful one says "One moment." and nearly always does what the policy says; the hasty one says "Sure." and slips
more often than not, in ways that have nothing to do with the kind of request. Each conversation is played in the real environment.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from scripts.toy_retail.families import Action, Instance, Request, database
from scripts.toy_retail.make_tasks import POLICY, row
from src.envs.service.service_env import ServiceEnv
from src.envs.service.toy_retail import ToyRetailEpisode
from src.envs.service.user_simulator import ScriptedUserSimulator
from src.policy.chat import Chat


class Slip(StrEnum):
    """What can go wrong with a request, whatever it is."""

    NONE = "none"
    NO_CALL = "no call"  # claims to be done, or not to know
    SHORT_NAME = "short name"  # the name loses its last syllable, so the call fails
    NO_LOOKUP = "no look-up"  # changes an order unseen, allowed or not
    WRONG_TOOL = "wrong tool"
    CUT = "cut"  # the first call ends inside a string; once told, everything is done right


@dataclass(frozen=True, kw_only=True)
class Style:
    begins: str
    slips: Mapping[Slip, float]  # the rest is done right


CAREFUL = Style(begins="One moment.", slips={Slip.NO_CALL: 0.01, Slip.SHORT_NAME: 0.02, Slip.CUT: 0.01})
HASTY = Style(
    begins="Sure.",
    slips={
        Slip.NO_CALL: 0.25,
        Slip.SHORT_NAME: 0.2,
        Slip.NO_LOOKUP: 0.15,
        Slip.WRONG_TOOL: 0.15,
        Slip.CUT: 0.05,
    },
)
CAREFUL_SHARE = 0.25
OTHER_TOOL = {
    "cancel_order": "return_order",
    "return_order": "cancel_order",
    "get_product": "get_customer",
    "get_customer": "get_product",
}

Agent = Generator[str, str, None]  # answers -> what the environment says to each


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A conversation in tokens, as training would see it."""

    ids: list[int]
    learnt: list[bool]  # the agent's own
    reward: float
    slips: Sequence[Slip]


def calls(action: Action, begins: str = "") -> str:
    """An answer in the native form."""
    body = json.dumps({"name": action.name, "arguments": dict(action.arguments)})
    return f"{begins}\n<tool_call>\n{body}\n</tool_call>".strip()


def fails(request: Request) -> str:
    """What is said where nothing was done."""
    return "I do not know." if request.tell else "Done."


def right(request: Request, begins: str) -> Agent:
    yield calls(request.lookup, begins)
    if request.write is not None:
        yield calls(request.write)
    yield request.answer


def slipping(request: Request, slip: Slip, begins: str) -> Agent:
    """How a request is served with that slip."""
    lookup = request.lookup
    meant = request.write or lookup
    match slip:
        case Slip.NO_CALL:
            yield fails(request)
        case Slip.SHORT_NAME:
            short = {name: value[:-2] for name, value in lookup.arguments.items()}
            yield calls(replace(lookup, arguments=short), begins)
            yield fails(request)
        case Slip.NO_LOOKUP | Slip.WRONG_TOOL if not request.tell:
            write = request.write or Action(name="cancel_order", arguments=lookup.arguments)
            if slip is Slip.WRONG_TOOL:
                write = Action(name=OTHER_TOOL.get(write.name, "cancel_order"), arguments=lookup.arguments)
            yield calls(write, begins)
            yield "Done."
        case Slip.WRONG_TOOL if meant.name in OTHER_TOOL:
            [value] = lookup.arguments.values()
            yield calls(
                Action(
                    name=OTHER_TOOL[meant.name],
                    arguments={OTHER_TOOL[meant.name].removeprefix("get_"): value},
                ),
                begins,
            )
            yield fails(request)
        case Slip.CUT:
            whole = calls(lookup, begins)
            yield whole[: whole.rindex('"}}')]
            yield from right(request, begins)
        case _:
            yield from right(request, begins)


def agent(instance: Instance, script: Sequence[str], style: Style, slips: Sequence[Slip]) -> Agent:
    """The whole conversation. What a single request's second line tells has to be asked for, unless nothing is called anyway."""
    for request, slip in zip(instance.requests, slips, strict=True):
        if len(script) > len(instance.requests):
            yield fails(request) if slip is Slip.NO_CALL else f"{style.begins} {request.question}"
        yield from slipping(request, slip, style.begins)


def draw(style: Style, rng: random.Random) -> Slip:
    return rng.choices([*style.slips, Slip.NONE], [*style.slips.values(), 1 - sum(style.slips.values())])[0]


async def demonstrate(
    instance: Instance, rng: random.Random, chat: Chat, *, careful_share: float = CAREFUL_SHARE
) -> Demonstration:
    """One demonstrator's conversation; a careful one with the probability `careful_share`."""
    script = rng.choice(instance.scripts)
    style = CAREFUL if rng.random() < careful_share else HASTY
    slips = [draw(style, rng) for _ in instance.requests]
    env = ServiceEnv(
        ToyRetailEpisode(
            row("demonstration", instance, split="train"),
            database=database([instance]),
            policy=POLICY.strip(),
            user=ScriptedUserSimulator(script),
        )
    )
    opening = await env.start()
    ids = chat.render(opening.messages, tools=opening.tools)
    learnt = [False] * len(ids)
    for answer in agent(instance, script, style, slips):
        completion = [*chat.tokenizer.encode(answer, add_special_tokens=False), chat.turn_end_id]
        observation = await env.step(answer)
        learnt += [True] * len(completion)
        if observation.is_done:
            return Demonstration(
                ids=[*ids, *completion], learnt=learnt, reward=observation.reward, slips=slips
            )
        ids = chat.extend(ids, completion, observation.messages)
        learnt += [False] * (len(ids) - len(learnt))
    raise AssertionError(f"the conversation has no end: {asdict(instance)}")
