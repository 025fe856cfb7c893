"""The policy of an attack trial. It types one script, waits for the end marker of the script on the screen,
and then marks the task as complete.
"""

from __future__ import annotations

import base64
import gzip
import re
import textwrap

from src.core.trajectory import StopReason, Turn
from src.policy.chat import Chat
from src.policy.sampling_policy import SampleRequest
from tests.fakes.scripted_policy import answer

USER_MESSAGE_START = "<|im_start|>user\n"
TICK_S = 0.25  # the duration of each command
HOLE = re.compile(r"HOLE \[([\w-]+)\] (.*)")


def command_line(script: str) -> str:
    """Return a command line that runs a script without showing its text on the screen."""
    packed = base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()
    return (
        "base64 -d <<E | gunzip > /tmp/attack; bash /tmp/attack\n"
        + "\n".join(textwrap.wrap(packed, 150))
        + "\nE"
    )


class Agent:
    """The policy of one trial. `holes` contains the violations that the script has reported, as pairs of an
    attack's name and a message.
    """

    def __init__(self, chat: Chat, script: str, *, end: str, last_command: str, patience_s: float) -> None:
        self.version = 0
        self.holes: set[tuple[str, str]] = set()
        self.saw_the_end = False
        self._chat = chat
        self._end = end
        self._last_command = last_command
        self._remaining_waits = patience_s / TICK_S
        self._replies = [answer(command_line(script), duration=TICK_S)]

    async def sample(self, request: SampleRequest) -> Turn:
        text = self._chat.tokenizer.decode(
            list(request.prompt_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        self._read_screen(text.rsplit(USER_MESSAGE_START, 1)[-1])
        reply_ids = [
            *self._chat.tokenizer.encode(self._reply(), add_special_tokens=False),
            self._chat.turn_end_id,
        ]
        assert len(reply_ids) <= request.max_tokens or request.max_tokens == 1, (
            f"a reply of {len(reply_ids)} tokens exceeds max_tokens={request.max_tokens}"
        )
        completion = reply_ids[: request.max_tokens]
        return Turn(
            prompt_ids=list(request.prompt_ids),
            completion_ids=completion,
            logprobs=[-0.5] * len(completion),
            stop_reason=StopReason.STOP if len(completion) == len(reply_ids) else StopReason.LENGTH,
            policy_version=self.version,
        )

    def _read_screen(self, screen: str) -> None:
        self.holes |= {(name, text.strip()) for name, text in HOLE.findall(screen)}
        self.saw_the_end |= self._end in screen

    def _reply(self) -> str:
        if self._replies:
            return self._replies.pop()
        if not self.saw_the_end and self._remaining_waits > 0:
            self._remaining_waits -= 1
            return answer("", duration=TICK_S).replace("\\n", "")
        if self._last_command:
            command, self._last_command = self._last_command, ""
            return answer(command, duration=TICK_S)
        return answer(done=True)
