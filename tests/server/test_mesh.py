"""Several devices give the same results as one.

The devices are virtual and must be configured before jax starts, so the calculations run in a subprocess.
`scripts/check_mesh.py` compares a server on one device with servers on more meshes.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from skyrl_tx_server.config.engine_options import MeshShape
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.families.layer_spec import ShardAxis, Weight
from skyrl_tx_server.model.lora.lora_math import split_parts
from skyrl_tx_server.model.mesh import make_mesh, place
from skyrl_tx_server.model.weights import _outputs, check_divisible
from tests.fakes.tiny_model import QUICK_TO_COMPILE
from tests.server.on_eight_devices import DENSE, SPARSE

ROOT = Path(__file__).resolve().parents[2]
LATENT = load_model_config(ROOT / "tests" / "fixtures" / "families" / "deepseek_v3")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the JSON report that `tests.server.on_eight_devices` prints."""
    flags = f"{QUICK_TO_COMPILE} --xla_force_host_platform_device_count=8"
    # NPROC is the number of XLA's threads. `skyrl_tx_server/__main__.py` explains why collectives need more
    # than the default.
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "NPROC": "32",
    }
    program = [sys.executable, "-m", "tests.server.on_eight_devices", str(tmp_path_factory.mktemp("models"))]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_eight_devices_train_as_one(report: dict) -> None:
    assert report["logprobs"] <= 1e-4 and report["loss"] <= 1e-5 and report["gradient"] <= 1e-4


def test_each_device_holds_the_planned_part_of_the_weights(report: dict) -> None:
    assert report["held"] == report["planned"] < 0.4 * report["whole"]


def test_parts_of_fp8_weights_are_loaded_with_their_scales(report: dict) -> None:
    assert report["fp8"]


def test_host_memory_holds_one_shard_of_one_weight_at_a_time(report: dict) -> None:
    assert report["largest read"] == report["largest held"]


def test_decoding_sends_activations_and_no_weights(report: dict) -> None:
    # the largest message, in elements, relative to the attention output matrix of one layer
    assert report["sent"] < 0.5


def test_kv_pages_on_several_devices_equal_those_on_one(report: dict) -> None:
    assert report["written"] and report["read"] and report["attended"]


def test_the_decode_kernel_on_several_devices_equals_one(report: dict) -> None:
    assert report["decoded"] <= 1e-6


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (
            DENSE,
            MeshShape(tensor=4),
            "tensor_parallel=4: 2 key-value heads cannot be divided equally over 4 devices (tensor); "
            "use fsdp_parallel=2 tensor_parallel=2",
        ),
        (SPARSE, MeshShape(tensor=4), "(tensor); use tensor_parallel=2 expert_parallel=2"),
        (DENSE, MeshShape(tensor=2), None),
        (
            replace(DENSE, vocab_size=65),
            MeshShape(tensor=2),
            "65 tokens of the vocabulary cannot be divided equally over 2 devices",
        ),
        (replace(DENSE, intermediate_size=25), MeshShape(tensor=2), "25 columns of an MLP"),
        (DENSE, MeshShape(fsdp=5), "32 hidden dimensions cannot be divided equally over 5 devices"),
        (DENSE, MeshShape(data=4, fsdp=2), "12 max_num_seqs cannot be divided equally over 8 devices"),
        (DENSE, MeshShape(expert=2), "expert_parallel=2: 0 experts cannot be divided"),
        (SPARSE, MeshShape(expert=8), "4 experts cannot be divided equally over 8 devices"),
        (
            LATENT,
            MeshShape(tensor=2),
            "tensor_parallel=2: 1 key-value heads cannot be divided equally over 2 devices",
        ),
        (LATENT, MeshShape(fsdp=8), "4 heads of latent attention cannot be divided equally over 8 devices"),
    ],
)
@pytest.mark.seed_behaviour(128)
def test_the_error_for_sizes_that_do_not_divide_is_one_line(
    config, shape: MeshShape, message: str | None
) -> None:
    if message is None:
        return check_divisible(config, shape, max_num_seqs=12)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        check_divisible(config, shape, max_num_seqs=12)
    assert "\n" not in str(error.value)


def test_a_mesh_with_too_many_devices_is_refused() -> None:
    assert make_mesh(MeshShape()) is None
    with pytest.raises(
        ConfigError,
        match=r"data_parallel=32 tensor_parallel=2 needs 64 devices; this machine has \d+ \(cpu\)",
    ):
        make_mesh(MeshShape(data=32, tensor=2))


def test_each_device_holds_a_share_of_every_fused_part() -> None:
    """q has 4 outputs, k and v have 2 each. Each of two devices holds half of every part."""
    weight = Weight(names=("q", "k", "v"), widths=(4, 2, 2), inputs=3, split=ShardAxis.OUTPUTS)
    assert weight.spec == PartitionSpec(None, ("tensor", "fsdp"), None)
    pieces = list(_outputs(weight, slice(4, 8), shards=2))
    assert pieces == [("q", slice(2, 4)), ("k", slice(1, 2)), ("v", slice(1, 2))]
    halves = [part for half in (slice(4, 6), slice(6, 8)) for part in _outputs(weight, half, shards=2)]
    assert halves == pieces, "two fsdp devices hold the halves of one tensor-parallel shard"
    fused = np.array([["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]])
    indices = np.arange(8)[None]
    q, k, v = split_parts(indices, (4, 2, 2), shards=2)  # type: ignore[arg-type]
    assert [fused[0, part[0]].tolist() for part in (np.asarray(q), np.asarray(k), np.asarray(v))] == [
        ["q0", "q1", "q2", "q3"],
        ["k0", "k1"],
        ["v0", "v1"],
    ]


def test_one_device_reads_the_whole_array_at_once() -> None:
    requested = []
    place(DENSE, (4, 6), PartitionSpec("tensor"), lambda part: requested.append(part) or np.zeros((4, 6)))
    assert requested == [(slice(0, 4), slice(0, 6))]
