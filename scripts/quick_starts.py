"""The quick starts of `./run_skyrl_tx.sh`: small models and the tasks that they learn in minutes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.quickstart.demonstrations import write_chats
from scripts.quickstart.make_tasks import write_training_tasks

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "datasets" / "quickstart"
ARITHMETIC = ROOT / "datasets" / "arithmetic"

# The options of the trainer in every quick start, unless the quick start or the user replaces them.
QUICKSTART_OPTIONS = {
    "logs_dir": "./runs",
    "lora_rank": "16",
    "learning_rate": "1e-3",
    "batch_size": "8",
    "group_size": "8",
    "eval_group_size": "8",
    "n_epochs": "100",
    "max_steps": "12",
    "eval_every": "6",
    "n_parallel_envs": "16",
    "temperature": "1.0",
    "max_tokens": "160",
    "context_limit": "2048",
    "loss_fn": "importance_sampling",
    "trial_timeout_s": "120",
    "save_every": "100",
}
# The options of the server, unless the quick start replaces them. `server_options` raises the limits.
QUICKSTART_SERVER = (
    "max_lora_rank=16",
    "max_num_seqs=32",
    "max_context_length=2048",
    "train_tokens_per_batch=2048",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """Supervised fine-tuning on demonstrations, before the RL of a model that was not made for the tasks."""

    num_demonstrations: int
    write_demonstrations: Callable[[Path, int], None]  # (path of the JSON lines file, number of chats)
    write_tasks: Callable[[Path], None]  # writes the training tasks of the RL to a directory
    options: dict[str, str]  # options of `src.sft`
    rl_options: dict[str, str]  # options of the RL that follows; they replace those of the quick start
    server: tuple[str, ...]  # options of the server, in place of all those of the quick start


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickStart:
    """A model and the tasks that it learns in minutes on two CPU cores."""

    name: str  # prefix of the name of the run directory
    base_model: str  # the default of the option `model_name`
    displayed_model: str  # how `message` names `base_model`
    skill: str  # what the model learns, as a part of the sentence in `message`
    duration: str  # how long `base_model` takes on two CPU cores, as shown in `message`
    options: dict[str, str]  # options of the trainer; they replace those in QUICKSTART_OPTIONS
    server: tuple[str, ...] = QUICKSTART_SERVER  # options of the server
    model_alias: str | None = None  # name of `base_model` at the server; None: the one of `named_model`
    warm_start: WarmStart | None = None  # for models other than `base_model`; None: no fine-tuning

    def message(self, base_model: str, warm_start: WarmStart | None) -> str:
        """Return the line that announces a run with the model `base_model` after this warm start."""
        if base_model == self.base_model:
            return (
                f"{self.displayed_model} learns {self.skill} by GRPO on this machine; {self.duration} on two "
                "CPU cores"
            )
        demonstrations = (
            "" if warm_start is None else f" after {warm_start.num_demonstrations} demonstrations"
        )
        return f"{base_model} learns {self.skill} by GRPO{demonstrations} on this machine"


def server_options(options: Sequence[str], *, lora_rank: int, context_limit: int) -> list[str]:
    """Return the server's options of a quick start with limits that allow a run with these two options."""
    values = dict(option.split("=", 1) for option in options)
    if lora_rank > int(values["max_lora_rank"]):
        values["max_lora_rank"] = str(lora_rank)
    if context_limit > int(values["max_context_length"]):
        values |= {"max_context_length": str(context_limit), "yarn": "true"}
    return [f"{name}={value}" for name, value in values.items()]


QUICKSTARTS = {
    "terminal": QuickStart(
        name=QUICKSTART.name,
        base_model=str(QUICKSTART / "model"),
        model_alias="local/quickstart",
        displayed_model="a small model",
        skill="terminal tasks",
        duration="four to seven minutes",
        options={
            "tasks_dir": str(QUICKSTART / "train"),
            "eval_tasks": str(QUICKSTART / "heldout"),
            "environment_type": "sandbox",
            "max_turns": "5",
            "enable_summarize": "false",
        },
        warm_start=WarmStart(
            num_demonstrations=600,
            write_demonstrations=write_chats,
            write_tasks=partial(write_training_tasks, scale=6),
            options={
                "learning_rate": "2e-3",
                "lr_schedule": "linear",
                "batch_size": "22",
                "eval_split": "0.03",
            },
            rl_options={
                "learning_rate": "3e-4",
                "eval_group_size": "4",
                "max_steps": "8",
                "eval_every": "8",
                "n_parallel_envs": "64",
                "context_limit": "1536",
                "trial_timeout_s": "1200",
                "agent_timeout_multiplier": "10",
            },
            server=(
                "max_lora_rank=16",
                "max_num_seqs=64",
                "max_context_length=1536",
                "train_tokens_per_batch=5120",
            ),
        ),
    ),
    "tau_bench": QuickStart(
        name="toy_retail",
        base_model=str(ROOT / "datasets" / "toy_retail" / "model"),
        model_alias="local/toy-retail",
        displayed_model="a small model",
        skill="to serve a shop's customers",
        duration="three to six minutes",
        options={
            "env": "tau_bench",
            "use_native_tool_calling": "true",
            "max_turns": "16",
            "max_steps": "18",
            "n_parallel_envs": "32",
        },
    ),
    "arithmetic": QuickStart(
        name="arithmetic",
        base_model="smollm2-135m",
        displayed_model="SmolLM2-135M",
        skill="to answer short word problems",
        duration="about 15 minutes",
        options={
            "data": str(ARITHMETIC / "train.jsonl"),
            "test_data": str(ARITHMETIC / "heldout.jsonl"),
            "reward": "number",
            "learning_rate": "5e-4",
            "batch_size": "16",
            "max_tokens": "16",
            "trial_timeout_s": "600",
            "context_limit": "512",
            "eval_group_size": "4",
            "n_parallel_envs": "128",
        },
        server=(
            "max_lora_rank=16",
            "max_num_seqs=64",
            "max_context_length=512",
            "train_tokens_per_batch=2048",
        ),
    ),
}
"""The quick starts by the value of the option `quickstart`."""
