"""The probe detects each defect that is injected into our server, and no defect in the unchanged server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.executor_protocol import Executor
from skyrl_tx_server.engine.futures import FutureStore, Retention
from skyrl_tx_server.engine.model_registry import Registry
from skyrl_tx_server.engine.operations import (
    ForwardBackward,
    LoadWeights,
    LossFn,
    LossSettings,
    OptimStep,
    Sample,
    SaveSampler,
    StopReason,
)
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.run_index import RunIndex
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from src.cli.command_line import parse
from src.core.errors import ConfigError
from src.evaluate.probe import capabilities
from src.evaluate.probe.__main__ import arguments, main, probe
from src.evaluate.probe.checks import OPTIONAL, REQUIRED
from src.evaluate.probe.endpoint_probe import Probe
from tests.fakes.server import serving
from tests.fakes.tiny_model import make_model, make_settings

pytestmark = pytest.mark.official_sdk
MODEL = "local/tiny"


class Defective:
    """The real executor with one defect.

    `before` changes operations, `after` changes results, and `sampled` changes sampled sequences.
    """

    def __init__(self, executor: DeviceExecutor) -> None:
        self.real = executor
        self.remove_defect()

    def remove_defect(self) -> None:
        self.before: Callable = lambda executor, op: op
        self.after: Callable = lambda executor, op, result: result
        self.sampled: Callable = lambda sequence: sequence

    @property
    def sampler(self) -> Defective:
        return self

    def __getattr__(self, name: str) -> object:
        return getattr(self.real if hasattr(self.real, name) else self.real.sampler, name)

    def run(self, op):
        op = self.before(self.real, op)
        result = yield from self.real.run(op)
        return self.after(self.real, op, result)

    def prefill(self, requests):
        results = self.real.sampler.prefill(
            [replace(request, op=self.before(self.real, request.op)) for request in requests]
        )
        return [
            result and replace(result, finished=self._change_sequences(result.finished)) for result in results
        ]

    def poll(self, *, dispatch_next):
        return self._change_sequences(self.real.sampler.poll(dispatch_next=dispatch_next))

    def _change_sequences(self, items):
        return [
            replace(item, sequence=self.sampled(item.sequence)) if hasattr(item, "sequence") else item
            for item in items
        ]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Defective]]:
    directory = tmp_path_factory.mktemp("probe")
    settings = make_settings(
        make_model(directory / "model"), directory / "checkpoints", max_models=6, max_loras=4
    )
    defective = Defective(DeviceExecutor(settings))
    engine = Engine(cast(Executor, defective))  # `Defective` forwards all other attributes
    state = AppState(
        engine=engine,
        registry=Registry(session_timeout_s=300.0),
        futures=FutureStore(Retention()),
        checkpoints=CheckpointStore(directory / "checkpoints", MODEL),
        run_index=RunIndex(directory / "ledger.jsonl"),
        settings=HttpSettings(model_dir=directory / "model"),
    )
    engine.start()
    with serving(StartupState(state=state)) as url:
        yield url, defective
    engine.stop()


def changing(kind: type, **changes: Callable) -> Callable:
    """Return a function for `Defective.before` that changes fields of the operations of class `kind`."""
    return lambda executor, op: (
        replace(op, **{name: change(op) for name, change in changes.items()}) if isinstance(op, kind) else op
    )


def adam(**changes: float) -> Callable:
    return changing(OptimStep, adam=lambda op: replace(op.adam, **changes))


def sampling(**changes: object) -> Callable:
    return changing(Sample, settings=lambda op: replace(op.settings, **changes))


def averaged(op: ForwardBackward) -> tuple:
    return tuple(
        datum if datum.weights is None else replace(datum, weights=datum.weights / len(op.data))
        for datum in op.data
    )


def mean_loss(executor, op, result):
    if not isinstance(op, ForwardBackward):
        return result
    return replace(
        result, metrics={"loss:sum": result.metrics["loss:sum"] / sum(len(datum.tokens) for datum in op.data)}
    )


def leak_weights(executor, op, result):
    """Copy the weights of the model that took a step to all other models."""
    if isinstance(op, OptimStep):
        adapter = executor._models.get(op.model_id).adapter
        for model_id in [name for name in executor._models._device if name != op.model_id]:
            executor._models.put(model_id, replace(executor._models.get(model_id), adapter=adapter))
    return result


class KeptGradients:
    """Restores the gradient that an optimizer step should have cleared."""

    def __init__(self) -> None:
        self.gradients: dict[str, object] = {}

    def before(self, executor, op):
        if isinstance(op, OptimStep):
            self.gradients[op.model_id] = executor._models.get(op.model_id).gradient
        return op

    def after(self, executor, op, result):
        if isinstance(op, OptimStep) and self.gradients.get(op.model_id) is not None:
            executor._models.put(
                op.model_id, replace(executor._models.get(op.model_id), gradient=self.gradients[op.model_id])
            )
        return result


class StaleSamplers:
    """Gives each sampler of a model the weights of the model's first sampler."""

    def __init__(self) -> None:
        self.first: dict[str, object] = {}

    def after(self, executor, op, result):
        if isinstance(op, SaveSampler):
            adapter = self.first.setdefault(op.model_id, executor._models.get(op.model_id).adapter)
            executor.adapters.put(op.weights, adapter)
        return result


def without_stop_token(sequence):
    if sequence.stop_reason is not StopReason.STOP:
        return sequence
    return replace(sequence, tokens=sequence.tokens[:-1], logprobs=sequence.logprobs[:-1])


