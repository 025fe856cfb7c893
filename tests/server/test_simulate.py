"""Tests of the simulator, and of the real engine and scheduler on simulated devices."""

import math
from dataclasses import replace
from pathlib import Path

import chz
import numpy as np
import pytest

from scripts.bench.gpu_models import heads_size, matrix_size
from scripts.simulate.__main__ import main
from scripts.simulate.costs import DEVICES, Measured, ModelSize, step_flops
from scripts.simulate.simulation import SimulateConfig, simulate
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.model import reductions
from skyrl_tx_server.model.shapes import GPU_PREFILL, PREFILL_TILE
from skyrl_tx_server.sampling import model_runner
from tests.fakes.present import present
from tests.fakes.tiny_model import CONFIG, make_model, make_settings

H200 = DEVICES["h200-fixed"]


@pytest.mark.parametrize(
    ("prompt_tokens", "slots"), [(900, 64), (8192, 32)], ids=["64 x 900 tokens", "32 x 8192 tokens"]
)
def test_decoding_between_prefills_costs_at_most_25_percent(prompt_tokens: int, slots: int) -> None:
    """The run is compared with `fill_first`, which computes all prompts before the first decode dispatch."""
    config = SimulateConfig(prompt_tokens=prompt_tokens, slots=slots, agents=slots)
    total_s = simulate(config, H200).outcome.total_s
    fill_first = simulate(chz.replace(config, prefills_per_dispatch=math.inf), H200)
    assert fill_first.num_decoding == pytest.approx(slots)
    assert total_s <= 1.25 * fill_first.outcome.total_s


def test_decoding_and_training_each_keep_45_percent_of_speed() -> None:
    config = SimulateConfig(agents=32, slots=32, prompt_tokens=2048, training_ops=400, train_share=0.5)
    shared = simulate(config, H200).outcome
    sampling_alone = simulate(chz.replace(config, training_ops=0), H200).outcome
    assert shared.training_s > shared.sampling_s
    trained_s = sum(
        H200.training_s(tokens) for time_s, tokens in shared.trained_at if time_s <= shared.sampling_s
    )
    assert trained_s >= 0.45 * shared.sampling_s
    assert sampling_alone.sampling_s >= 0.45 * shared.sampling_s


def test_the_time_of_one_agent_is_the_sum_of_its_programs() -> None:
    """The agent needs two prefill batches of 1,024 tokens and 32 decode dispatches of 16 steps."""
    config = SimulateConfig(agents=1, prompt_tokens=2048, new_tokens=513)
    result = simulate(config, H200)
    assert (result.num_decoding, result.num_dispatches) == (1, 32)
    assert result.outcome.total_s == pytest.approx(2 * 22e-3 + 512 * (8e-3 + 65e-6))
    assert result.work_s["prefill"] == pytest.approx(2 * 22e-3)


def test_every_turn_of_every_agent_is_sampled_with_few_pages() -> None:
    """The KV cache has room for two agents, so sequences are preempted."""
    config = SimulateConfig(
        agents=6, slots=4, prompt_tokens=100, new_tokens=150, turns=3, turn_tokens=40, cache_tokens=1600
    )
    outcome = simulate(config, H200).outcome
    assert [tokens for _, tokens in outcome.sampled_at] == [150] * 18
    assert simulate(config, H200).outcome == outcome, "the simulation is deterministic"


def test_a_machine_with_a_gpu_gives_the_same_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimulateConfig(agents=3, prompt_tokens=100, new_tokens=100)
    expected = simulate(config, H200).outcome
    monkeypatch.setattr(model_runner, "on_gpu", lambda: True)
    assert simulate(config, H200).outcome == expected


def test_measured_times_depend_on_number_and_length_of_sequences() -> None:
    measured = Measured(
        prefill={1: (0.1, 0.001), 4: (0.3, 0.002)},
        decode={512: (1.0, 2.0), 1024: (3.0, 5.0)},  # context length -> seconds for 1 and for 5 sequences
        slots=5,
        training={512: 1.0, 2048: 3.0},
    )
    assert measured.prefill_s(4, context=100) == pytest.approx(0.5)
    assert measured.decode_s([40], steps=16, slots=5) == 1.0
    assert measured.decode_s([40, 600, 7], steps=16, slots=5) == 4.0
    assert measured.training_s(600) == 3.0


def test_the_predicted_flops_of_a_step_match_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA counts the body of the loop over decode steps once, so its count is that of one step. In the
    program, every slot attends to all 512 positions of the context and to the 16 positions of the dispatch,
    however long its sequence is. The program also computes the LoRA products, which `step_flops` leaves out.
    """
    # On a CPU, `reductions` computes sums as matrix products with 16 columns, which XLA would also count.
    monkeypatch.setattr(reductions, "on_gpu", lambda: True)
    config = replace(CONFIG, hidden_size=128, intermediate_size=256, head_dim=32)
    settings = make_settings(
        make_model(tmp_path / "model", config),
        tmp_path,
        max_lora_rank=1,
        max_num_seqs=8,
        max_context_length=512,
    )
    programs = dict(DeviceExecutor(settings).sampler.runner.programs())
    counts = present(programs["decode_steps, 8 sequences"].cost_analysis())
    model = ModelSize(
        weights=matrix_size(config), kv_bytes=0, attention=heads_size(config), layers=config.num_layers
    )
    flops = step_flops(model, cached=8 * (512 + 16), slots=8)
    assert flops == pytest.approx(counts["flops"], rel=0.15)


def test_a_4b_model_has_the_measured_times_on_an_h200() -> None:
    """docs/devices.md lists the measured times."""
    costs = DEVICES["h200"]
    steps = [costs.decode_s(np.full(rows, 2048).tolist(), steps=1, slots=rows) for rows in (64, 256)]
    assert steps == pytest.approx([9.71e-3, 26.07e-3], rel=0.02)
    prompts = {1024: 23.2e-3, 4096: 96.5e-3, 8192: 216.6e-3, 32_768: 1.457}
    prefills = [
        sum(
            costs.prefill_s(size, context=length / 2)
            for size in GPU_PREFILL.batch_sizes(length // PREFILL_TILE)
        )
        for length in prompts
    ]
    assert prefills == pytest.approx([*prompts.values()], rel=0.06)
    assert costs.training_s(4096) == pytest.approx(211.1e-3, rel=0.02)


def test_options_of_the_cpu_are_refused_for_other_devices() -> None:
    with pytest.raises(SystemExit, match=r"^error: layers has no effect without device=cpu"):
        main(SimulateConfig(layers=3))
