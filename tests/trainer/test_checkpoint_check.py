"""Tests that train_attn, train_mlp and train_unembed reach the server, and that a checkpoint with other
values is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import chz
import pytest

from skyrl_tx_server.http.http_handler import StartupState
from src.cli.command_line import parse, parse_as
from src.core.errors import ConfigError
from src.policy.backend import connect
from src.policy.checkpoint_check import check_checkpoint
from src.policy.options import AdapterOptions
from src.records.run_directory import RunDirectory, find_run_directory
from src.sft.config import SftConfig
from tests.fakes.server import fake_context, serving
from tests.trainer.test_agent_trainer import write_run
from tests.trainer.test_backend import settings

PARTS = ("train_attn", "train_mlp", "train_unembed")
TRAIN = ["model_name=m", "tasks_dir=t"]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with serving(StartupState(state=fake_context(tmp_path / "checkpoints"))) as url:
        yield url


@pytest.mark.official_sdk
@pytest.mark.parametrize("off", PARTS)
async def test_the_server_gets_the_trained_parts(url: str, tmp_path: Path, off: str) -> None:
    adapter = chz.replace(AdapterOptions(lora_rank=4), **{off: False})
    async with connect(settings(url)) as endpoint:
        paths = await (await endpoint.open_training(adapter)).save("one")
        (record,) = (tmp_path / "checkpoints").glob("**/weights/**/checkpoint.json")
        lora = json.loads(record.read_text())["lora"]
        assert {part: lora[part] for part in PARTS} == {part: part != off for part in PARTS}
        await endpoint.open_training(chz.replace(adapter, load_checkpoint_path=paths.state_path))
        other = AdapterOptions(lora_rank=4, load_checkpoint_path=paths.state_path)
        message = f"^{paths.state_path} has {off}=false, not true; set {off}=false, or start from another"
        with pytest.raises(ConfigError, match=message) as error:
            await endpoint.open_training(other)
        assert "\n" not in str(error.value)


def client_of(**reported: object) -> Any:
    """Return a client whose endpoint reports these values for every checkpoint."""
    fields = {"base_model": "m", "lora_rank": None, **dict.fromkeys(PARTS)}

    async def info(path: str) -> SimpleNamespace:
        return SimpleNamespace(**(fields | reported))

    return SimpleNamespace(get_weights_info_by_tinker_path=info)


async def test_parts_that_an_endpoint_omits_are_not_compared() -> None:
    client, adapter = client_of(train_mlp=False), AdapterOptions(train_attn=False, train_mlp=False)
    await check_checkpoint(client, "tinker://a", adapter, model_name="m")
    with pytest.raises(ConfigError, match="has train_mlp=false, not true"):
        await check_checkpoint(client, "tinker://a", AdapterOptions(), model_name="m")


async def test_a_checkpoint_of_another_rank_or_model_is_refused() -> None:
    client = client_of(base_model="m:peft:262144", lora_rank=8)
    await check_checkpoint(client, "tinker://a", AdapterOptions(lora_rank=8), model_name="m")
    with pytest.raises(ConfigError, match=r"^tinker://a has lora_rank=8, not 32; set lora_rank=8, or start"):
        await check_checkpoint(client, "tinker://a", AdapterOptions(), model_name="m")
    with pytest.raises(ConfigError, match=r"^tinker://a is a checkpoint of m:peft:262144, not of other; set"):
        await check_checkpoint(client, "tinker://a", AdapterOptions(lora_rank=8), model_name="other")


async def test_one_message_lists_all_options_that_differ() -> None:
    client = client_of(lora_rank=8, train_unembed=False)
    message = (
        "^tinker://a has lora_rank=8, not 32, and train_unembed=false, not true; "
        "set lora_rank=8 train_unembed=false, or start from another checkpoint$"
    )
    with pytest.raises(ConfigError, match=message):
        await check_checkpoint(client, "tinker://a", AdapterOptions(), model_name="m")


def test_an_adapter_without_a_trained_part_is_refused() -> None:
    nothing = [f"{part}=false" for part in PARTS]
    with pytest.raises(ConfigError, match="all false, so nothing is trained; set one to true"):
        parse([*TRAIN, *nothing])
    with pytest.raises(ConfigError, match="all false"):
        parse_as(SftConfig, ["model_name=m", "data=d", *nothing])
    assert parse([*TRAIN, *nothing[:2]]).train_unembed


@pytest.mark.parametrize("part", PARTS)
def test_a_resumed_run_keeps_its_trained_parts(tmp_path: Path, part: str) -> None:
    path = tmp_path / "run"
    write_run(path, **{part: "false"})
    resume = [*TRAIN, f"log_path={path}", "behavior_if_log_dir_exists=resume"]
    with pytest.raises(ConfigError, match=f"has {part}=False, not True; resume it with that value"):
        find_run_directory(parse([*resume, "model_name=org/name"]), name="other")


def test_the_trained_parts_are_saved_in_the_run(tmp_path: Path) -> None:
    config = parse_as(SftConfig, ["model_name=m", "data=d", "train_mlp=false", f"log_path={tmp_path}/run"])
    RunDirectory(path=tmp_path / "run", checkpoint=None, delete_first=False).create(config)
    saved = cast(dict[str, object], json.loads((tmp_path / "run" / "config.json").read_text()))
    assert [saved[part] for part in PARTS] == [True, False, True]
