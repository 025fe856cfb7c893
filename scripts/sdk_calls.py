"""Make the calls of the tinker SDK 0.38 for training, sampling and checkpoints, and print the outcomes.

    python scripts/sdk_calls.py [URL]          default http://127.0.0.1:8000

The server must not require an API key. Calls that docs/server-contract.md requires must succeed. Some calls
that this server does not support are also made; they must be refused with a clear user error. The exit status
is 1 if a call has another outcome.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import tinker
from tinker import types

API_KEY = "tml-dummy"
TIMEOUT_S = 600  # the first call of each kind includes compilation
MAX_REFUSAL_S = 5.0  # a refusal takes longer if the SDK retries the call


class Waitable[T](Protocol):
    """What an SDK call returns. `result` waits for the reply of the server."""

    def result(self, timeout: float | None = None) -> T: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one call."""

    name: str
    required: bool  # False: the server must refuse the call
    # Whether a required call returned a valid result. For a call that must be refused, this is False only if
    # the server refused it clearly and at once.
    succeeded: bool
    seconds: float
    detail: str

    @property
    def is_expected(self) -> bool:
        return self.succeeded == self.required


@dataclass(kw_only=True, slots=True)
class Calls:
    """Makes calls in sequence and records their outcomes. The next call is made even if a call fails."""

    outcomes: list[Outcome] = field(default_factory=list)

    def required[T](
        self, name: str, call: Callable[[], Waitable[T]], expect: Callable[[T], bool] = lambda result: True
    ) -> T | None:
        """Make a call that must succeed. `expect` returns whether its result is valid."""
        started = time.perf_counter()
        try:
            result = call().result(TIMEOUT_S)
            is_expected = expect(result)
        except Exception as error:
            self._record(name, True, False, started, f"{type(error).__name__}: {error}")
            return None
        self._record(name, True, is_expected, started, _shorten(result))
        return result

    def refused(self, name: str, call: Callable[[], Waitable[object]], message: str) -> None:
        """Make a call that this server must refuse at once with an error that contains `message`."""
        started = time.perf_counter()
        try:
            result = call().result(TIMEOUT_S)
        except (tinker.BadRequestError, tinker.NotFoundError, tinker.RequestFailedError) as error:
            is_clear = message in str(error) and time.perf_counter() - started < MAX_REFUSAL_S
            self._record(name, False, not is_clear, started, _detail(error))
        except Exception as error:
            self._record(name, False, True, started, f"unclear refusal: {type(error).__name__}: {error}")
        else:
            self._record(name, False, True, started, f"the call succeeded: {_shorten(result)}")

    def _record(self, name: str, required: bool, succeeded: bool, started: float, detail: str) -> None:
        outcome = Outcome(
            name=name,
            required=required,
            succeeded=succeeded,
            seconds=time.perf_counter() - started,
            detail=" ".join(detail.split()),
        )
        self.outcomes.append(outcome)
        print(_row(outcome), flush=True)


def _shorten(result: object) -> str:
    return str(result)[:110]


def _detail(error: Exception) -> str:
    """Return the message of the server from an error of the SDK."""
    body = error.body if isinstance(error, tinker.APIStatusError) else None
    return str(body["detail"]) if isinstance(body, dict) and "detail" in body else str(error)


def _row(outcome: Outcome) -> str:
    verdict = ("ok" if outcome.required else "refused") if outcome.is_expected else "FAILED"
    return f"{verdict:8}{outcome.seconds:7.2f} s  {outcome.name:52} {outcome.detail[:150]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready[T]:
    """A future with a value that is already known."""

    value: T

    def result(self, timeout: float | None = None) -> T:
        return self.value


def make_datum(chunks: Sequence[types.ModelInputChunk], **inputs: np.ndarray) -> types.Datum:
    tensors = {name: types.TensorData.from_numpy(values) for name, values in inputs.items()}
    return types.Datum(model_input=types.ModelInput(chunks=list(chunks)), loss_fn_inputs=tensors)


def datum(length: int = 6) -> types.Datum:
    """Return a datum for cross_entropy. The first position is masked."""
    tokens = np.arange(1, length + 1)
    weights = np.ones(length, np.float32)
    weights[0] = 0
    return make_datum(
        [types.EncodedTextChunk(tokens=tokens.tolist())], target_tokens=np.roll(tokens, -1), weights=weights
    )


