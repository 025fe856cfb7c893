"""A policy that returns scripted answers of a Terminus-2 agent. Concurrent trials can share one object."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from src.core.trajectory import StopReason, Turn
from src.policy.chat import Chat
from src.policy.sampling_policy import SampleRequest

ANSWER_MARK = "<|im_start|>assistant\n"


def answer(*commands: str, done: bool = False, duration: float = 0.3) -> str:
    """Return a Terminus-2 answer with shell commands, each followed by Enter."""
    keys = [{"keystrokes": f"{command}\n", "duration": duration} for command in commands]
    return json.dumps({"analysis": "a", "plan": "p", "commands": keys, "task_complete": done})


def solving(*commands: str) -> list[str]:
    """Return a script that runs the commands and then reports completion twice."""
    return [answer(*commands), answer(done=True), answer(done=True)]


class ScriptedPolicy:
    """Samples from the first script whose key occurs in the prompt.

    The index of the reply is the number of earlier answers in the prompt; the last reply of the script is
    repeated. If a reply is an exception, `sample` raises it. An empty reply has no tokens. Replies are
    truncated to `max_tokens` tokens, and every token has the logprob -0.5.
    """

    def __init__(
        self, chat: Chat, scripts: Mapping[str, Sequence[str | BaseException]], *, version: int = 0
    ) -> None:
        self.version = version
        self.prompts: list[list[int]] = []
        self.is_sampling = asyncio.Event()  # set at the first request
        self.seeds: list[int | None] = []
        self._chat = chat
        self._scripts = scripts

    async def sample(self, request: SampleRequest) -> Turn:
        self.prompts.append(list(request.prompt_ids))
        self.is_sampling.set()
        self.seeds.append(request.seed)
        text = self._chat.tokenizer.decode(
            request.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        script = next(script for key, script in self._scripts.items() if key in text)
        reply = script[min(text.count(ANSWER_MARK) - 1, len(script) - 1)]
        if isinstance(reply, BaseException):
            raise reply
        ids = self._chat.tokenizer.encode(reply, add_special_tokens=False)
        ids = [*ids, self._chat.turn_end_id] if reply else []
        completion = ids[: request.max_tokens]
        return Turn(
            prompt_ids=list(request.prompt_ids),
            completion_ids=completion,
            logprobs=[-0.5] * len(completion),
            stop_reason=StopReason.STOP if len(completion) == len(ids) else StopReason.LENGTH,
            policy_version=self.version,
        )
