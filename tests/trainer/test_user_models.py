"""Tests that `TinkerUserModel`, the model of a user simulator, closes a connection after a failure."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from src.core.errors import BackendError
from src.envs.service import user_simulator
from src.envs.service.user_simulator import TinkerUserModel
from src.policy.backend import BackendOptions
from tests.fakes.tokenizer import byte_chat


async def test_a_failed_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    num_open = 0

    class Endpoint:
        async def open_policy(self, sampler_path: str | None) -> object:
            raise BackendError(f"no checkpoint {sampler_path}")

    @asynccontextmanager
    async def connect(options: BackendOptions) -> AsyncGenerator[Endpoint]:
        nonlocal num_open
        num_open += 1
        try:
            yield Endpoint()
        finally:
            num_open -= 1

    monkeypatch.setattr(user_simulator, "connect", connect)
    options = BackendOptions(model_name="m", backend="skyrl-tx", skyrl_tx_url="http://127.0.0.1:1")
    user = TinkerUserModel(options, "tinker://run/sampler_weights/1", byte_chat(), temperature=1.0)
    for _ in range(2):
        with pytest.raises(BackendError, match="no checkpoint tinker://run"):
            await user.say([{"role": "user", "content": "a"}], tools=[], seed=0)
        assert num_open == 0
    await user.close()