def rl_datum(**more_inputs: np.ndarray) -> types.Datum:
    """Return a datum for the losses that need advantages and the logprobs of the sampler."""
    logprobs, advantages = np.full(6, -6.0, np.float32), np.full(6, 0.5, np.float32)
    return make_datum(
        [types.EncodedTextChunk(tokens=[1, 2, 3, 4, 5, 6])],
        target_tokens=np.arange(2, 8),
        logprobs=logprobs,
        advantages=advantages,
        **more_inputs,
    )


def two_dimensional_datum() -> types.Datum:
    chunk = types.EncodedTextChunk(tokens=[1, 2, 3, 4])
    return make_datum([chunk], target_tokens=np.ones((4, 2), np.int64), weights=np.ones((4, 2), np.float32))


def sparse_datum() -> types.Datum:
    """Return a datum of four positions, whose sparse targets have the shape [4, 3] and two entries."""
    crow_indices, col_indices = [0, 1, 1, 2, 2], [2, 0]
    layout = {"shape": [4, 3], "sparse_crow_indices": crow_indices, "sparse_col_indices": col_indices}
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[5, 6], dtype="int64", **layout),
            "weights": types.TensorData(data=[0.5, 0.5], dtype="float32", **layout),
        },
    )


def data_of(tensor: types.TensorData | None) -> list[float]:
    assert tensor is not None, "the reply lacks the requested tensor"
    return [float(value) for value in tensor.data]


def image_datum() -> types.Datum:
    chunks = [
        types.EncodedTextChunk(tokens=[1, 2]),
        types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2),
    ]
    return make_datum(chunks, target_tokens=np.ones(4, np.int64), weights=np.ones(4, np.float32))


def training_calls(calls: Calls, training: tinker.TrainingClient) -> None:
    finite = lambda output: all(np.isfinite(entry["logprobs"].data).all() for entry in output.loss_fn_outputs)  # noqa: E731
    calls.required(
        "TrainingClient.get_info", lambda: Ready(value=training.get_info()), lambda info: info.lora_rank == 8
    )
    calls.required(
        "TrainingClient.get_tokenizer",
        lambda: Ready(value=training.get_tokenizer()),
        lambda tokenizer: len(tokenizer) > 0,
    )
    calls.required("forward(cross_entropy)", lambda: training.forward([datum()], "cross_entropy"), finite)
    calls.required(
        "forward_backward(cross_entropy, 2 datums)",
        lambda: training.forward_backward([datum(), datum(4)], "cross_entropy"),
        lambda output: finite(output) and "loss:sum" in output.metrics and len(output.loss_fn_outputs) == 2,
    )
    clips = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    rl_data = [rl_datum()]
    calls.required(
        "forward_backward(importance_sampling)",
        lambda: training.forward_backward(rl_data, "importance_sampling"),
        finite,
    )
    calls.required(
        "forward_backward(ppo)", lambda: training.forward_backward(rl_data, "ppo", dict(clips)), finite
    )
    calls.required(
        "forward_backward(cispo)", lambda: training.forward_backward(rl_data, "cispo", dict(clips)), finite
    )
    calls.required(
        "forward_backward(dro)", lambda: training.forward_backward(rl_data, "dro", {"beta": 0.05}), finite
    )
    calls.required(
        "optim_step(AdamParams, every field)",
        lambda: training.optim_step(
            types.AdamParams(
                learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0
            )
        ),
        lambda response: "grad_norm" in (response.metrics or {}),
    )
    gspo_data = [rl_datum(sequence_ratio_mask=np.ones(6, np.float32))]
    calls.required(
        "forward_backward(gspo)", lambda: training.forward_backward(gspo_data, "gspo", dict(clips)), finite
    )
    calls.refused(
        "forward_backward(gspo without mask)",
        lambda: training.forward_backward(rl_data, "gspo"),
        "sequence_ratio_mask",
    )
    calls.refused(
        "forward_backward(stable_reinforce)",
        lambda: training.forward_backward(rl_data, "stable_reinforce"),
        "use one of",
    )
    calls.refused(
        "forward_backward(ppo, unknown setting)",
        lambda: training.forward_backward(rl_data, "ppo", {**clips, "tag": "x"}),
        "unknown setting",
    )
    shape_of = lambda output: [entry["logprobs"].shape for entry in output.loss_fn_outputs]  # noqa: E731
    calls.required(
        "forward_backward([N, K] targets beside [N])",
        lambda: training.forward_backward(
            [two_dimensional_datum(), datum(4), sparse_datum()], "cross_entropy"
        ),
        lambda output: finite(output) and shape_of(output) == [[4, 2], [4], [4, 3]],
    )
    calls.refused(
        "forward_backward(image chunk)",
        lambda: training.forward_backward([image_datum()], "cross_entropy"),
        "text-only",
    )
    calls.refused(
        "optim_step(DimuonParams)",
        lambda: training.optim_step(types.DimuonParams(learning_rate=1e-3)),
        "use AdamW",
    )
    calls.required(
        "save_weights_external",
        lambda: training.save_weights_external("e1", ttl_seconds=3600),
        lambda saved: saved.path.endswith("/external_weights/e1"),
    )
    custom_loss_call(calls, training)


