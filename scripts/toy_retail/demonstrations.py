"""Generate demonstrations of mixed quality, on which `build_model` trains the model.

There are two demonstrators. The careful one says "One moment." and rarely makes a mistake. The hasty one says
"Sure." and makes a mistake in most requests. The mistake is drawn independently of the kind of request. Every
conversation runs in `ServiceEnv`, as in training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from scripts.toy_retail.make_tasks import POLICY, row
from scripts.toy_retail.task_types import Action, Instance, Request, database
from src.envs.service.service_env import ServiceEnv
from src.envs.service.toy_retail import ToyRetailEpisode
from src.envs.service.user_simulator import ScriptedUserSimulator
from src.policy.chat import Chat


class Mistake(StrEnum):
    """The mistakes that a demonstrator can make. If a mistake cannot apply to a request, the demonstrator
    handles the request correctly."""

    NONE = "none"
    NO_CALL = "no call"  # makes no call and claims that the request is done, or that the answer is unknown
    SHORT_NAME = "short name"  # omits the last syllable of a name, so that the call fails
    # Changes an order without a look-up. If the policy forbids the requested change, calls cancel_order.
    NO_LOOKUP = "no look-up"
    WRONG_TOOL = "wrong tool"
    CUT = "cut"  # the first call ends inside a string; after the error message everything is correct


@dataclass(frozen=True, kw_only=True)
class Style:
    begins: str  # the text before the question and before the first tool call of a request
    mistakes: Mapping[Mistake, float]  # probability per request; NONE has the remaining probability


CAREFUL = Style(
    begins="One moment.", mistakes={Mistake.NO_CALL: 0.01, Mistake.SHORT_NAME: 0.02, Mistake.CUT: 0.01}
)
HASTY = Style(
    begins="Sure.",
    mistakes={
        Mistake.NO_CALL: 0.25,
        Mistake.SHORT_NAME: 0.2,
        Mistake.NO_LOOKUP: 0.15,
        Mistake.WRONG_TOOL: 0.15,
        Mistake.CUT: 0.05,
    },
)
CAREFUL_SHARE = 0.25
OTHER_TOOL = {
    "cancel_order": "return_order",
    "return_order": "cancel_order",
    "get_product": "get_customer",
    "get_customer": "get_product",
}

Agent = Generator[str, str, None]  # yields the answers of the agent


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A conversation as token ids."""

    ids: list[int]
    is_agent_token: list[bool]
    reward: float
    mistakes: Sequence[Mistake]


def calls(action: Action, begins: str = "") -> str:
    """Return an answer with a native tool call."""
    body = json.dumps({"name": action.name, "arguments": dict(action.arguments)})
    return f"{begins}\n<tool_call>\n{body}\n</tool_call>".strip()


def failed_answer(request: Request) -> str:
    """Return the final answer of a demonstrator who has made no successful call for this request."""
    return "I do not know." if request.tell else "Done."


def without_mistake(request: Request, begins: str) -> Agent:
    """Handle a request correctly: look up, make the requested change if the policy permits it, and answer."""
    yield calls(request.lookup, begins)
    if request.write is not None:
        yield calls(request.write)
    yield request.answer


def with_mistake(request: Request, mistake: Mistake, begins: str) -> Agent:
    """Handle a request with the given mistake."""
    lookup = request.lookup
    intended = request.write or lookup
    match mistake:
        case Mistake.NO_CALL:
            yield failed_answer(request)
        case Mistake.SHORT_NAME:
            short = {name: value[:-2] for name, value in lookup.arguments.items()}
            yield calls(replace(lookup, arguments=short), begins)
            yield failed_answer(request)
        case Mistake.NO_LOOKUP | Mistake.WRONG_TOOL if not request.tell:
            write = request.write or Action(name="cancel_order", arguments=lookup.arguments)
            if mistake is Mistake.WRONG_TOOL:
                write = Action(name=OTHER_TOOL.get(write.name, "cancel_order"), arguments=lookup.arguments)
            yield calls(write, begins)
            yield "Done."
        case Mistake.WRONG_TOOL if intended.name in OTHER_TOOL:
            [value] = lookup.arguments.values()
            yield calls(
                Action(
                    name=OTHER_TOOL[intended.name],
                    arguments={OTHER_TOOL[intended.name].removeprefix("get_"): value},
                ),
                begins,
            )
            yield failed_answer(request)
        case Mistake.CUT:
            call = calls(lookup, begins)
            yield call[: call.rindex('"}}')]
            yield from without_mistake(request, begins)
        case _:
            yield from without_mistake(request, begins)


def agent(instance: Instance, script: Sequence[str], style: Style, mistakes: Sequence[Mistake]) -> Agent:
    """Conduct the whole conversation.

    If the user's script has a second message for a single request, the agent first asks for the information
    in this message. With NO_CALL, the agent gives its final answer instead of the question, and repeats it
    after the second message.
    """
    for request, mistake in zip(instance.requests, mistakes, strict=True):
        if len(script) > len(instance.requests):
            yield (
                failed_answer(request) if mistake is Mistake.NO_CALL else f"{style.begins} {request.question}"
            )
        yield from with_mistake(request, mistake, style.begins)


def draw_mistake(style: Style, rng: random.Random) -> Mistake:
    return rng.choices(
        [*style.mistakes, Mistake.NONE], [*style.mistakes.values(), 1 - sum(style.mistakes.values())]
    )[0]


async def demonstrate(
    instance: Instance, rng: random.Random, chat: Chat, *, careful_share: float = CAREFUL_SHARE
) -> Demonstration:
    """Generate a conversation. The demonstrator is careful with the probability `careful_share`."""
    script = rng.choice(instance.scripts)
    style = CAREFUL if rng.random() < careful_share else HASTY
    mistakes = [draw_mistake(style, rng) for _ in instance.requests]
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
    is_agent_token = [False] * len(ids)
    for answer in agent(instance, script, style, mistakes):
        completion = [*chat.tokenizer.encode(answer, add_special_tokens=False), chat.turn_end_id]
        observation = await env.step(answer)
        is_agent_token += [True] * len(completion)
        if observation.is_done:
            return Demonstration(
                ids=[*ids, *completion],
                is_agent_token=is_agent_token,
                reward=observation.reward,
                mistakes=mistakes,
            )
        ids = chat.extend(ids, completion, observation.messages)
        is_agent_token += [False] * (len(ids) - len(is_agent_token))
    raise AssertionError(f"the conversation did not end: {asdict(instance)}")
