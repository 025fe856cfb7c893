"""Who the agent serves. A customer is fixed through a run and seeded per task and sample; its words are observations and train nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from src.chat import Message

STOP = "###STOP###"
TRANSFER = "###TRANSFER###"
OUT_OF_SCOPE = "###OUT-OF-SCOPE###"
ENDINGS = (STOP, TRANSFER, OUT_OF_SCOPE)  # any of them in what a customer says ends the conversation


class Customer(Protocol):
    """One customer in one conversation."""

    async def reply(self, conversation: Sequence[Message]) -> str:
        """What the customer says next. The conversation is the agent's view without calls and their results: the agent's words are
        `assistant`, the customer's own are `user`; it is empty where the customer begins."""
        ...


def ends(text: str) -> bool:
    return any(ending in text for ending in ENDINGS)


class ScriptedCustomer:
    """Says its lines one after the other, whatever it hears, and then goodbye."""

    def __init__(self, lines: Sequence[str], *, goodbye: str = "Thanks.") -> None:
        self._lines = lines
        self._goodbye = goodbye

    async def reply(self, conversation: Sequence[Message]) -> str:
        said = sum(message["role"] == "user" for message in conversation)
        return self._lines[said] if said < len(self._lines) else f"{self._goodbye} {STOP}"
