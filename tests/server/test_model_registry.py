"""Tests of sessions, models and samplers: their ids, their expiry and the resources that they free."""

from __future__ import annotations

import pytest

from skyrl_tx_server.engine.model_registry import Registry
from skyrl_tx_server.engine.operations import DropSnapshot, LoraSpec, UnloadModel
from skyrl_tx_server.errors import FutureLostError, NotFoundError, UserError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def open_session(registry: Registry) -> str:
    return registry.open_session(tags=[], user_metadata={}, display_name=None).session_id


def test_ids_equal_those_that_the_sdk_derives() -> None:
    registry = Registry(session_timeout_s=10)
    session_id = open_session(registry)
    assert registry.model_id(session_id, 3) == f"{session_id}:train:3"
    assert registry.sampler_id(session_id, 0) == f"{session_id}:sample:0"


def test_ending_a_session_keeps_checkpoints_and_the_base_model() -> None:
    registry = Registry(session_timeout_s=10)
    session_id = open_session(registry)
    model_id = registry.model_id(session_id, 0)
    registry.add_model(session_id, model_id, LoraSpec(rank=1))
    snapshot = registry.sampler_id(session_id, 0)
    registry.add_sampler(session_id, snapshot, model_path=None, weights=snapshot)
    registry.add_sampler(session_id, registry.sampler_id(session_id, 1), model_path=None, weights=None)
    path = "tinker://a:train:0/sampler_weights/x"
    registry.add_sampler(session_id, registry.sampler_id(session_id, 2), model_path=path, weights=path)
    assert registry.stats() == {"sessions": 1, "models": 1, "samplers": 3, "snapshots": 1}

    assert registry.end_session(session_id, "closed") == [
        UnloadModel(model_id=model_id),
        DropSnapshot(weights=snapshot),
    ]
    assert registry.end_session(session_id, "closed") == []
    assert registry.stats() == {"sessions": 0, "models": 0, "samplers": 0, "snapshots": 0}
    with pytest.raises(NotFoundError, match="closed"):
        registry.model(model_id)


def test_a_silent_session_expires_and_any_request_keeps_it_alive() -> None:
    clock = Clock()
    registry = Registry(session_timeout_s=10, clock=clock)
    silent, with_heartbeat, polling, working = (open_session(registry) for _ in range(4))
    registry.add_model(working, f"{working}:train:0", LoraSpec(rank=1))
    clock.now = 8
    registry.heartbeat(with_heartbeat)
    registry.touch(polling)
    registry.model(f"{working}:train:0")
    registry.look_up(silent)  # a look-up by another session does not keep a session alive
    clock.now = 11
    assert registry.expired() == [silent]


def test_a_heartbeat_of_an_unknown_session_is_an_error() -> None:
    with pytest.raises(FutureLostError, match="restarted"):
        Registry(session_timeout_s=10).heartbeat("session-unknown")


def test_a_sampler_can_be_added_again_only_with_equal_weights() -> None:
    registry = Registry(session_timeout_s=10)
    session_id = open_session(registry)
    sampler_id = registry.sampler_id(session_id, 0)
    first = registry.add_sampler(session_id, sampler_id, model_path=None, weights=None)
    assert registry.add_sampler(session_id, sampler_id, model_path=None, weights=None) == first
    with pytest.raises(UserError, match="other weights"):
        registry.add_sampler(session_id, sampler_id, model_path=None, weights=sampler_id)


def test_the_error_for_an_unknown_model_names_the_remedy() -> None:
    with pytest.raises(NotFoundError, match="create_training_client_from_state_with_optimizer"):
        Registry(session_timeout_s=10).model("session-x:train:0")