def custom_loss_call(calls: Calls, training: tinker.TrainingClient) -> None:
    """Call forward_backward_custom if torch is installed, because the SDK computes the custom loss with torch
    on the client."""
    if importlib.util.find_spec("torch") is None:
        print("skipped           forward_backward_custom: torch is not installed on the client")
        return
    calls.required(
        "forward_backward_custom",
        lambda: training.forward_backward_custom(
            [datum(), datum(4)], lambda data, logprobs: ((logprobs[0] ** 2).sum(), {"custom": 1.0})
        ),
    )


def sampling_calls(
    calls: Calls, ephemeral_client: tinker.SamplingClient, named_client: tinker.SamplingClient
) -> None:
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    every_setting = types.SamplingParams(max_tokens=3, seed=7, stop=[9], temperature=0.7, top_k=5, top_p=0.9)
    calls.required(
        "sample(num_samples=2, every parameter)",
        lambda: ephemeral_client.sample(prompt, 2, every_setting),
        lambda response: len({sequence.sequence_id for sequence in response.sequences}) == 2,
    )
    calls.required(
        "sample(stop strings, prompt logprobs)",
        lambda: named_client.sample(
            prompt, 1, types.SamplingParams(max_tokens=3, stop=["\n"]), include_prompt_logprobs=True
        ),
        lambda response: (
            len(response.prompt_logprobs or []) == 4 and (response.prompt_logprobs or [0])[0] is None
        ),
    )
    calls.required(
        "compute_logprobs",
        lambda: named_client.compute_logprobs(prompt),
        lambda logprobs: logprobs[0] is None and len(logprobs) == 4,
    )
    calls.required("SamplingClient.get_base_model", lambda: Ready(value=named_client.get_base_model()))
    one_token = types.SamplingParams(max_tokens=1)
    calls.required(
        "sample(topk_prompt_logprobs)",
        lambda: named_client.sample(prompt, 1, one_token, topk_prompt_logprobs=2),
        lambda response: (
            [entry and len(entry) for entry in response.topk_prompt_logprobs or []] == [None, 2, 2, 2]
        ),
    )
    calls.required(
        "sample(topk_sample_logprobs)",
        lambda: named_client.sample(
            prompt, 2, types.SamplingParams(max_tokens=1, temperature=0), topk_sample_logprobs=3
        ),
        lambda response: (
            [
                sequence.topk_logprobs and sequence.topk_logprobs[0] and sequence.topk_logprobs[0][0][0]
                for sequence in response.sequences
            ]
            == [sequence.tokens[0] for sequence in response.sequences]
        ),
    )
    dense_targets = types.TensorData(data=[1, 2, -1], dtype="int64", shape=[3, 1])
    calls.required(
        "sample(target_prompt_logprobs)",
        lambda: named_client.sample(prompt, 1, one_token, target_prompt_logprobs=dense_targets),
        lambda response: (
            [logprob < 0 for logprob in data_of(response.target_prompt_logprobs)] == [True, True, False]
        ),
    )
    # These targets are the second and the fourth token of the prompt itself, so their logprobs must equal the
    # prompt logprobs of these tokens.
    sparse_targets = types.TensorData(
        data=[6, 8],
        dtype="int64",
        shape=[3, 50],
        sparse_crow_indices=[0, 1, 1, 2],
        sparse_col_indices=[40, 2],
    )
    calls.required(
        "sample(target_prompt_logprobs, sparse)",
        lambda: named_client.sample(
            prompt, 1, one_token, include_prompt_logprobs=True, target_prompt_logprobs=sparse_targets
        ),
        lambda response: np.allclose(
            data_of(response.target_prompt_logprobs),
            np.take(np.array(response.prompt_logprobs, float), (1, 3)),
            atol=1e-3,
        ),
    )
    calls.required(
        "sample(prompt_logprobs_last_n)",
        lambda: named_client.sample(
            prompt, 1, one_token, include_prompt_logprobs=True, prompt_logprobs_last_n=2
        ),
        lambda response: (
            [logprob is None for logprob in response.prompt_logprobs or []] == [True, True, False, False]
        ),
    )
    calls.refused(
        "sample(prompt_alt_tokens_k)",
        lambda: named_client.sample(prompt, 1, one_token, prompt_alt_tokens_k=2),
        "not supported",
    )
    calls.refused(
        "sample(max_tokens too large)",
        lambda: named_client.sample(prompt, 1, types.SamplingParams(max_tokens=10**9)),
        "Prompt length plus max_tokens exceeds",
    )


