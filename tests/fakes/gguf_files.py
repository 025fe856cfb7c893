"""Writes small models as GGUF files in the layout of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFWriter, quantize
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import load_file

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
TOP = {  # the tensors outside the layers
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {  # the modules of a layer
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "ab", "abc", "Ġ", "Ċ"]
MERGES = ["a b", "ab c"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre_tokenizer: str = "smollm",
    metadata: Mapping[str, Any] = MappingProxyType({}),
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Write a Hugging Face model as a GGUF file. Tensors with more than one dimension are stored as `kind`.

    `metadata` and `tensors` are additional entries of the file. A value of `metadata` contains the arguments
    of `GGUFWriter.add_key_value` after the key.
    """
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, architecture)
    _add_config(writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_chat_template(TEMPLATE)
    padding = [f"<pad{number}>" for number in range(config["vocab_size"] - len(TOKENS))]
    writer.add_token_list([*TOKENS, *padding])
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3), *[5] * len(padding)])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    for name, value in metadata.items():
        writer.add_key_value(name, *value)
    for name, value in {**stored_tensors(config, weights), **tensors}.items():
        if value.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(name, value.astype(np.float32))
        else:
            writer.add_tensor(name, quantize(value.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_tensors(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors under their GGUF names. For `llama`, the rows of q and k are permuted."""
    stored = {TOP[name]: value for name, value in weights.items() if name in TOP}
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, value in weights.items():
            module, _, suffix = name.removeprefix(prefix).rpartition(".")
            if not name.startswith(prefix) or module not in PARTS:
                continue
            if config["model_type"] == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
                count = heads[module[len("self_attn.")]]  # "q" or "k"
                value = value.reshape(count, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            stored[f"blk.{layer}.{PARTS[module]}.{suffix}"] = value
        for part in ("gate", "up", "down"):
            names = [
                f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for expert in range(num_experts(config))
            ]
            if names:
                stored[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack([weights[name] for name in names])
    return stored


def num_experts(config: Mapping[str, Any]) -> int:
    return config.get("num_experts") or config.get("num_local_experts") or 0


def read_fixture(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the content of config.json and the weights of a model directory."""
    config = json.loads((directory / "config.json").read_text())
    weights: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        weights |= load_file(file)
    return config, weights


def _add_config(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if experts := num_experts(config):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
