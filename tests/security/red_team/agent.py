"""The red team's policy: it types one script, watches the terminal until the script has ended, and then says that it is done."""

from __future__ import annotations

import base64
import gzip
import re
import textwrap

from src.core.trajectory import StopReason, Turn
from src.policy.chat import Chat
from src.policy.sampling_policy import SampleRequest
from tests.fakes.scripted_policy import answer

LAST_MESSAGE = "<|im_start|>user\n"
TICK_S = 0.25
HOLE = re.compile(r"HOLE \[([\w-]+)\] (.*)")


def command_line(script: str) -> str:
    """What runs a script of any text when it is typed. The text itself does not appear on the screen."""
    packed = base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()
    return (
        "base64 -d <<E | gunzip > /tmp/attack; bash /tmp/attack\n"
        + "\n".join(textwrap.wrap(packed, 150))
        + "\nE"
    )


class Agent:
    """Plays one trial. `holes` is what the script reported, as pairs of an attack's name and a text."""

    def __init__(self, chat: Chat, script: str, *, end: str, last_command: str, patience_s: float) -> None:
        self.version = 0
        self.holes: set[tuple[str, str]] = set()
        self.saw_the_end = False
        self._chat = chat
        self._end = end
        self._last_command = last_command
        self._patience = patience_s / TICK_S
        self._replies = [answer(command_line(script), duration=TICK_S)]

    async def sample(self, request: SampleRequest) -> Turn:
        text = self._chat.tokenizer.decode(
            list(request.prompt_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        self._look(text.rsplit(LAST_MESSAGE, 1)[-1])
        ids = [*self._chat.tokenizer.encode(self._reply(), add_special_tokens=False), self._chat.turn_end_id]
        assert len(ids) <= request.max_tokens or request.max_tokens == 1, (
            f"the script takes {len(ids)} tokens"
        )
        completion = ids[: request.max_tokens]
        return Turn(
            prompt_ids=list(request.prompt_ids),
            completion_ids=completion,
            logprobs=[-0.5] * len(completion),
            stop_reason=StopReason.STOP if len(completion) == len(ids) else StopReason.LENGTH,
            policy_version=self.version,
        )

    def _look(self, screen: str) -> None:
        self.holes |= {(name, text.strip()) for name, text in HOLE.findall(screen)}
        self.saw_the_end |= self._end in screen

    def _reply(self) -> str:
        if self._replies:
            return self._replies.pop()
        if not self.saw_the_end and self._patience > 0:
            self._patience -= 1
            return answer("", duration=TICK_S).replace("\\n", "")
        if self._last_command:
            command, self._last_command = self._last_command, ""
            return answer(command, duration=TICK_S)
        return answer(done=True)