def rest_calls(
    calls: Calls,
    rest: tinker.RestClient,
    run_id: str,
    state_path: str,
    sampler_path: str,
    session_id: str,
    sampler_id: str,
) -> None:
    calls.required(
        "rest.list_training_runs", lambda: rest.list_training_runs(), lambda page: len(page.training_runs) > 0
    )
    calls.required(
        "rest.get_training_run",
        lambda: rest.get_training_run(run_id),
        lambda run: run.user_metadata == {"k": "v"},
    )
    calls.required(
        "rest.get_training_run_by_tinker_path", lambda: rest.get_training_run_by_tinker_path(state_path)
    )
    calls.required(
        "rest.get_weights_info_by_tinker_path",
        lambda: rest.get_weights_info_by_tinker_path(state_path),
        lambda info: info.train_unembed is False,
    )
    calls.required(
        "rest.list_checkpoints",
        lambda: rest.list_checkpoints(run_id),
        lambda page: len(page.checkpoints) == 3,
    )
    calls.required("rest.list_user_checkpoints", lambda: rest.list_user_checkpoints())
    calls.required(
        "rest.set_checkpoint_ttl_from_tinker_path",
        lambda: rest.set_checkpoint_ttl_from_tinker_path(state_path, 7200),
    )
    calls.required(
        "rest.list_sessions", lambda: rest.list_sessions(), lambda page: session_id in page.sessions
    )
    calls.required(
        "rest.get_session",
        lambda: rest.get_session(session_id),
        lambda session: run_id in session.training_run_ids,
    )
    calls.required("rest.get_sampler", lambda: rest.get_sampler(sampler_id))
    calls.required(
        "rest.publish_checkpoint_from_tinker_path",
        lambda: rest.publish_checkpoint_from_tinker_path(state_path),
    )
    calls.required(
        "rest.list_checkpoints (public)",
        lambda: rest.list_checkpoints(run_id),
        lambda page: [checkpoint.public for checkpoint in page.checkpoints] == [False, True, False],
    )
    calls.required(
        "rest.unpublish_checkpoint_from_tinker_path",
        lambda: rest.unpublish_checkpoint_from_tinker_path(state_path),
    )
    external = f"tinker://{run_id}/external_weights/e1"
    calls.required(
        "rest.get_external_weights_urls",
        lambda: rest.get_external_weights_urls(external),
        lambda reply: sorted(reply.urls) == ["adapter_config.json", "adapter_model.safetensors"],
    )
    calls.required(
        "rest.delete_checkpoint_from_tinker_path (external)",
        lambda: rest.delete_checkpoint_from_tinker_path(external),
    )
    calls.refused(
        "rest.copy_weights",
        lambda: rest.copy_weights(state_path, "project", weights_access_token="tml-x"),
        "no user accounts",
    )
    calls.refused(
        "rest.assign_session_project",
        lambda: rest.assign_session_project(session_id, "project"),
        "no user accounts",
    )
    calls.refused(
        "rest.export_session_trace", lambda: rest.export_session_trace(session_id), "keeps no traces"
    )
    calls.required(
        "rest.delete_checkpoint_from_tinker_path",
        lambda: rest.delete_checkpoint_from_tinker_path(sampler_path),
    )
    calls.required(
        "rest.delete_checkpoint_from_tinker_path (2)",
        lambda: rest.delete_checkpoint_from_tinker_path(state_path),
    )


