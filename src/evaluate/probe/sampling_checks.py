"""Checks of sampling: logprobs, fresh weights, seeds, temperature, stop tokens, top_k and the
context limit.
"""

from __future__ import annotations

import numpy as np
import tinker

from src.evaluate.probe.endpoint_probe import TEXT, Defect, Probe, expect


def check_agreement(probe: Probe) -> str:
    client, _ = probe.stepped_client()
    sampler = client.save_weights_and_get_sampling_client().result()
    sequence = probe.sample(sampler)
    sampled = np.array(sequence.logprobs or [])
    expect(
        len(sampled) == len(sequence.tokens),
        f"the server returned {len(sampled)} logprobs for {len(sequence.tokens)} tokens",
    )
    text = [*TEXT, *sequence.tokens]
    trained = probe.logprobs(client, text)[-len(sampled) :]
    prompt = np.array(
        sampler.compute_logprobs(tinker.ModelInput.from_ints(text)).result()[-len(sampled) :], dtype=float
    )
    gap, prompt_gap = float(np.abs(sampled - trained).mean()), float(np.abs(prompt - trained).mean())
    expect(
        gap <= probe.tolerance,
        f"the mean absolute difference of sampled and training logprobs is {gap:.2g}; the tolerance is "
        f"{probe.tolerance:g}",
    )
    expect(
        prompt_gap <= probe.tolerance,
        f"the mean absolute difference of prompt and training logprobs is {prompt_gap:.2g}; the tolerance is "
        f"{probe.tolerance:g}",
    )
    return f"mean absolute difference from the training logprobs: sampled {gap:.1e}, prompt {prompt_gap:.1e}"


def check_freshness(probe: Probe) -> str:
    """Check that a sampler created after a step has the new weights, and that an older sampler does not
    change.
    """
    client = probe.client()
    before = client.save_weights_and_get_sampling_client().result()
    old = scored(before)
    probe.one_step()
    probe.step(client, [1.0] * 4)
    new, expected = scored(client.save_weights_and_get_sampling_client().result()), probe.logprobs(client)
    expect(
        float(np.abs(new - expected).mean()) <= probe.tolerance,
        "a sampler that was created after a step does not have the new weights",
    )
    expect(
        float(np.abs(scored(before) - old).max()) <= 1e-6,
        "an existing sampler changed when its model was trained",
    )
    expect(
        float(np.abs(new - old).mean()) > 1e-3,
        "samplers that were created before and after a step give the same logprobs",
    )
    return f"the step changed the mean logprob by {float((new - old).mean()):.3f}"


def scored(sampler: tinker.SamplingClient) -> np.ndarray:
    return np.array(sampler.compute_logprobs(tinker.ModelInput.from_ints(TEXT)).result()[1:], dtype=float)


def check_seed(probe: Probe) -> str:
    sampler = probe.base_sampler()
    first, again, other = (probe.sample(sampler, seed=seed).tokens for seed in (7, 7, 8))
    expect(list(first) == list(again), "the same seed gave different tokens")
    expect(list(first) != list(other), "another seed gave the same tokens")
    return "the same seed gives the same tokens, another seed different ones"


def check_temperature(probe: Probe) -> str:
    sampler = probe.base_sampler()
    greedy = [list(probe.sample(sampler, temperature=0.0, seed=seed).tokens) for seed in (1, 2)]
    expect(greedy[0] == greedy[1], "at temperature 0, the sampled tokens depend on the seed")
    means = {}
    for temperature in (0.2, 3.0):
        tokens = list(probe.sample(sampler, temperature=temperature, seed=3).tokens)
        values = sampler.compute_logprobs(tinker.ModelInput.from_ints([*TEXT, *tokens])).result()[len(TEXT) :]
        means[temperature] = float(np.mean(np.asarray(values, np.float64)))
    expect(
        means[0.2] > means[3.0] + 0.3,
        f"the mean logprob of the sampled tokens is {means[0.2]:.2f} at temperature 0.2 and {means[3.0]:.2f} "
        "at temperature 3; it must be higher by more than 0.3 at temperature 0.2",
    )
    return (
        f"the mean logprob of the sampled tokens is {means[0.2]:.2f} at temperature 0.2 and {means[3.0]:.2f} "
        "at temperature 3"
    )


def check_stops(probe: Probe) -> str:
    sampler = probe.base_sampler()
    whole = probe.sample(sampler)
    expect(
        whole.stop_reason == "length" and len(whole.tokens) == 24,
        f"a sample with max_tokens=24 has {len(whole.tokens)} tokens and the stop reason {whole.stop_reason}"
        ", not 24 tokens and the stop reason length",
    )
    tokens = list(whole.tokens)
    stop = next((token for token in tokens[2:] if token not in tokens[:2]), tokens[1])
    cut = probe.sample(sampler, stop=[stop])
    expected = tokens[: tokens.index(stop) + 1]
    expect(
        list(cut.tokens) == expected,
        f"with a stop token the sample has {len(cut.tokens)} tokens, not {len(expected)} including the stop "
        "token",
    )
    expect(cut.stop_reason == "stop", f"a stop token gave the stop reason {cut.stop_reason}, not stop")
    return "the stop token ends the sample and is included"


def check_top_k(probe: Probe) -> str:
    sampler = probe.base_sampler()
    greedy, best = probe.sample(sampler, temperature=0.0), probe.sample(sampler, top_k=1)
    expect(list(greedy.tokens) == list(best.tokens), "top_k=1 does not give the most likely token")
    return "top_k=1 is greedy"


def check_context(probe: Probe) -> str:
    """Check that the endpoint enforces its context limit, if it states one."""
    limit = probe.max_context_length
    if limit is None:
        return "the endpoint states no limit"
    sampler = probe.base_sampler()
    prompt = (TEXT * (limit // len(TEXT) + 1))[: limit - 4]
    try:
        sequence = probe.sample(sampler, prompt, max_tokens=16)
    except (tinker.APIConnectionError, tinker.InternalServerError):
        raise  # the endpoint failed and has not rejected the prompt
    except Exception:
        return f"{len(prompt)} + 16 tokens are rejected with a limit of {limit}"
    raise Defect(
        f"{len(prompt)} + 16 tokens were accepted with a limit of {limit}: {len(sequence.tokens)} tokens "
        "were returned"
    )
