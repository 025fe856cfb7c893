"""Tests of the HTTP server with the unmodified Tinker SDK and a fake engine on a loopback port."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import pytest
import safetensors.numpy
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli

from skyrl_tx_server.engine.futures import Retention
from skyrl_tx_server.engine.operations import (
    CreateModel,
    DropSnapshot,
    ForwardBackward,
    LossSettings,
    OptimStep,
    Sample,
    SaveWeights,
    UnloadModel,
)
from skyrl_tx_server.files.run_index import RunIndex
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import StartupState
from tests.fakes.engine import LORA_WEIGHTS, REFUSED_TOKEN, FakeEngine
from tests.fakes.sdk_datum import sdk_datum
from tests.fakes.server import fake_context, fake_engine, serving

MODEL = "local/fake"
pytestmark = [
    pytest.mark.official_sdk,
    pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning"),
]


@pytest.fixture
def context(tmp_path: Path, request: pytest.FixtureRequest) -> AppState:
    return fake_context(tmp_path, retention=getattr(request, "param", None))


@pytest.fixture
def engine(context: AppState) -> FakeEngine:
    return fake_engine(context)


@pytest.fixture
def url(context: AppState) -> Iterator[str]:
    with serving(StartupState(state=context)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=url, api_key="tml-dummy") as client:
        yield client


@pytest.fixture
def rest(url: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=url, api_key="tml-dummy")


def datum(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    targets = [*tokens[1:], 0]
    return sdk_datum(tokens, target_tokens=targets, weights=weights or [1.0] * len(tokens))


def rl_datum(tokens: list[int]) -> types.Datum:
    n = len(tokens)
    return sdk_datum(tokens, target_tokens=[*tokens[1:], 0], logprobs=[-1.0] * n, advantages=[0.5] * n)


def prompt(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


@pytest.mark.seed_behaviour(120)
def test_the_sdk_takes_a_training_step(client: tinker.ServiceClient, engine: FakeEngine) -> None:
    training = client.create_lora_training_client(MODEL, rank=4, seed=7, train_unembed=False).result()
    trained_future = training.forward_backward([datum([1, 2, 3]), datum([4, 5], [0.0, 1.0])], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
    output = trained_future.result()
    assert [[round(lp, 4) for lp in o["logprobs"].tolist()] for o in output.loss_fn_outputs] == [
        [-0.2, -0.3, 0.0],
        [-0.5, 0.0],
    ]
    assert output.metrics == {"loss:sum": pytest.approx(0.5)}
    assert step.result().metrics == {"grad_norm": 1.5}

    (created,) = engine.of_type(CreateModel)
    assert (created.lora.rank, created.lora.seed, created.lora.train_unembed, created.lora.train_mlp) == (
        4,
        7,
        False,
        True,
    )
    (trained,) = engine.of_type(ForwardBackward)
    assert trained.data[1].weights is not None and trained.data[1].weights.tolist() == [0.0, 1.0]
    (stepped,) = engine.of_type(OptimStep)
    assert (stepped.adam.learning_rate, stepped.adam.grad_clip_norm, stepped.adam.beta2) == (1e-3, 1.0, 0.95)


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_gradient_norm_that_is_not_finite_reaches_the_client(
    client: tinker.ServiceClient, engine: FakeEngine, norm: float
) -> None:
    engine.grad_norm = norm
    training = client.create_lora_training_client(MODEL, rank=4).result()
    metrics = training.optim_step(types.AdamParams()).result(10).metrics
    assert metrics is not None and str(metrics["grad_norm"]) == str(norm)


def test_forward_does_not_train(client: tinker.ServiceClient, engine: FakeEngine) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    training.forward([datum([1, 2])], "cross_entropy").result()
    assert [op.forward_only for op in engine.of_type(ForwardBackward)] == [True]


def test_rl_losses_send_their_inputs_and_settings(client: tinker.ServiceClient, engine: FakeEngine) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    training.forward_backward(
        [rl_datum([1, 2])], "ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}
    ).result()
    (op,) = engine.of_type(ForwardBackward)
    assert op.settings == LossSettings(clip_low_threshold=0.7, clip_high_threshold=1.3)
    assert op.data[0].advantages is not None and op.data[0].advantages.tolist() == [0.5, 0.5]
    assert op.data[0].logprobs is not None and op.data[0].logprobs.dtype == np.float32


def test_many_datums_arrive_in_order(client: tinker.ServiceClient, engine: FakeEngine) -> None:
    """The SDK sends a batch in several requests. Their operations must run in the order of the data."""
    training = client.create_lora_training_client(MODEL, rank=4).result()
    output = training.forward_backward(
        [datum([1 + i % 10, 2]) for i in range(2500)], "cross_entropy"
    ).result()
    assert len(output.loss_fn_outputs) == 2500
    first_tokens = [int(d.tokens[0]) for op in engine.of_type(ForwardBackward) for d in op.data]
    assert len(engine.of_type(ForwardBackward)) == 3
    assert first_tokens == [1 + i % 10 for i in range(2500)]


@pytest.mark.seed_behaviour(129)
def test_an_ephemeral_sampler_keeps_its_weights(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    before = training.save_weights_and_get_sampling_client().result()
    training.optim_step(types.AdamParams()).result()
    after = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=3)
    assert before.sample(prompt(5), 1, params).result().sequences[0].tokens == [6, 7, 8]
    assert after.sample(prompt(5), 1, params).result().sequences[0].tokens == [7, 8, 9]


def test_sampling_parameters_arrive_and_every_sequence_has_an_id(
    client: tinker.ServiceClient, engine: FakeEngine
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    params = types.SamplingParams(max_tokens=5, seed=9, stop=[8], temperature=0.5, top_k=3, top_p=0.9)
    response = sampler.sample(prompt(5), 2, params, include_prompt_logprobs=True).result()
    assert [s.tokens for s in response.sequences] == [[6, 7, 8], [7, 8]]
    assert [s.stop_reason for s in response.sequences] == ["stop", "stop"]
    assert [s.logprobs for s in response.sequences] == [[-0.5] * 3, [-0.5] * 2]
    assert len({s.sequence_id for s in response.sequences}) == 2
    assert response.prompt_logprobs == [None]
    (op,) = engine.of_type(Sample)
    settings = op.settings
    assert (settings.max_tokens, settings.seed, settings.temperature, settings.top_k) == (5, 9, 0.5, 3)
    assert (settings.stop_token_ids, settings.stop_at_eos) == ((8,), False)


@pytest.mark.parametrize(
    ("stop", "strings", "ids", "at_eos"),
    [
        (None, (), (), True),
        ([], (), (), False),
        ("ab", ("ab",), (), True),
        (["a", "b"], ("a", "b"), (), True),
        ([3], (), (3,), False),
    ],
)
def test_every_form_of_stop_is_accepted(
    client: tinker.ServiceClient,
    engine: FakeEngine,
    stop: str | list[str] | list[int] | None,
    strings: tuple[str, ...],
    ids: tuple[int, ...],
    at_eos: bool,
) -> None:
    client.create_sampling_client(base_model=MODEL).result().sample(
        prompt(5), 1, types.SamplingParams(max_tokens=1, stop=stop)
    ).result()
    settings = engine.of_type(Sample)[0].settings
    assert (settings.stop_strings, settings.stop_token_ids, settings.stop_at_eos) == (strings, ids, at_eos)


def test_compute_logprobs_returns_prompt_logprobs(client: tinker.ServiceClient) -> None:
    assert client.create_sampling_client(base_model=MODEL).result().compute_logprobs(
        prompt(1, 2, 3)
    ).result() == [None, -2.0, -2.0]


def test_user_metadata_is_saved_and_restored(
    client: tinker.ServiceClient, rest: tinker.RestClient, engine: FakeEngine
) -> None:
    training = client.create_lora_training_client(
        MODEL, rank=4, user_metadata={"renderer_name": "qwen3"}
    ).result()
    training.optim_step(types.AdamParams()).result()
    saved = training.save_state("0001", user_metadata={"a": "b"}).result().path
    assert saved == f"tinker://{training.model_id}/weights/0001"
    assert engine.of_type(SaveWeights)[0].user_metadata == {"a": "b"}

    for restore in (
        client.create_training_client_from_state,
        client.create_training_client_from_state_with_optimizer,
    ):
        restored = restore(saved).result()
        info = restored.get_info()
        assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 4, MODEL)
        assert engine.models[restored.model_id].steps == 1
    training.load_state(saved).result()

    assert rest.get_training_run(training.model_id).result().user_metadata == {"renderer_name": "qwen3"}
    weights = rest.get_weights_info_by_tinker_path(saved).result()
    assert (weights.base_model, weights.lora_rank, weights.train_mlp) == (MODEL, 4, True)


def test_checkpoints_can_be_listed_sampled_and_deleted(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    state = training.save_state("0001", ttl_seconds=3600).result().path
    path = training.save_weights_for_sampler("s1").result().path
    assert (
        client.create_sampling_client(model_path=path)
        .result()
        .sample(prompt(1), 1, types.SamplingParams(max_tokens=1))
        .result()
    )

    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [(c.checkpoint_id, c.checkpoint_type, c.tinker_path) for c in listed] == [
        ("weights/0001", "training", state),
        ("sampler_weights/s1", "sampler", path),
    ]
    assert [c.expires_at is not None for c in listed] == [True, False]
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    remaining = rest.list_user_checkpoints().result().checkpoints
    assert [(c.tinker_path, c.expires_at) for c in remaining] == [(state, None)]
    (run,) = rest.list_training_runs().result().training_runs
    assert (
        run.last_checkpoint is not None
        and run.last_checkpoint.tinker_path == state
        and run.last_sampler_checkpoint is None
    )
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_sampling_client(model_path=path).result().sample(
            prompt(1), 1, types.SamplingParams(max_tokens=1)
        ).result()


def test_a_published_checkpoint_is_marked_until_unpublished(
    client: tinker.ServiceClient, rest: tinker.RestClient, context: AppState, tmp_path: Path
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    path = training.save_state("0001").result().path
    public_flags = []
    for request in (rest.publish_checkpoint_from_tinker_path, rest.unpublish_checkpoint_from_tinker_path):
        request(path).result()
        public_flags.append(
            [
                checkpoint.public
                for checkpoint in rest.list_checkpoints(training.model_id).result().checkpoints
            ]
        )
        assert RunIndex(tmp_path / "ledger.jsonl").public == context.run_index.public  # kept in the file
    assert public_flags == [[True], [False]]
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert context.run_index.public == set()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.publish_checkpoint_from_tinker_path(path).result()


def test_the_tinker_command_line_manages_checkpoints(client: tinker.ServiceClient, url: str) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    path = training.save_state("0001").result().path
    run_id = training.model_id
    sampler = training.save_weights_for_sampler("s1").result().path

    def command(*words: str) -> str:
        environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-dummy", "COLUMNS": "400"}
        result = CliRunner().invoke(main_cli, words, env=environment)
        assert result.exit_code == 0, result.output
        return result.output

    assert run_id in command("run", "list") and "Rank 4" in command("run", "info", run_id)
    listed = json.loads(command("-f", "json", "checkpoint", "list"))["checkpoints"]
    assert {checkpoint["tinker_path"] for checkpoint in listed} == {path, sampler}
    assert all(checkpoint["size_bytes"] > 0 for checkpoint in listed)
    assert "weights/0001" in command("checkpoint", "list", "--run-id", run_id)
    command("checkpoint", "publish", path)
    command("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert "Yes" in command("checkpoint", "info", path)
    command("checkpoint", "unpublish", path)
    command("checkpoint", "delete", "--yes", sampler)
    (remaining,) = json.loads(command("-f", "json", "checkpoint", "list"))["checkpoints"]
    assert remaining["tinker_path"] == path and remaining["expires_at"] is not None


def test_weights_are_downloaded_in_pefts_layout(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    saved = training.save_weights_external("e1", ttl_seconds=3600).result()
    assert saved.path == f"tinker://{training.model_id}/external_weights/e1"
    reply = rest.get_external_weights_urls(saved.path).result()
    assert timedelta(minutes=55) < reply.expires - datetime.now(UTC) < timedelta(minutes=65)
    files = {name: httpx.get(address) for name, address in reply.urls.items()}
    assert json.loads(files["adapter_config.json"].content)["r"] == 4
    tensors = safetensors.numpy.load(files["adapter_model.safetensors"].content)
    assert tensors.keys() == LORA_WEIGHTS.keys()
    for response in files.values():
        assert int(response.headers["content-length"]) == len(response.content)
    address = reply.urls["adapter_config.json"]
    # The signature covers the expiry.
    assert httpx.get(address.replace("ends=", "ends=9")).status_code == 404
    assert httpx.get(address.replace("adapter_config.json", "..%2Fcheckpoint.json")).status_code == 404
    (listed,) = rest.list_checkpoints(training.model_id).result().checkpoints
    assert (listed.checkpoint_type, listed.expires_at is not None) == ("external", True)
    rest.delete_checkpoint_from_tinker_path(saved.path).result()
    assert httpx.get(address).status_code == 404


def test_the_sdk_reads_capabilities_and_sessions(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length, model.trainable, model.sampleable) == (
        MODEL,
        128,
        True,
        True,
    )
    training = client.create_lora_training_client(MODEL, rank=1).result()
    session_id = training.model_id.split(":")[0]
    assert session_id in rest.list_sessions().result().sessions
    assert rest.get_session(session_id).result().training_run_ids == [training.model_id]


def test_leaving_the_with_block_frees_models_and_snapshots(url: str, engine: FakeEngine) -> None:
    with tinker.ServiceClient(base_url=url, api_key="tml-dummy") as client:
        training = client.create_lora_training_client(MODEL, rank=4).result()
        training.save_weights_and_get_sampling_client().result()
        assert len(engine.models) == len(engine.snapshots) == 1
    engine.submit(DropSnapshot(weights="none")).result(5)  # a barrier: all earlier operations have run
    assert (engine.models, engine.snapshots) == ({}, {})
    assert engine.of_type(UnloadModel)


def test_a_bad_request_does_not_affect_other_requests(client: tinker.ServiceClient) -> None:
    """The HTTP side refuses one bad request, and the engine refuses another."""
    sampler = client.create_sampling_client(base_model=MODEL).result()
    params = types.SamplingParams(max_tokens=2)
    first_tokens = [1, 99, 2, REFUSED_TOKEN, 3]
    calls = [sampler.sample(prompt(first), 1, params) for first in first_tokens]
    assert [calls[i].result(10).sequences[0].tokens for i in (0, 2, 4)] == [[2, 3], [3, 4], [4, 5]]
    with pytest.raises(tinker.BadRequestError, match="vocabulary"):
        calls[1].result(10)
    with pytest.raises(tinker.RequestFailedError, match="a refused prompt"):
        calls[3].result(10)

    training = client.create_lora_training_client(MODEL, rank=4).result()
    good, bad = (
        training.forward_backward([datum([1, 2])], "cross_entropy"),
        training.forward_backward([datum([REFUSED_TOKEN, 2])], "cross_entropy"),
    )
    step = training.optim_step(types.AdamParams())
    assert good.result(10).metrics and step.result(10).metrics
    with pytest.raises(tinker.RequestFailedError, match="a refused datum"):
        bad.result(10)


def test_two_hundred_concurrent_samples_return(client: tinker.ServiceClient, engine: FakeEngine) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    engine.gate.clear()
    calls = [
        sampler.sample(prompt(1 + i % 12), 1, types.SamplingParams(max_tokens=2, seed=i)) for i in range(200)
    ]
    engine.gate.set()
    sampled_tokens = [call.result(30).sequences[0].tokens for call in calls]
    assert sampled_tokens == [[2 + i % 12, 3 + i % 12] for i in range(200)]
    assert sorted(op.settings.seed or 0 for op in engine.of_type(Sample)) == list(range(200))


@pytest.mark.parametrize("context", [Retention(hold_s=0.05)], indirect=True)
def test_a_result_that_takes_longer_than_one_poll_still_arrives(
    client: tinker.ServiceClient, engine: FakeEngine
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    engine.gate.clear()
    step = training.optim_step(types.AdamParams())
    with pytest.raises((TimeoutError, concurrent.futures.TimeoutError)):
        step.result(0.3)
    engine.gate.set()
    assert step.result(10).metrics == {"grad_norm": 1.5}


class DropOneReply:
    """A TCP proxy that delivers the first request to `route` and closes the connection without the reply."""

    def __init__(self, url: str, route: bytes) -> None:
        self._upstream = int(url.rsplit(":", 1)[1])
        self._route = route
        self.dropped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._stop = asyncio.Event()
        self._thread.start()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._connection, sock=self._listener)
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close in the next iteration of the loop

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        cut = asyncio.Event()

        async def forward() -> None:
            while data := await reader.read(1 << 16):
                if self._route in data and not self.dropped.is_set():
                    self.dropped.set()
                    cut.set()
                up_writer.write(data)
                await up_writer.drain()
            up_writer.close()

        async def back() -> None:
            while data := await up_reader.read(1 << 16):
                if cut.is_set():
                    break
                writer.write(data)
                await writer.drain()
            writer.close()
            up_writer.close()

        try:
            await asyncio.gather(forward(), back(), return_exceptions=True)
        finally:
            writer.transport.abort()
            up_writer.transport.abort()


@pytest.mark.parametrize(
    "route",
    [b"/api/v1/optim_step", b"/api/v1/forward_backward", b"/api/v1/save_weights", b"/api/v1/create_model"],
)
def test_a_request_whose_reply_was_lost_runs_once(url: str, engine: FakeEngine, route: bytes) -> None:
    proxy = DropOneReply(url, route)
    try:
        with tinker.ServiceClient(base_url=proxy.url, api_key="tml-dummy") as client:
            training = client.create_lora_training_client(MODEL, rank=4).result()
            training.forward_backward([datum([1, 2])], "cross_entropy").result(20)
            training.optim_step(types.AdamParams()).result(20)
            training.save_state("once").result(20)
    finally:
        proxy.close()
    assert proxy.dropped.is_set()
    kinds = [type(op).__name__ for op in engine.executed]
    assert kinds[:4] == ["CreateModel", "ForwardBackward", "OptimStep", "SaveWeights"] and kinds[4:] in (
        [],
        ["UnloadModel"],
    )


def test_a_client_of_a_restarted_server_gets_clear_errors(tmp_path: Path) -> None:
    """The pending request fails with status 410. The next error names a call that restores the model."""
    first = fake_context(tmp_path, retention=Retention(hold_s=0.2))
    with serving(StartupState(state=first)) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-dummy")
        training = client.create_lora_training_client(MODEL, rank=4).result()
        training.optim_step(types.AdamParams()).result()
        saved = training.save_state("0001").result().path
        fake_engine(first).gate.clear()
        step = training.optim_step(types.AdamParams())
        with pytest.raises((TimeoutError, concurrent.futures.TimeoutError)):
            step.result(0.5)
    second = fake_context(tmp_path)
    with serving(StartupState(state=second), port=int(url.rsplit(":", 1)[1])):
        with pytest.raises(Exception, match="expired/broken") as raised:
            step.result(20)
        assert type(raised.value).__name__ == "RetryableException"
        with pytest.raises(tinker.NotFoundError, match="create_training_client_from_state_with_optimizer"):
            training.optim_step(types.AdamParams()).result(20)
        with tinker.ServiceClient(base_url=url, api_key="tml-dummy") as new_client:
            restored = new_client.create_training_client_from_state_with_optimizer(saved).result()
            assert fake_engine(second).models[restored.model_id].steps == 1
        client.close("interrupted").result(20)  # the client's heartbeat would continue during later tests


# name: (call with the training, sampling and REST clients, pattern of the error message)
REFUSALS = {
    "gspo without its mask": (
        lambda t, s, r: t.forward_backward([rl_datum([1, 2])], "gspo"),
        "needs the input sequence_ratio_mask",
    ),
    "stable_reinforce": (
        lambda t, s, r: t.forward_backward([rl_datum([1, 2])], "stable_reinforce"),
        "use one of: cross_entropy",
    ),
    "dimuon": (lambda t, s, r: t.optim_step(types.DimuonParams(learning_rate=1e-3)), "use AdamW"),
    "loss setting": (
        lambda t, s, r: t.forward_backward([rl_datum([1, 2])], "ppo", {"tag": "x"}),
        "unknown setting 'tag'",
    ),
    "image": (
        lambda t, s, r: t.forward_backward(
            [
                sdk_datum(
                    types.ModelInput(
                        chunks=[types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)]
                    ),
                    target_tokens=[1, 1],
                    weights=[1.0, 1.0],
                )
            ],
            "cross_entropy",
        ),
        "text-only",
    ),
    "lengths": (
        lambda t, s, r: t.forward_backward(
            [sdk_datum([1, 2], target_tokens=[1], weights=[1.0])], "cross_entropy"
        ),
        "must be equal",
    ),
    "not finite": (
        lambda t, s, r: t.forward_backward([datum([1, 2], [1.0, float("nan")])], "cross_entropy"),
        "NaN or infinity",
    ),
    "vocabulary": (
        lambda t, s, r: t.forward_backward([datum([1, 64])], "cross_entropy"),
        "outside this model's vocabulary of 64",
    ),
    "datum too long": (
        lambda t, s, r: t.forward_backward([datum([1] * 129)], "cross_entropy"),
        "context window of 128",
    ),
    "top-k too large": (
        lambda t, s, r: s.sample(prompt(1), 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=65),
        "topk_prompt_logprobs=65 must lie between 0 and 64",
    ),
    "alternative tokens": (
        lambda t, s, r: s.sample(prompt(1, 2), 1, types.SamplingParams(max_tokens=1), prompt_alt_tokens_k=2),
        "send one request for each prefix",
    ),
    "prompt too long": (
        lambda t, s, r: s.sample(prompt(*[1] * 100), 1, types.SamplingParams(max_tokens=50)),
        r"Prompt length plus max_tokens exceeds the model's context window: 100 \+ 50 > 128",
    ),
    "encrypted": (
        lambda t, s, r: t.save_weights_external("e1", age_encryption_recipients=["age1x"]),
        "encrypt the files after .*path of save_weights_external, or run tinker checkpoint download",
    ),
    "URLs of a missing checkpoint": (
        lambda t, s, r: r.get_external_weights_urls(f"tinker://{t.model_id}/external_weights/none"),
        "no checkpoint",
    ),
    "bad name": (lambda t, s, r: t.save_state("a b"), "checkpoint name"),
    "taken name": (lambda t, s, r: t.save_state("x").result() and t.save_state("x"), "exists already"),
    "unknown checkpoint": (
        lambda t, s, r: t.load_state(f"tinker://{t.model_id}/weights/none"),
        "no checkpoint",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_unsupported_request_is_refused_with_an_alternative(
    case: str, client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    call, message = REFUSALS[case]
    training = client.create_lora_training_client(MODEL, rank=4).result()
    sampler = client.create_sampling_client(base_model=MODEL).result()
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=message):
        call(training, sampler, rest).result(10)
    # the clients still work
    training.optim_step(types.AdamParams()).result(10)
    sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=1)).result(10)
