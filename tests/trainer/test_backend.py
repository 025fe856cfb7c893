"""Runs the backend with the real SDK against the HTTP side of our server with a fake engine."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import chz
import httpx
import pytest

from skyrl_tx_server.http.http_handler import StartupState
from src.cli.command_line import parse
from src.core.errors import BackendError, ConfigError
from src.learning.datums import sequences_of, to_datums
from src.learning.learner import Learner
from src.loop.connection import update_scale
from src.policy.backend import base_url, check_alive, connect, require_key
from src.policy.options import AdapterOptions, BackendOptions
from src.policy.sampling_policy import SampleRequest
from src.rollouts.run_events import RunEvents
from tests.fakes.server import fake_context, fake_engine, serving
from tests.fakes.trials import turn
from tests.trainer.test_learner import settings as learner_settings

pytestmark = pytest.mark.official_sdk


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(StartupState(state=fake_context(tmp_path / "checkpoints"))) as url:
        yield url


def settings(url: str, **changes) -> BackendOptions:
    options = {
        "backend": "skyrl-tx",
        "skyrl_tx_url": url,
        "tinker_base_url": None,
        "model_name": "local/fake",
        "seed": 1,
        "context_limit": 64,
        "heartbeat_timeout_s": 60.0,
    }
    return BackendOptions(**(options | changes))


ADAPTER = AdapterOptions(lora_rank=8)


async def test_the_backend_samples_trains_saves_and_loads(url):
    async with connect(settings(url)) as endpoint:
        backend = await endpoint.open_training(ADAPTER)
        policy = await backend.policy(0)
        first = await policy.sample(
            SampleRequest(prompt_ids=[1, 2, 3], max_tokens=4, temperature=1.0, seed=5)
        )
        assert first.policy_version == 0 and len(first.logprobs) == len(first.completion_ids) > 0
        datums = to_datums(sequences_of([turn([1, 2], [3, 4])], advantage=1.0))
        metrics = await Learner(backend.training_client, learner_settings()).update([datums, datums])
        assert metrics["optim/num_substeps"] == 2
        assert (await backend.policy(1)).version == 1
        reference = await backend.reference_model()
        assert len(await reference.logprobs([1, 2, 3])) == 2
        paths = await backend.save("000001")
        assert paths.state_path.endswith("/weights/000001") and paths.sampler_path.endswith(
            "/sampler_weights/000001"
        )
    async with connect(settings(url)) as endpoint:
        resumed = await endpoint.open_training(chz.replace(ADAPTER, load_checkpoint_path=paths.state_path))
        assert (await resumed.policy(1)).version == 1


@pytest.mark.seed_behaviour(125, 131)
async def test_a_model_that_is_not_served_is_rejected(url):
    with pytest.raises(
        ConfigError, match=r"model_name=org/other is not served at http.*; it serves: local/fake"
    ):
        async with connect(settings(url, model_name="org/other")):
            pass


@pytest.mark.seed_behaviour(123)
async def test_a_context_limit_above_the_servers_is_rejected(url):
    with pytest.raises(
        ConfigError, match=r"context_limit=999999 exceeds the server's \d+ tokens for .*yarn=true"
    ):
        async with connect(settings(url, context_limit=999_999)):
            pass


@pytest.mark.seed_behaviour(123)
async def test_the_clouds_context_comes_from_its_capabilities(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    context = fake_context(tmp_path)
    engine = fake_engine(context)
    engine.info = replace(engine.info, max_context_length=128_000)
    with serving(StartupState(state=context)) as url:
        cloud = {"backend": "tinker", "skyrl_tx_url": None, "tinker_base_url": url}
        async with connect(settings(url, **cloud, context_limit=128_000)):
            pass
        with pytest.raises(
            ConfigError, match="exceeds the server's 128000 tokens for local/fake; lower it, or use"
        ):
            async with connect(settings(url, **cloud, context_limit=128_001)):
                pass


@pytest.mark.seed_behaviour(124)
async def test_a_rejected_rank_gives_the_servers_message(url):
    with pytest.raises(
        BackendError, match="creating an adapter of rank 4096 on local/fake: LoRA rank 4096 is above"
    ) as error:
        async with connect(settings(url)) as endpoint:
            await endpoint.open_training(AdapterOptions(lora_rank=4096))
    assert "\n" not in str(error.value) and "{" not in str(error.value)


@pytest.mark.seed_behaviour(84)
async def test_lora_alpha_sets_the_alpha_of_the_adapter(url):
    async with connect(settings(url)) as endpoint:
        backend = await endpoint.open_training(AdapterOptions(lora_rank=8, lora_alpha=64.0))
        assert backend.lora_alpha == 64
        paths = await backend.save("000001")
        resumed = AdapterOptions(lora_rank=8, lora_alpha=16.0, load_checkpoint_path=paths.state_path)
        assert (await endpoint.open_training(resumed)).lora_alpha == 64  # the alpha of the checkpoint


async def test_the_backend_uses_tinkers_alpha_if_none_is_reported(url, monkeypatch):
    async def without_alpha(*arguments, **options):
        return httpx.Response(200, json={"lora_rank": 8})

    async with connect(settings(url)) as endpoint:
        monkeypatch.setattr("src.policy.backend.request", without_alpha)
        adapter = AdapterOptions(lora_rank=8, lora_alpha=64.0)
        assert (await endpoint.open_training(adapter)).lora_alpha == 32


@pytest.mark.seed_behaviour(84)
def test_a_scaled_learning_rate_is_reported_in_one_line():
    lines: list[str] = []
    events = cast(RunEvents, SimpleNamespace(say=lines.append))
    options = ["model_name=m", "tasks_dir=/tasks", "learning_rate=1e-5"]
    assert update_scale(parse(options), 32.0, events) == 1
    assert update_scale(parse([*options, "lora_alpha=64"]), 64.0, events) == 1 and not lines
    assert update_scale(parse([*options, "lora_alpha=64"]), 32.0, events) == 2
    assert lines == [
        "lora_alpha=64: the server gives the adapter the alpha 32, so learning_rate is multiplied by 2 and "
        "weight_decay is divided by 2"
    ]


async def test_a_missing_checkpoint_is_named(url):
    with pytest.raises(BackendError, match="loading tinker://nobody/weights/x"):
        async with connect(settings(url)) as endpoint:
            await endpoint.open_training(AdapterOptions(load_checkpoint_path="tinker://nobody/weights/x"))


async def test_a_lost_server_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("src.policy.backend.CLOSE_TIMEOUT_S", 0.5)
    with serving(StartupState(state=fake_context(tmp_path))) as url:
        connection = connect(settings(url))
        endpoint = await connection.__aenter__()
        await endpoint.open_training(ADAPTER)
    error = BackendError("sampling: gone")
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(
            BackendError,
            match=r"no server answers at .*; start it, .*, then resume \(first error: sampling: gone",
        ),
    ):
        await connection.__aexit__(BackendError, error, None)


async def test_a_server_that_is_starting_is_not_to_be_started(tmp_path, caplog):
    startup = StartupState(state=fake_context(tmp_path))
    with caplog.at_level(logging.CRITICAL), serving(startup) as url:
        connection = connect(settings(url))
        await connection.__aenter__()
        startup.state = None
        with pytest.raises(BackendError, match="is not ready yet; wait until it is ready, then resume"):
            await connection.__aexit__(BackendError, BackendError("sampling: gone"), None)


@pytest.mark.seed_behaviour(133)
async def test_an_unreachable_server_is_reported_within_seconds():
    with pytest.raises(BackendError, match=r"no server answers at http://127.0.0.1:9 "):
        async with connect(settings("http://127.0.0.1:9")):
            pass


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "http://[::1", "127.0.0.1:8000"])
async def test_an_invalid_address_is_reported_in_one_line(address):
    with pytest.raises(BackendError, match="is not an HTTP address; write http://host:port"):
        await check_alive(address)


async def test_a_server_that_is_still_loading_is_reported_as_not_ready():
    with serving(StartupState()) as url, pytest.raises(BackendError, match="is not ready yet"):
        async with connect(settings(url)):
            pass


@pytest.mark.seed_behaviour(96, 126)
def test_our_server_needs_no_key(monkeypatch):
    server_settings = settings("http://h:1/")
    assert require_key(server_settings) == "tml-dummy"
    monkeypatch.setenv("TINKER_API_KEY", "whatever")
    assert require_key(server_settings) == "tml-dummy"
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    assert require_key(server_settings) == "tml-mine"
    assert base_url(server_settings) == "http://h:1"


@pytest.mark.seed_behaviour(96, 126)
def test_the_cloud_needs_a_key(monkeypatch):
    cloud = settings("http://h:1", backend="tinker", skyrl_tx_url=None)
    with pytest.raises(ConfigError, match="set TINKER_API_KEY"):
        require_key(cloud)
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    assert require_key(cloud) == "tml-mine"
    assert base_url(cloud).startswith("https://tinker.")
