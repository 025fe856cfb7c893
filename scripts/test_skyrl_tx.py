"""Checks a Tinker-compatible server end to end with the unmodified SDK.

    python scripts/test_skyrl_tx.py [URL]        default: SKYRL_TX_URL, else http://localhost:8000

Creates a small adapter, trains one step, saves, samples, restores with optimizer state, and says for each whether it worked.
Exit status 0 when all did.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable

import httpx
import tinker
from tinker import types


def main(argv: list[str]) -> int:
    url = argv[0] if argv else os.environ.get("SKYRL_TX_URL", "http://localhost:8000")
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    try:
        httpx.get(f"{url}/api/v1/healthz", timeout=5.0).raise_for_status()
    except httpx.HTTPError as error:
        print(f"test_skyrl_tx: nothing answers at {url} ({error}); start a server with scripts/start_skyrl_tx.sh MODEL", file=sys.stderr)
        return 2
    api_key = os.environ.get("TINKER_API_KEY") or "tml-dummy"
    with tinker.ServiceClient(base_url=url, api_key=api_key) as service:
        try:
            check(service, tinker.RestClient(base_url=url, api_key=api_key))
        except Exception as error:  # the border of this program: one line instead of a traceback
            print(f"FAILED  {type(error).__name__}: {error}")
            return 1
    print(f"all checks passed: {url}")
    return 0


def check(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    capabilities = step("capabilities", lambda: rest.get_server_capabilities().result())
    model = next(model.model_name for model in capabilities.supported_models if model.model_name)
    training = step(
        f"create_lora_training_client({model}, rank=8)", lambda: service.create_lora_training_client(model, rank=8, seed=0).result()
    )
    tokens = list(range(1, 17))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
            "weights": types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32"),
        },
    )
    before = step("forward", lambda: training.forward([datum], "cross_entropy").result())
    step("forward_backward", lambda: training.forward_backward([datum], "cross_entropy").result())
    update = step("optim_step", lambda: training.optim_step(types.AdamParams(learning_rate=1e-3)).result())
    after = step("forward again", lambda: training.forward([datum], "cross_entropy").result())
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"], "one optimizer step did not lower the loss"
    note(f"loss {before.metrics['loss:sum']:.4f} -> {after.metrics['loss:sum']:.4f}, grad_norm {(update.metrics or {}).get('grad_norm')}")
    state = step("save_state", lambda: training.save_state(f"check-{int(time.time())}").result())
    sampler = step("save_weights_and_get_sampling_client", lambda: training.save_weights_and_get_sampling_client().result())
    prompt = types.ModelInput.from_ints(tokens[:8])
    settings = types.SamplingParams(max_tokens=8, temperature=1.0, seed=1, stop=[])
    sample = step("sample", lambda: sampler.sample(prompt, 2, settings).result())
    again = sampler.sample(prompt, 2, settings).result()
    assert [s.tokens for s in sample.sequences] == [s.tokens for s in again.sequences], "the same seed gave other tokens"
    sequence = sample.sequences[0]
    logprobs = step("compute_logprobs", lambda: sampler.compute_logprobs(types.ModelInput.from_ints(tokens[:8] + sequence.tokens)).result())
    recomputed = [logprob for logprob in logprobs[8:] if logprob is not None]
    gap = max(abs(a - b) for a, b in zip(sequence.logprobs or [], recomputed, strict=True))
    note(f"largest difference between sampled and recomputed logprobs: {gap:.2e}")
    assert gap < 0.1, "sampler and forward disagree on logprobs"
    restored = step(
        "create_training_client_from_state_with_optimizer",
        lambda: service.create_training_client_from_state_with_optimizer(state.path).result(),
    )
    loss = step("forward on the restored client", lambda: restored.forward([datum], "cross_entropy").result()).metrics["loss:sum"]
    assert math.isclose(loss, after.metrics["loss:sum"], rel_tol=1e-5), "the restored model gives another loss"


def step[T](name: str, call: Callable[[], T]) -> T:
    started = time.monotonic()
    result = call()
    print(f"ok      {name}  ({time.monotonic() - started:.2f} s)", flush=True)
    return result


def note(text: str) -> None:
    print(f"        {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
