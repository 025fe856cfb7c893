"""Compare the memory plan with the measured peak for an ordinary training batch of the benchmark model
(`small_model.py`), and for one sequence of 128K tokens with a one-layer model.

    taskset -c 0,1 python -m scripts.bench.memory_plan [tokens=131072]

The server option `dry_run=true` prints the plan. The peak is the largest resident memory of a process that
loads the model, trains one full batch and takes an optimizer step, minus its resident memory before it loads
the model. XLA's compiler takes hundreds of MiB that are not part of the plan. Another process therefore
compiles all programs into the persistent compilation cache first.

The time of attention is quadratic in the length. The model of the long sequence therefore has only one layer
and one head of 32 dimensions, so that the measurement takes two minutes on two cores. As in a real run,
activations take nearly all memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import chz

from scripts.bench.compare import ROOT, print_figure, random_sequences
from scripts.bench.sides.ours import running, settings
from scripts.bench.small_model import CONFIG, make_model
from skyrl_tx_server.executor.memory_plan import plan_memory


@chz.chz
class MemoryConfig:
    tokens: int = chz.field(default=131_072, doc="Length of the long sequence")
    layers: int = chz.field(default=1, doc="Layers of the model for the long sequence")
    hidden: int = chz.field(default=64, doc="Hidden size of the model for the long sequence")
    ordinary_tokens: int = chz.field(default=4096, doc="train_tokens_per_batch of the ordinary batch")


def main(config: MemoryConfig) -> None:
    long = replace(
        CONFIG,
        hidden_size=config.hidden,
        intermediate_size=3 * config.hidden,
        num_layers=config.layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        max_position_embeddings=config.tokens,
    )
    for name, model, tokens in (("ordinary", CONFIG, config.ordinary_tokens), ("long", long, config.tokens)):
        with tempfile.TemporaryDirectory() as directory:
            model_dir = make_model(Path(directory) / "model", model)
            in_a_process("compile", model_dir, tokens)
            planned, measured = map(int, in_a_process("measure", model_dir, tokens).split())
        print_figure(f"{name}: planned for {tokens} tokens, MiB", planned / 2**20)
        print_figure(f"{name}: measured peak, MiB", measured / 2**20)
        print_figure(f"{name}: measured / planned", measured / planned, at_least=0.9)
        print_figure(f"{name}: measured / planned", measured / planned, at_most=1.1)


def in_a_process(command_name: str, model_dir: Path, tokens: int) -> str:
    """Run `compile` or `measure` in another process. Print its output, but return the last line."""
    command = [sys.executable, "-m", "scripts.bench.memory_plan", command_name, str(model_dir), str(tokens)]
    lines = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    print("\n".join(lines[:-1]), flush=True)
    return lines[-1]


def sizes(model_dir: Path, tokens: int) -> dict[str, object]:
    lengths = dict.fromkeys(("max_context_length", "train_tokens_per_batch"), tokens)
    return {
        **lengths,
        "max_num_seqs": 1,
        "max_models": 1,
        "compilation_cache_dir": model_dir.parent / "programs",
    }


def compile_programs(model_dir: Path, tokens: int) -> None:
    """Compile all programs of `measure`, so that the persistent compilation cache contains them, and print
    the plan."""
    with running(model_dir, recompute=False, **sizes(model_dir, tokens)) as ours:
        ours.train(random_sequences([17], vocabulary=CONFIG.vocab_size))
        ours.optim_step()
    print(plan_memory(settings(model_dir, model_dir.parent, **sizes(model_dir, tokens))))
    print()


def measure(model_dir: Path, tokens: int) -> None:
    """Print the number of programs that were compiled, and then the planned bytes and the measured bytes."""
    planned = plan_memory(settings(model_dir, model_dir.parent, **sizes(model_dir, tokens))).total_bytes
    before = resident("VmRSS")
    with running(model_dir, recompute=False, **sizes(model_dir, tokens)) as ours:
        ours.train(random_sequences([tokens + 1], vocabulary=CONFIG.vocab_size))
        ours.optim_step()
        compiled = ours.num_programs() - ours.stat("programs_from_cache")
    print(f"programs compiled during the measurement: {compiled}")
    print(planned, resident("VmHWM") - before)


def resident(field: str) -> int:
    """Return the resident memory of this process in bytes, now (VmRSS) or at its peak (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


if __name__ == "__main__":
    phases = {"compile": compile_programs, "measure": measure}
    if sys.argv[1:2] and sys.argv[1] in phases:
        phases[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(chz.entrypoint(MemoryConfig, argv=sys.argv[1:], allow_hyphens=True))
