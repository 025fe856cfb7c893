"""Compare the logits of this server with those of an exported adapter in `peft` and of a merged model in
`transformers`. The comparison has two steps with two Python environments, because the environment of this
repository has no torch.

    .venv/bin/python -m scripts.check_export write BASE_MODEL DIR [train_mlp=false]
    .venv/bin/python -m scripts.check_export write BASE_MODEL DIR checkpoint=tinker://... \\
        checkpoints_dir=DIR text=FILE
    PEFT_PYTHON -m scripts.check_export read DIR

`write` writes the adapter, the merged model and the logits of this server. In the first form, the adapter and
the tokens are random. In the second form, the adapter is that of a checkpoint, and the tokens are the first
512 tokens of a text. BASE_MODEL is a directory, a GGUF file or the name of a packaged model, such as
smollm2-135m.

`read` computes the logits of the exported adapter and of the merged model, and prints how much they differ
from the logits of the server and of the base model. Its exit status is 1 if a difference from the server
exceeds 1e-4. For a random adapter this condition applies to the logits, and for a text to the logprobs of its
tokens. PEFT_PYTHON is a Python with torch, transformers, peft and safetensors, for example Python 3.11 with
torch 2.13.0 and transformers 5.23.0.

DeepSeek-V3 needs train_mlp=false, because peft 0.21 with transformers 5 loads only the factors of its routed
experts and not those of its other MLPs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

TOLERANCE = 1e-4
RANK = 4
MAX_TOKENS = 512
CHECKPOINT_OPTIONS = {"checkpoint", "checkpoints_dir", "text"}


def write(base_model: str, directory: Path, options: dict[str, str]) -> int:
    """Export and merge an adapter with the server's commands, and write the logits of the server's forward
    pass.
    """
    from scripts.packed_attention import within_segments
    from skyrl_tx_server.engine.stop_strings import load_tokenizer
    from skyrl_tx_server.export import main
    from skyrl_tx_server.files.base_model import fingerprint
    from skyrl_tx_server.files.checkpoints import CheckpointStore
    from skyrl_tx_server.files.model_source import converted_directory, is_gguf
    from skyrl_tx_server.model.config_json import load_model_config
    from skyrl_tx_server.model.transformer import head_logits, hidden_states
    from skyrl_tx_server.model.weights import adapter_from_arrays, load_params

    base = converted_directory(base_model) if is_gguf(base_model) else Path(base_model)
    if "checkpoint" in options:
        path, checkpoints_dir = options["checkpoint"], Path(options["checkpoints_dir"])
    else:
        path, checkpoints_dir = "tinker://check/sampler_weights/one", directory
        write_random_checkpoint(base, directory, path, train_mlp=options.get("train_mlp") != "false")
    alias = CheckpointStore(checkpoints_dir, "").info(path).base_model
    info, arrays = CheckpointStore(checkpoints_dir, alias, fingerprint(base)).read(path)
    saved = [f"checkpoint={path}", f"checkpoints_dir={checkpoints_dir}"]
    status = main(["adapter", *saved, f"output={directory / 'adapter'}"])
    merged = f"output={directory / 'merged'}"
    status |= main(["merge", *saved, f"base_model={base_model}", merged, "dtype=float32"])
    config = load_model_config(base)
    if "text" in options:
        text = Path(options["text"]).read_text()
        tokens = np.array([load_tokenizer(base).encode(text).ids[:MAX_TOKENS]], np.int32)
    else:
        tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 32)).astype(np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    params = load_params(base, config, "float32")
    adapter = adapter_from_arrays(arrays, config, info.lora, info.lora.rank)
    logits = head_logits(
        config,
        params,
        adapter,
        hidden_states(config, params, adapter, tokens, positions, within_segments(np.ones_like(tokens))),
    )
    np.savez(
        directory / "ours.npz",
        tokens=tokens,
        logits=np.asarray(logits),
        base=str(base.resolve()),
        is_text="text" in options,
    )
    return status


def write_random_checkpoint(base: Path, directory: Path, path: str, *, train_mlp: bool) -> None:
    """Write a sampler checkpoint with random factors to the checkpoint store in `directory`."""
    from skyrl_tx_server.engine.operations import LoraSpec
    from skyrl_tx_server.files.base_model import fingerprint
    from skyrl_tx_server.files.checkpoints import CheckpointStore
    from skyrl_tx_server.model.config_json import load_model_config
    from skyrl_tx_server.model.lora.adapter import init_adapter
    from skyrl_tx_server.model.weights import adapter_to_arrays

    config, spec = load_model_config(base), LoraSpec(rank=RANK, train_mlp=train_mlp)
    random = np.random.default_rng(1)
    arrays = adapter_to_arrays(init_adapter(config, spec, RANK), config, spec)
    arrays = {name: random.normal(0, 0.03, array.shape).astype(np.float32) for name, array in arrays.items()}
    CheckpointStore(directory, "check/base", fingerprint(base)).write(
        path, arrays, lora=spec, step=0, user_metadata={}
    )


def read(directory: Path) -> int:
    """Print the largest differences. Return 1 if a difference from the server (logprobs for a text, logits
    for random tokens) is above the tolerance, and 0 otherwise."""
    import torch  # pyright: ignore[reportMissingImports]  (only PEFT_PYTHON has torch)
    from peft import PeftModel  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    ours = np.load(directory / "ours.npz")
    tokens = torch.tensor(ours["tokens"]).long()

    def load(model: str | Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    worst = 0.0
    with torch.no_grad():
        base = load(str(ours["base"]))(tokens).logits.numpy()
        adapted = PeftModel.from_pretrained(load(str(ours["base"])), directory / "adapter").eval()
        for name, logits in (
            ("peft", adapted(tokens).logits.numpy()),
            ("merged", load(directory / "merged")(tokens).logits.numpy()),
        ):
            by_logit = float(np.abs(logits - ours["logits"]).max())
            by_logprob = float(np.abs(logprobs(logits, ours) - logprobs(ours["logits"], ours)).max())
            worst = float(np.maximum(worst, by_logprob if ours["is_text"] else by_logit))  # keeps NaN
            print(
                f"{name:8} largest difference from the server: logits {by_logit:.2e}, logprobs of the tokens "
                f"{by_logprob:.2e}; from the base model: logits {np.abs(logits - base).max():.2e}"
            )
    return int(not worst <= TOLERANCE)


def logprobs(logits: np.ndarray, saved: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the logprobs [N, T - 1] of the saved tokens [N, T] except the first of each row. `logits` are
    [N, T, V]."""
    wide = logits[:, :-1].astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(wide, saved["tokens"][:, 1:, None], axis=-1)[..., 0]
    return chosen - np.log(np.exp(wide).sum(axis=-1))


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[4:] if "=" in argument)
    is_valid = given in ({}, {"train_mlp": "false"}) or given.keys() == CHECKPOINT_OPTIONS
    if sys.argv[1:2] == ["write"] and len(sys.argv) == 4 + len(given) and is_valid:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        sys.exit(write(sys.argv[2], Path(sys.argv[3]), given))
    if sys.argv[1:2] == ["read"] and len(sys.argv) == 3:
        sys.exit(read(Path(sys.argv[2])))
    sys.exit(__doc__)
