"""Call the main operations of a server with the installed `tinker`, version 0.6.0 or later.

    python scripts/sdk_smoke.py URL

The operations are create, forward, forward_backward + optim_step, save, restore, sample, compute_logprobs,
archive (SDKs up to 0.35) and close (SDKs from 0.27). Each step checks and prints its result. The script stops
at the first step that fails. It needs no package except `tinker`, so that `sdk_matrix.py` can run it in a
virtual environment that has only this package. The exit status is 0 if all steps passed.
"""

from __future__ import annotations

import math
import os
import sys
import tarfile
import urllib.request
from collections.abc import Sequence

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from tinker import types

# Every version converts plain lists to tensors, although its annotations do not allow lists.
# pyright: reportArgumentType=false

VERSION = tuple(int(part) for part in tinker.__version__.split(".")[:2])
TIMEOUT_S = 300
TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
TOLERANCE = 2e-3


def datum(tokens: list[int]) -> types.Datum:
    weights = [0.0] + [1.0] * (len(tokens) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": [*tokens[1:], 0], "weights": weights},
    )


def rl_datum(tokens: list[int], logprobs: list[float]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": [*tokens[1:], 0],
            "logprobs": logprobs,
            "advantages": [1.0] * len(tokens),
        },
    )


def check(step: str, passed: bool, detail: object = "") -> None:
    """Print the result of one step, and exit with status 1 if it failed."""
    print(f"{'ok' if passed else 'FAILED':7} {step} {detail}".rstrip(), flush=True)
    if not passed:
        raise SystemExit(1)


def close_to(left: Sequence[float | None], right: Sequence[float | None]) -> bool:
    return len(left) == len(right) and all(
        first is not None and second is not None and math.isclose(first, second, abs_tol=TOLERANCE)
        for first, second in zip(left, right, strict=True)
    )


def ready(client):
    """Return the client. Since 0.38 the SDK creates clients in the background and returns a future."""
    return client.result(timeout=TIMEOUT_S) if VERSION >= (0, 38) else client


def smoke(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-dummy")
    (model, *_) = service.get_server_capabilities().supported_models
    name = model.model_name or ""
    training = ready(
        service.create_lora_training_client(
            base_model=name, rank=4, seed=1, user_metadata={"renderer_name": "none"}
        )
    )
    check("create", training.get_info().lora_rank == 4, training.get_info().model_id)

    # SDK 0.6.0 sends 128 datums per request, so 300 datums need 3 requests. Newer releases send up to 1,024.
    datums = [datum([1 + index % 30, *TOKENS]) for index in range(300)]
    forward = training.forward(datums, "cross_entropy").result(timeout=TIMEOUT_S)
    check("forward", len(forward.loss_fn_outputs) == 300 and "loss:sum" in forward.metrics, forward.metrics)

    backward = training.forward_backward([datum(TOKENS)], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    loss_before = backward.result(timeout=TIMEOUT_S).metrics["loss:sum"]
    step.result(timeout=TIMEOUT_S)
    output = training.forward([datum(TOKENS)], "cross_entropy").result(timeout=TIMEOUT_S)
    loss_after, logprobs = output.metrics["loss:sum"], list(output.loss_fn_outputs[0]["logprobs"].data)
    check(
        "forward_backward + optim_step",
        loss_after < loss_before,
        f"loss {loss_before:.3f} -> {loss_after:.3f}",
    )
    ratio_one = training.forward_backward([rl_datum(TOKENS, logprobs)], "ppo").result(timeout=TIMEOUT_S)
    check(
        "forward_backward(ppo)",
        math.isclose(ratio_one.metrics["loss:sum"], -len(TOKENS), abs_tol=TOLERANCE),
        ratio_one.metrics,
    )

    state = training.save_state("smoke").result(timeout=TIMEOUT_S).path
    check("save_state", state.endswith("/weights/smoke"), state)
    sampler_path = training.save_weights_for_sampler("smoke").result(timeout=TIMEOUT_S).path
    check("save_weights_for_sampler", sampler_path.endswith("/sampler_weights/smoke"), sampler_path)

    if VERSION >= (0, 9):
        restored = ready(service.create_training_client_from_state_with_optimizer(state))
    else:
        restored = ready(service.create_training_client_from_state(state))
        restored.load_state_with_optimizer(state).result(timeout=TIMEOUT_S)
    restored_output = restored.forward([datum(TOKENS)], "cross_entropy").result(timeout=TIMEOUT_S)
    check("restore", close_to(list(restored_output.loss_fn_outputs[0]["logprobs"].data), logprobs))

    prompt, settings = (
        types.ModelInput.from_ints(TOKENS),
        types.SamplingParams(max_tokens=6, temperature=1.0, seed=3),
    )
    samplers = {
        "named": ready(service.create_sampling_client(model_path=sampler_path)),
        "ephemeral": ready(training.save_weights_and_get_sampling_client()),
        "base model": ready(service.create_sampling_client(base_model=name)),
    }
    for kind, sampler in samplers.items():
        sampled = (
            sampler.sample(prompt=prompt, num_samples=2, sampling_params=settings)
            .result(timeout=TIMEOUT_S)
            .sequences
        )
        complete = all(
            sequence.tokens and len(sequence.tokens) == len(sequence.logprobs or []) for sequence in sampled
        )
        check(
            f"sample ({kind})", complete and len(sampled) == 2, [sequence.stop_reason for sequence in sampled]
        )
    scored = samplers["named"].compute_logprobs(prompt).result(timeout=TIMEOUT_S)
    check("compute_logprobs", scored[0] is None and close_to(scored[1:], logprobs[:-1]))
    if VERSION <= (0, 35):
        for path in (state, sampler_path):
            rest = service.create_rest_client()
            archive_url = rest.get_checkpoint_archive_url_from_tinker_path(path).result(timeout=TIMEOUT_S).url  # pyright: ignore[reportAttributeAccessIssue]
            with (
                urllib.request.urlopen(archive_url, timeout=TIMEOUT_S) as reply,
                tarfile.open(fileobj=reply, mode="r|") as tar,
            ):
                check(
                    "checkpoint archive",
                    sorted(tar.getnames()) == ["adapter_config.json", "adapter_model.safetensors"],
                    path,
                )
    if VERSION >= (0, 27):
        service.close("success").result(timeout=TIMEOUT_S)
        check("close", True)


if __name__ == "__main__":
    print(f"tinker {tinker.__version__}")
    smoke(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # background threads of the SDK would delay the exit by seconds
