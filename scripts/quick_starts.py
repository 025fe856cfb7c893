"""The quick starts of `./run_skyrl_tx.sh`: small models and the tasks that they learn in minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "datasets" / "quickstart"
ARITHMETIC = ROOT / "datasets" / "arithmetic"

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
QUICKSTART_SERVER = (
    "max_lora_rank=16",
    "max_num_seqs=32",
    "max_context_length=2048",
    "train_tokens_per_batch=2048",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickStart:
    """A model and the tasks that it learns in minutes on two CPU cores."""

    name: str  # prefix of the name of the run folder
    base_model: str
    message: str
    options: dict[str, str]
    server: tuple[str, ...] = QUICKSTART_SERVER  # options of the server
    model_alias: str | None = None  # None: the name that the server derives from base_model
    setup: tuple[str, ...] = ()  # arguments of scripts/setup.sh that install the model


QUICKSTARTS = {
    "terminal": QuickStart(
        name=QUICKSTART.name,
        base_model=str(QUICKSTART / "model"),
        model_alias="local/quickstart",
        message="a small model learns terminal tasks by GRPO on this machine; about six minutes on two CPU "
        "cores",
        options={
            "tasks_dir": str(QUICKSTART / "train"),
            "eval_tasks": str(QUICKSTART / "heldout"),
            "environment_type": "sandbox",
            "max_turns": "5",
            "enable_summarize": "false",
        },
    ),
    "tau_bench": QuickStart(
        name="toy_retail",
        base_model=str(ROOT / "datasets" / "toy_retail" / "model"),
        model_alias="local/toy-retail",
        message="a small model learns to serve a shop's customers by GRPO on this machine; three to six "
        "minutes on two CPU cores",
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
        setup=("smollm2",),
        message="SmolLM2-135M learns to answer small word problems by GRPO on this machine; about 15 minutes "
        "on two CPU cores",
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