def make_calls(url: str, calls: Calls) -> None:
    rest = tinker.RestClient(base_url=url, api_key=API_KEY)
    capabilities = calls.required("rest.get_server_capabilities", lambda: rest.get_server_capabilities())
    if capabilities is None:
        return
    model = capabilities.supported_models[0].model_name or ""
    service = tinker.ServiceClient(
        base_url=url, api_key=API_KEY, user_metadata={"u": "1"}, display_name="sdk_calls"
    )
    training = calls.required(
        "create_lora_training_client(rank=8, seed=1)",
        lambda: service.create_lora_training_client(
            model, rank=8, seed=1, train_unembed=False, user_metadata={"k": "v"}
        ),
    )
    if training is None:
        return
    calls.refused(
        "create_lora_training_client(rank=100000)",
        lambda: service.create_lora_training_client(model, rank=100000),
        "max_lora_rank",
    )
    calls.refused(
        "create_lora_training_client(other model)",
        lambda: service.create_lora_training_client("other/model"),
        "this server runs",
    )
    training_calls(calls, training)
    state = calls.required(
        "save_state(ttl, metadata)",
        lambda: training.save_state("0001", ttl_seconds=3600, user_metadata={"a": "b"}),
    )
    calls.required(
        "save_state(overwrite)", lambda: training.save_state("0001", ttl_seconds=3600, overwrite=True)
    )
    sampler_checkpoint = calls.required(
        "save_weights_for_sampler(name)", lambda: training.save_weights_for_sampler("s1", ttl_seconds=3600)
    )
    ephemeral_client = calls.required(
        "save_weights_and_get_sampling_client", lambda: training.save_weights_and_get_sampling_client()
    )
    calls.required(
        "save_weights_and_get_sampling_client(inflight)",
        lambda: training.save_weights_and_get_sampling_client(kind="inflight"),
    )
    if state is None or sampler_checkpoint is None or ephemeral_client is None:
        return
    calls.required("load_state", lambda: training.load_state(state.path))
    calls.required("load_state_with_optimizer", lambda: training.load_state_with_optimizer(state.path))
    calls.required(
        "create_training_client_from_state", lambda: service.create_training_client_from_state(state.path)
    )
    restored = calls.required(
        "create_training_client_from_state_with_optimizer",
        lambda: service.create_training_client_from_state_with_optimizer(state.path),
    )
    if restored is not None:
        calls.required(
            "optim step of the restored client",
            lambda: restored.optim_step(types.AdamParams(learning_rate=1e-3)),
        )
    calls.refused(
        "sampling client of a training checkpoint",
        lambda: service.create_sampling_client(model_path=state.path),
        "is not a sampler checkpoint",
    )
    calls.required(
        "create_sampling_client(base_model)", lambda: service.create_sampling_client(base_model=model)
    )
    named_client = calls.required(
        "create_sampling_client(model_path)",
        lambda: service.create_sampling_client(model_path=sampler_checkpoint.path),
    )
    if named_client is not None:
        sampling_calls(calls, ephemeral_client, named_client)
    session_id = training.model_id.split(":")[0]
    rest_calls(
        calls,
        rest,
        training.model_id,
        state.path,
        sampler_checkpoint.path,
        session_id,
        f"{session_id}:sample:0",
    )
    calls.required("ServiceClient.close", lambda: service.close("success", detail="done"))


def main(url: str) -> int:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    # The script also makes the deprecated calls, because they are part of the SDK.
    warnings.filterwarnings("ignore", category=FutureWarning)
    calls = Calls()
    print(f"tinker {tinker.__version__} against {url}\n")
    make_calls(url, calls)
    failed = [outcome for outcome in calls.outcomes if not outcome.is_expected]
    required = sum(outcome.required for outcome in calls.outcomes)
    print(
        f"\n{required} calls that must succeed, {len(calls.outcomes) - required} that must be refused, "
        f"{len(failed)} unexpected outcomes"
    )
    for outcome in failed:
        print(f"  {outcome.name}: {outcome.detail}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.stdout.flush()
    status = main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
    sys.stdout.flush()
    os._exit(status)  # the SDK's background threads would delay the exit by seconds
