"""Write tests/fixtures/{qwen3,families}: tiny random models with the logits of Hugging Face transformers and,
for some models, LoRA gradients of torch autograd and a greedy decoding.

The tests of the server read these files, so they need no torch. To write the files, use Python 3.11
with torch==2.13.0 transformers==5.23.0 safetensors:

    python scripts/make_reference_fixtures.py [output directory]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (not a dependency of the project, see above)
from safetensors.numpy import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

RANK, ALPHA = 3, 32.0
LATENT_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
ADAPTED = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "lm_head",
    *LATENT_PROJECTIONS,
)


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **scaling}


COMMON: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    eos_token_id=[2, 5],
    bos_token_id=None,
)
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HEADS: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2)
SPARSE: dict[str, Any] = dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, **HEADS, head_dim=16
)
DEEPSEEK: dict[str, Any] = dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=16,
    routed_scaling_factor=2.5,
    num_mtp_layers=0,
)
YARN_MSCALE: dict[str, Any] = dict(mscale=1.0, mscale_all_dim=0.7)

QWEN3: dict[str, PreTrainedConfig] = {
    "tied": Qwen3Config(tie_word_embeddings=True, **HEADS, head_dim=16, rope_parameters=_rope(1e6), **COMMON),
    "untied": Qwen3Config(
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, rope_parameters=_rope(1e4), **COMMON
    ),
    "multi_head": Qwen3Config(
        tie_word_embeddings=True,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=16,
        rope_parameters=_rope(1e5),
        **COMMON,
    ),
    "yarn": Qwen3Config(
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters=_rope(1e4, **YARN),
        **COMMON,
    ),
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(tie_word_embeddings=True, **HEADS, rope_parameters=_rope(1e6), **COMMON),
    "llama": LlamaConfig(**HEADS, rope_parameters=_rope(5e5), **COMMON),
    "llama3": LlamaConfig(
        tie_word_embeddings=True, **HEADS, head_dim=16, rope_parameters=_rope(1e4, **LLAMA3), **COMMON
    ),
    "qwen3_moe": Qwen3MoeConfig(norm_topk_prob=True, rope_parameters=_rope(1e6), **SPARSE, **COMMON),
    "qwen3_moe_unnormalized": Qwen3MoeConfig(
        tie_word_embeddings=True, rope_parameters=_rope(1e4), **SPARSE, **COMMON
    ),
    "deepseek_v3": DeepseekV3Config(
        q_lora_rank=24,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters=_rope(1e4, **YARN, **YARN_MSCALE),
        **DEEPSEEK,
        **COMMON,
    ),
    "deepseek_v3_plain": DeepseekV3Config(
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        n_shared_experts=2,
        first_k_dense_replace=0,
        rope_interleave=False,
        rope_parameters=_rope(5e4),
        tie_word_embeddings=True,
        **DEEPSEEK,
        **COMMON,
    ),
    "qwen3_sliding_window": Qwen3Config(
        **HEADS,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
        rope_parameters=_rope(1e4),
        **{**COMMON, "num_hidden_layers": 3},
    ),
}


def main(output: Path) -> None:
    for first_seed, group, configs in ((0, "qwen3", QWEN3), (100, "families", FAMILIES)):
        for seed, (name, config) in enumerate(configs.items(), first_seed):
            torch.manual_seed(seed)
            directory = output / group / name
            make_model(config, directory, sharded=name == "untied")
            if name == "tied":
                use_old_rope_keys(directory / "config.json")
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            save_logits(model, directory)
            if name == "qwen3_sliding_window":
                save_decoding(model, directory)
            if name in ("tied", "deepseek_v3", "qwen3_sliding_window"):
                save_lora_gradients(model, directory)


def make_model(config: PreTrainedConfig, directory: Path, *, sharded: bool) -> None:
    """Write a model with random weights. No norm weight is one and no bias is zero, so that a test fails if
    the server does not apply a norm weight or a bias."""

    def weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.named_parameters()
        yield from (
            (key, buffer) for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")
        )

    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for key, parameter in weights(model):
            if "norm" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(
                    torch.randn_like(parameter) * (1.0 if "embed" in key else parameter.shape[-1] ** -0.5)
                )
    model.save_pretrained(directory, max_shard_size="60KB" if sharded else "1GB")
    (directory / "generation_config.json").unlink(missing_ok=True)


def save_logits(model: PreTrainedModel, directory: Path) -> None:
    """Write the logits of every eighth position of two random token sequences."""
    tokens = torch.randint(0, model.config.vocab_size, (2, 160))
    with torch.no_grad():
        logits = model(tokens).logits
    np.savez_compressed(
        directory / "expected.npz",
        tokens=tokens.int().numpy(),
        logits=logits[:, ::8].numpy(),
        stride=np.int32(8),
    )


def save_decoding(model: PreTrainedModel, directory: Path) -> None:
    """Write the tokens and logprobs of greedy decoding with Hugging Face's cache, after a prompt that is
    longer than the sliding window."""
    prompt = torch.randint(0, model.config.vocab_size, (1, 70))
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=70,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens = generated.sequences[0, prompt.shape[1] :]
    logprobs = torch.cat(generated.logits).log_softmax(-1)
    with torch.no_grad():
        prompt_logprobs = model(prompt).logits[0, :-1].log_softmax(-1).gather(-1, prompt[0, 1:, None])[:, 0]
    np.savez_compressed(
        directory / "decoding.npz",
        prompt=prompt[0].int().numpy(),
        prompt_logprobs=prompt_logprobs.numpy(),
        tokens=tokens.int().numpy(),
        logprobs=logprobs.gather(-1, tokens[:, None])[:, 0].numpy(),
    )


def use_old_rope_keys(path: Path) -> None:
    """Change config.json to the layout of transformers 4: rope_theta and rope_scaling at the top level."""
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    path.write_text(json.dumps(config, indent=2) + "\n")


def save_lora_gradients(model: PreTrainedModel, directory: Path) -> None:
    """Write a random adapter with PEFT's names, and the gradient of the loss with respect to the adapter. The
    loss is the weighted sum of the cross-entropies of the tokens of two sequences."""
    model.requires_grad_(False)
    adapter: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] not in ADAPTED:
            continue
        a = torch.randn(RANK, module.in_features) * module.in_features**-0.5
        b = torch.randn(module.out_features, RANK) * 0.02
        a.requires_grad_()
        b.requires_grad_()
        (
            adapter[f"base_model.model.{name}.lora_A.weight"],
            adapter[f"base_model.model.{name}.lora_B.weight"],
        ) = a, b
        module.register_forward_hook(
            lambda _, args, out, a=a, b=b: out + ALPHA / RANK * (args[0] @ a.T @ b.T)
        )
    for name, module in list(model.named_modules()):
        if name.endswith(".experts"):
            # The server divides the rank by the number of experts that each token uses (`expert_rank`).
            adapter |= adapt_experts(name, module, RANK // model.config.num_experts_per_tok)

    tokens = torch.randint(0, model.config.vocab_size, (2, 41))
    weights = torch.randn(2, 40) * (torch.rand(2, 40) > 0.3)
    logprobs = model(tokens[:, :-1]).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    loss = -(weights * logprobs).sum()
    loss.backward()
    arrays = {f"adapter.{name}": tensor.detach().numpy() for name, tensor in adapter.items()}
    arrays |= {f"gradient.{name}": tensor.grad.numpy() for name, tensor in adapter.items()}
    arrays |= {
        "tokens": tokens.int().numpy(),
        "weights": weights.numpy(),
        "logprobs": logprobs.detach().numpy(),
    }
    arrays |= {
        "loss": loss.detach().numpy().reshape(1),
        "rank": np.array([RANK], np.int32),
        "alpha": np.array([ALPHA], np.float32),
    }
    save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        directory / "lora_gradients.safetensors",
    )


class AddLoraProducts(torch.nn.Module):
    """Adds products of LoRA factors to the matrices [experts, out, in] of all experts. `factors` has one list
    for each matrix that is stacked along `out`, e.g. gate and up. The list has the factors (A, B) of each
    expert."""

    def __init__(self, factors: list[list[tuple[torch.Tensor, torch.Tensor]]], rank: int) -> None:
        super().__init__()
        self.factors, self.scale = factors, ALPHA / rank

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        parts = [torch.stack([b @ a for a, b in experts]) for experts in self.factors]
        return weight + self.scale * torch.cat(parts, dim=1)


def adapt_experts(name: str, module: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Create random factors of every expert and add their products to the stacked matrices of transformers 5.
    Returns the factors by PEFT's names."""
    tensors: dict[str, torch.Tensor] = {}
    for field, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        count, outputs, inputs = getattr(module, field).shape
        factors: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for part in parts:
            factors.append([])
            for expert in range(count):
                a = (torch.randn(rank, inputs) * inputs**-0.5).requires_grad_()
                b = (torch.randn(outputs // len(parts), rank) * 0.02).requires_grad_()
                factors[-1].append((a, b))
                prefix = f"base_model.model.{name}.{expert}.{part}"
                tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a, b
        torch.nn.utils.parametrize.register_parametrization(
            module, field, AddLoraProducts(factors, rank), unsafe=True
        )
    return tensors


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "tests" / "fixtures")
