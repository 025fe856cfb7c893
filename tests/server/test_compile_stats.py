"""A compilation is reported in the log until it ends."""

from __future__ import annotations

import logging
import time

import jax
import pytest

from skyrl_tx_server.executor import compile_stats

TRACED = "/jax/core/compile/jaxpr_trace_duration"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
TIMEOUT_S = 30.0


def test_a_compilation_is_reported_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_stats, "PROGRESS_INTERVAL_S", 0.01)
    caplog.set_level(logging.INFO, logger=compile_stats.logger.name)
    compile_stats.watch()
    compiled_before = compile_stats.programs().get("jit(slow)", 0)

    jax.monitoring.record_event_duration_secs(TRACED, 0.1, fun_name="fast")
    jax.monitoring.record_event_duration_secs(TRACED, 1.5, fun_name="slow")
    jax.monitoring.record_event_duration_secs(LOWERED, 1.0, fun_name="jit(slow)")
    deadline = time.monotonic() + TIMEOUT_S
    while caplog.text.count("s so far") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    jax.monitoring.record_event_duration_secs(COMPILED, 2.0, fun_name="jit(slow)")

    messages = [record.getMessage() for record in caplog.records]
    assert messages[:2] == ["traced slow in 1.5 s", "compiling jit(slow)"]
    assert messages[2].startswith("compiling jit(slow): ") and messages[2].endswith(" s so far")
    assert messages.count("compiled jit(slow) in 2.0 s") == 1
    assert compile_stats.programs()["jit(slow)"] == compiled_before + 1
    caplog.clear()
    time.sleep(0.1)
    assert not caplog.records
