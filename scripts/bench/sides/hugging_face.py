"""Hugging Face transformers and peft on torch, on a CPU in float32 or with CUDA in bfloat16.

The script runs in an interpreter that has these packages; see `sides/call_protocol.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch  # pyright: ignore[reportMissingImports]
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM

from scripts.bench.sides.call_protocol import serve

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class HuggingFace:
    """One model with one LoRA adapter on every projection."""

    def __init__(self, model_dir: str, *, rank: int, threads: int, device: str) -> None:
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa").to(
            self._device
        )
        self._model = get_peft_model(
            base, LoraConfig(r=rank, lora_alpha=rank, target_modules=PROJECTIONS, lora_dropout=0.0)
        )
        self._model.enable_input_require_grads()
        self._optimizer = torch.optim.Adam((p for p in self._model.parameters() if p.requires_grad), lr=1e-4)

    def train(self, sequences: list[list[int]], recompute: bool = False, micro_batch_size: int = 8) -> None:
        """Compute the summed loss and its gradient in micro-batches, each padded to its longest sequence."""
        self._model.train()
        if recompute:
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self._model.gradient_checkpointing_disable()
        self._model.zero_grad(set_to_none=True)
        for first in range(0, len(sequences), micro_batch_size):
            part = [
                torch.tensor(sequence, device=self._device)
                for sequence in sequences[first : first + micro_batch_size]
            ]
            tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            target_mask = torch.nn.utils.rnn.pad_sequence(
                [torch.ones(len(sequence) - 1, device=self._device) for sequence in part], batch_first=True
            )
            mask = torch.nn.functional.pad(target_mask, (0, 1)) if not bool(target_mask.all()) else None
            logits = self._model(
                tokens[:, :-1], attention_mask=None if mask is None else mask[:, :-1], use_cache=False
            ).logits.float()
            logprobs = logits.gather(-1, tokens[:, 1:, None])[..., 0] - torch.logsumexp(logits, -1)
            (-(logprobs * target_mask).sum()).backward()

    def optim_step(self) -> None:
        self._optimizer.step()

    def sample(self, prompts: list[list[int]], max_tokens: int, num_samples: int = 1) -> list[list[int]]:
        """Sample `num_samples` completions of each prompt. All prompts have the same length."""
        self._model.eval()
        tokens = torch.tensor(prompts, device=self._device)
        with torch.no_grad():
            whole = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                num_return_sequences=num_samples,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                pad_token_id=0,
            )
        return whole[:, tokens.shape[1] :].tolist()


def main(model_dir: str, rank: str, threads: str, device: str = "cpu") -> None:
    def start() -> dict[str, Callable[..., object]]:
        side = HuggingFace(model_dir, rank=int(rank), threads=int(threads), device=device)
        return {
            "train": side.train,
            "optim_step": side.optim_step,
            "sample": side.sample,
            "save": lambda: None,
        }

    serve(start)


if __name__ == "__main__":
    main(*sys.argv[1:])
