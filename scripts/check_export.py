"""Compare an exported adapter and a merged model with `peft`, in two steps, because this environment has no
torch.

    .venv/bin/python scripts/check_export.py write BASE_MODEL_DIR DIR [train_mlp=false]
    PEFT_PYTHON scripts/check_export.py read DIR

`write` writes the adapter, the merged model and the logits of this server. `read` prints the differences from
peft. Its exit status is 1 if a difference is above 1e-4. PEFT_PYTHON is a Python 3.11 with torch==2.13.0
transformers==5.23.0 peft safetensors.

train_mlp=false is for DeepSeek-V3: of its MLPs, peft 0.21 with transformers 5 loads only the factors of the
routed experts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

TOLERANCE = 1e-4
RANK = 4


def write(base: Path, directory: Path, *, train_mlp: bool) -> int:
    """Export and merge a random adapter of `base` with the server's commands, and write the logits of the
    server's forward pass.
    """
    from skyrl_tx_server.engine.operations import LoraSpec
    from skyrl_tx_server.export import main
    from skyrl_tx_server.files.base_model import fingerprint
    from skyrl_tx_server.files.checkpoints import CheckpointStore
    from skyrl_tx_server.model.config_json import load_model_config
    from skyrl_tx_server.model.layers import within_segments
    from skyrl_tx_server.model.lora.adapter import init_adapter
    from skyrl_tx_server.model.transformer import head_logits, hidden_states
    from skyrl_tx_server.model.weights import adapter_from_arrays, adapter_to_arrays, load_params

    config, spec, random = (
        load_model_config(base),
        LoraSpec(rank=RANK, train_mlp=train_mlp),
        np.random.default_rng(1),
    )
    arrays = adapter_to_arrays(init_adapter(config, spec, RANK), config, spec)
    arrays = {name: random.normal(0, 0.03, array.shape).astype(np.float32) for name, array in arrays.items()}
    path = "tinker://check/sampler_weights/one"
    CheckpointStore(directory, "check/base", fingerprint(base)).write(
        path, arrays, lora=spec, step=0, user_metadata={}
    )
    saved = [f"checkpoint={path}", f"checkpoints_dir={directory}"]
    status = main(["adapter", *saved, f"output={directory / 'adapter'}"])
    status |= main(["merge", *saved, f"base_model={base}", f"output={directory / 'merged'}", "dtype=float32"])
    tokens = random.integers(0, config.vocab_size, (2, 32)).astype(np.int32)
    positions = np.tile(np.arange(32, dtype=np.int32), (2, 1))
    params, adapter = load_params(base, config, "float32"), adapter_from_arrays(arrays, config, spec, RANK)
    logits = head_logits(
        config,
        params,
        adapter,
        hidden_states(config, params, adapter, tokens, positions, within_segments(np.ones_like(tokens))),
    )
    np.savez(directory / "ours.npz", tokens=tokens, logits=np.asarray(logits), base=str(base.resolve()))
    return status


def read(directory: Path) -> int:
    """Print the largest differences. Return 1 if one of them is above the tolerance, and 0 otherwise."""
    import torch  # pyright: ignore[reportMissingImports]  (not in our environment, see above)
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
            difference = float(np.abs(logits - ours["logits"]).max())
            worst = max(worst, difference)
            difference_from_base = float(np.abs(logits - base).max())
            print(
                f"{name:8} largest difference from the server {difference:.2e}, from the base model "
                f"{difference_from_base:.2e}"
            )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"] and (len(sys.argv) == 4 or sys.argv[4:] == ["train_mlp=false"]):
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        sys.exit(write(Path(sys.argv[2]), Path(sys.argv[3]), train_mlp=len(sys.argv) == 4))
    if sys.argv[1:2] == ["read"] and len(sys.argv) == 3:
        sys.exit(read(Path(sys.argv[2])))
    sys.exit(__doc__)