# defect: (the injected functions, the check that must detect it)
DEFECTS: dict[str, tuple[dict[str, Callable], str]] = {
    "ignores loss_fn_config": (
        {"before": changing(ForwardBackward, settings=lambda op: LossSettings())},
        "loss settings",
    ),
    "computes ppo unclipped": (
        {
            "before": changing(
                ForwardBackward,
                loss_fn=lambda op: LossFn.IMPORTANCE_SAMPLING if op.loss_fn is LossFn.PPO else op.loss_fn,
            )
        },
        "loss ppo",
    ),
    "reports the mean loss": ({"after": mean_loss}, "loss cross_entropy"),
    "averages gradients": ({"before": changing(ForwardBackward, data=averaged)}, "sums gradients"),
    "keeps gradients over a step": ({}, "clears gradients"),
    "ignores the learning rate": ({"before": adam(learning_rate=10.0)}, "learning rate"),
    "drops beta1": ({"before": adam(beta1=0.9)}, "beta1"),
    "drops beta2": ({"before": adam(beta2=0.95)}, "beta2"),
    "drops eps": ({"before": adam(eps=1e-8)}, "eps"),
    "drops weight decay": ({"before": adam(weight_decay=0.0)}, "weight decay"),
    "drops the clipping norm": ({"before": adam(grad_clip_norm=0.0)}, "gradient clipping"),
    "loads without the optimizer": (
        {"before": changing(LoadWeights, optimizer=lambda op: False)},
        "loads with optimizer",
    ),
    "always loads the optimizer": (
        {"before": changing(LoadWeights, optimizer=lambda op: True)},
        "loads without optimizer",
    ),
    "samples with stale weights": ({}, "samplers are fresh"),
    "leaks weights to other models": ({"after": leak_weights}, "models are separate"),
    "ignores the seed": ({"before": sampling(seed=None)}, "seeds"),
    "ignores the temperature": ({"before": sampling(temperature=1.0)}, "temperature"),
    "ignores top_k": ({"before": sampling(top_k=-1)}, "top_k"),
    "ignores stop tokens": ({"before": sampling(stop_token_ids=())}, "stop tokens"),
    "leaves the stop token out": ({"sampled": without_stop_token}, "stop tokens"),
    "returns wrong logprobs": (
        {"sampled": lambda s: replace(s, logprobs=s.logprobs - np.float32(0.2))},
        "logprobs agree",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_found(endpoint: tuple[str, Defective], defect: str) -> None:
    url, server = endpoint
    functions, check = DEFECTS[defect]
    server.remove_defect()
    for name, function in functions.items():
        setattr(server, name, function)
    if defect == "keeps gradients over a step":
        keeper = KeptGradients()
        server.before, server.after = keeper.before, keeper.after
    if defect == "samples with stale weights":
        server.after = StaleSamplers().after
    report = asyncio.run(probe(url, {"only": check}))
    assert [finding.name for finding in report.findings] == [check]
    assert not report.findings[0].holds, report.findings[0].seen
    assert not re.match(r"\w*(Error|Exception|Timeout)", report.findings[0].seen), (
        "the check must detect the effect of the defect, not fail with an exception"
    )
    assert report.is_trainable is (check in OPTIONAL)


def test_ignored_unknown_settings_are_found(
    endpoint: tuple[str, Defective], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = endpoint
    server.remove_defect()
    for module in ("training_requests", "protobuf"):
        monkeypatch.setattr(
            f"skyrl_tx_server.http.wire.{module}.parse_loss_config", lambda loss_fn, config: LossSettings()
        )
    assert not asyncio.run(probe(url, {"only": "refuses the unknown"})).findings[0].holds


def test_an_unenforced_context_limit_is_found(
    endpoint: tuple[str, Defective], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe assumes a limit of 300 tokens, and the endpoint accepts up to 600 tokens."""
    url, server = endpoint
    server.remove_defect()
    monkeypatch.setattr(
        "src.evaluate.probe.__main__.Probe", lambda **fields: replace(Probe(**fields), max_context_length=300)
    )
    finding = asyncio.run(probe(url, {"only": "context limit"})).findings[0]
    assert not finding.holds and "296 + 16 tokens were accepted with a limit of 300" in finding.seen


def test_the_unchanged_server_passes_all_checks(
    endpoint: tuple[str, Defective], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, server = endpoint
    server.remove_defect()
    output = tmp_path / "capabilities.json"
    assert main([url, f"output={output}"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(REQUIRED) + len(OPTIONAL)} of {len(REQUIRED) + len(OPTIONAL)} checks hold" in printed
    content = json.loads(output.read_text())
    base = [
        f"model_name={MODEL}",
        "tasks_dir=t",
        "backend=skyrl-tx",
        f"skyrl_tx_url={url}",
        f"capabilities={output}",
    ]
    capabilities.require(capabilities.read(output), parse(base))
    next(finding for finding in content["findings"] if finding["name"] == "weight decay").update(
        holds=False, seen="it did nothing"
    )
    output.write_text(json.dumps(content))
    capabilities.require(capabilities.read(output), parse(base))
    with pytest.raises(ConfigError, match=r"does not honour weight_decay=0\.1: weight decay: it did nothing"):
        capabilities.require(capabilities.read(output), parse([*base, "weight_decay=0.1"]))
    with pytest.raises(ConfigError, match="is about local/tiny, not model_name=other"):
        capabilities.require(capabilities.read(output), parse(["model_name=other", *base[1:]]))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give the address of one endpoint"),
        (["http://h:1", "models=3"], "unknown argument 'models'"),
        (["http://h:1", "tolerance=abc"], "tolerance=abc is not a number"),
        (["http://h:1", "output=/tmp"], "output=/tmp cannot be written"),
        (["http://h:1", "output=/no/such/c.json"], "output=/no/such/c.json cannot be written"),
        (["http://h:1", "only=seeds,tides"], "unknown check tides; the checks are: sums gradients"),
    ],
)
def test_invalid_arguments_are_rejected_with_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(argv)
