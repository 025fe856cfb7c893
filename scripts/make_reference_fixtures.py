"""Makes tests/fixtures/qwen3: tiny random Qwen3 models with Hugging Face's logits, and LoRA gradients by torch autograd.

The server is tested against these files, so that its tests need no torch. Rebuild them with Python 3.11 and
torch==2.13.0 transformers==5.23.0 safetensors:

    python scripts/make_reference_fixtures.py [output directory]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (not in our environment, see above)
from safetensors.numpy import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

RANK, ALPHA = 3, 32.0
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")

MODELS: dict[str, dict] = {
    "tied": dict(tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_theta=1e6),
    "untied": dict(tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=1, head_dim=8, rope_theta=1e4),
    "multi_head": dict(tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=3, head_dim=16, rope_theta=1e5),
    "yarn": dict(tie_word_embeddings=False, num_attention_heads=6, num_key_value_heads=2, head_dim=16, rope_theta=1e4),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def main(output: Path) -> None:
    for seed, (name, options) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        make_model(name, options, output / name)
        model = Qwen3ForCausalLM.from_pretrained(output / name, dtype=torch.float32, attn_implementation="eager").eval()
        tokens = torch.randint(0, model.config.vocab_size, (2, 160))
        with torch.no_grad():
            logits = model(tokens).logits
        np.savez_compressed(output / name / "expected.npz", tokens=tokens.int().numpy(), logits=logits[:, ::8].numpy(), stride=np.int32(8))
        if name == "tied":
            save_lora_gradients(model, output / name)


def make_model(name: str, options: dict, directory: Path) -> None:
    """A model whose norms are not all one, so that a forgotten norm would show."""
    rope = {"rope_type": "default", "rope_theta": options.pop("rope_theta")}
    if name == "yarn":
        rope |= YARN
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        eos_token_id=[2, 5],
        bos_token_id=None,
        **options,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "embed" in key else parameter.shape[1] ** -0.5))
    model.save_pretrained(directory, max_shard_size="60KB" if name == "untied" else "1GB")
    (directory / "generation_config.json").unlink(missing_ok=True)
    if name == "tied":
        use_old_rope_keys(directory / "config.json")


def use_old_rope_keys(path: Path) -> None:
    """The layout of config.json before transformers 5: rope_theta and rope_scaling at the top level."""
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    path.write_text(json.dumps(config, indent=2) + "\n")


def save_lora_gradients(model: Qwen3ForCausalLM, directory: Path) -> None:
    """A random adapter under PEFT's names, and the gradient of the weighted cross-entropy sum of two sequences."""
    model.requires_grad_(False)
    adapter: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] not in ADAPTED:
            continue
        a = torch.randn(RANK, module.in_features) * module.in_features**-0.5
        b = torch.randn(module.out_features, RANK) * 0.02
        a.requires_grad_()
        b.requires_grad_()
        adapter[f"base_model.model.{name}.lora_A.weight"], adapter[f"base_model.model.{name}.lora_B.weight"] = a, b
        module.register_forward_hook(lambda _, args, out, a=a, b=b: out + ALPHA / RANK * (args[0] @ a.T @ b.T))

    tokens = torch.randint(0, model.config.vocab_size, (2, 41))
    weights = torch.randn(2, 40) * (torch.rand(2, 40) > 0.3)
    logprobs = model(tokens[:, :-1]).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    loss = -(weights * logprobs).sum()
    loss.backward()
    arrays = {f"adapter.{name}": tensor.detach().numpy() for name, tensor in adapter.items()}
    arrays |= {f"gradient.{name}": tensor.grad.numpy() for name, tensor in adapter.items()}
    arrays |= {"tokens": tokens.int().numpy(), "weights": weights.numpy(), "logprobs": logprobs.detach().numpy()}
    arrays |= {"loss": loss.detach().numpy().reshape(1), "rank": np.array([RANK], np.int32), "alpha": np.array([ALPHA], np.float32)}
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, directory / "lora_gradients.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "tests" / "fixtures" / "qwen3")
