"""The JAX backend of PyPI's `skyrl[tinker,jax]`, called directly, without its HTTP server, database and JSON.

The script runs in an interpreter that has the package; see `sides/call_protocol.py`. The backend is fastest
with the smallest number of adapter slots, which is two: slot 0 is for the base model, and slot 1 for the
adapter.
"""

from __future__ import annotations

import sys
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path

import typing_extensions

# With Python 3.11 and current pydantic versions, skyrl 0.3.0 cannot be imported without this patch.
typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.jax import JaxBackendConfig, JaxBackendImpl  # noqa: E402  # pyright: ignore[reportMissingImports]
from skyrl.tinker import types  # noqa: E402  # pyright: ignore[reportMissingImports]

from scripts.bench.sides.call_protocol import serve  # noqa: E402


class SkyrlTx:
    """The backend with one training model."""

    def __init__(
        self, model_dir: str, *, rank: int, slots: int, recompute: bool, micro_batch_size: int
    ) -> None:
        config = JaxBackendConfig(
            max_lora_adapters=slots,
            max_lora_rank=rank,
            gradient_checkpointing=recompute,
            train_micro_batch_size=micro_batch_size,
        )
        self._backend = JaxBackendImpl(model_dir, config, 0)
        self._backend.create_model("model", types.LoraConfig(rank=rank, alpha=32.0, seed=0))
        self._directory = tempfile.TemporaryDirectory()
        self._num_saved = 0
        self.save()

    def save(self) -> None:
        """Save the checkpoint that later calls of `sample` use."""
        self._num_saved += 1
        self._backend.save_sampler_checkpoint(
            Path(self._directory.name) / f"{self._num_saved}.tar.gz", "model"
        )

    def train(self, sequences: list[list[int]]) -> None:
        inputs = [sequence[:-1] for sequence in sequences]
        zeros = [[0.0] * len(tokens) for tokens in inputs]
        batch = types.PreparedModelPassBatch(
            all_model_inputs=[_model_input(tokens) for tokens in inputs],
            all_targets=[sequence[1:] for sequence in sequences],
            all_token_weights=[[1.0] * len(tokens) for tokens in inputs],
            all_sampling_logprobs=zeros,
            all_advantages=zeros,
            all_values=[[] for _ in inputs],
            all_returns=[[] for _ in inputs],
            all_model_ids=["model"] * len(inputs),
            all_loss_fns=["cross_entropy"] * len(inputs),
            all_loss_fn_configs=[None] * len(inputs),
            request_batch_slices=[("request", "model", 0, len(inputs))],
        )
        self._backend.forward_backward(batch)

    def optim_step(self) -> None:
        adam = types.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0)
        self._backend.optim_step("model", types.OptimStepInput(adam_params=adam))

    def sample(
        self, prompts: list[list[int]], max_tokens: int | list[int], num_samples: int = 1
    ) -> list[list[int]]:
        """Sample `num_samples` completions of each prompt in one batch, as the engine of SkyRL does."""
        repeated = [prompt for prompt in prompts for _ in range(num_samples)]
        limits = [max_tokens] * len(repeated) if isinstance(max_tokens, int) else max_tokens
        batch = types.PreparedSampleBatch(
            all_model_inputs=[_model_input(tokens) for tokens in repeated],
            all_sampling_params=[
                types.SamplingParams(temperature=1.0, max_tokens=limit, seed=index)
                for index, limit in enumerate(limits)
            ],
            all_model_ids=["model"] * len(repeated),
            all_checkpoint_ids=[str(self._num_saved)] * len(repeated),
            all_checkpoint_paths=[f"{self._directory.name}/{self._num_saved}.tar.gz"] * len(repeated),
            all_session_ids=[None] * len(repeated),
            needs_prompt_logprobs=False,
            request_batch_slices=[("request", "model", 0, len(repeated), False)],
        )
        return [sequence.tokens for sequence in self._backend.sample(batch)["request"].sequences]


def _model_input(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens)])


def main(model_dir: str, rank: str, slots: str, recompute: str, micro_batch_size: str) -> None:
    def start() -> dict[str, Callable[..., object]]:
        side = SkyrlTx(
            model_dir,
            rank=int(rank),
            slots=int(slots),
            recompute=recompute == "true",
            micro_batch_size=int(micro_batch_size),
        )
        return {"train": side.train, "optim_step": side.optim_step, "sample": side.sample, "save": side.save}

    serve(start)


if __name__ == "__main__":
    main(*sys.argv[1:])
