"""What `src.probe` checks: each function makes an endpoint show one thing, and raises Defect when it shows something else.

Adam hides scale, so the optimizer is looked at with a huge epsilon, where a step is plain gradient descent:

    w -= lr * m / (sqrt(v) + eps)   ->   w -= (lr / eps) * m        for eps >> sqrt(v)

The change of a text's log-probability under such a step is then proportional to the gradient, and says whether gradients were summed,
clipped, kept or forgotten. `Probe.change` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tinker

HUGE = 1e4  # epsilon under which a step is plain gradient descent
RANK = 8
TEXT = [5, 9, 14, 6, 33, 21, 17, 8, 40, 12, 7, 29]  # any ids will do
OTHER = [11, 30, 6, 25, 19, 44, 10, 35, 13, 22, 38, 9]


class Defect(Exception):
    """What was seen instead."""


@dataclass(kw_only=True)
class Probe:
    """An endpoint and a model, and what the checks have in common."""

    service: tinker.ServiceClient
    model_name: str
    max_context_length: int | None
    tolerance: float  # of log-probabilities, per token
    rate: float = 0.0  # learning rate over epsilon that changes TEXT's mean logprob by about 0.03; found by the first check that needs it
    moved: float = 0.0  # what that step changes

    def client(self, seed: int = 1) -> tinker.TrainingClient:
        return self.service.create_lora_training_client(self.model_name, rank=RANK, seed=seed).result()

    def logprobs(self, client: tinker.TrainingClient, text: Sequence[int] = TEXT) -> np.ndarray:
        output = client.forward([cross_entropy(text)], "cross_entropy").result()
        return output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)

    def mean(self, client: tinker.TrainingClient) -> float:
        return float(self.logprobs(client).mean())

    def step(self, client: tinker.TrainingClient, weights: Sequence[float], **adam: float) -> float:
        """One forward_backward of TEXT for each of `weights`, then one optimizer step, by default plain gradient descent. TEXT's mean
        logprob before it."""
        outputs = [
            client.forward_backward([cross_entropy(TEXT, weight)], "cross_entropy").result()
            for weight in weights
        ]
        options = {"learning_rate": self.rate * HUGE, "eps": HUGE, "beta1": 0.0, "beta2": 0.5} | adam
        client.optim_step(tinker.AdamParams(**options)).result()
        return float(outputs[0].loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64).mean())

    def change(self, client: tinker.TrainingClient, weights: Sequence[float], **adam: float) -> float:
        """By how much a step changes TEXT's mean logprob."""
        before = self.step(client, weights, **adam)
        return self.mean(client) - before

    def moved_client(self) -> tuple[tinker.TrainingClient, float]:
        """A client after one step, and how far that went."""
        self.once()
        client = self.client()
        return client, self.change(client, [1.0])

    def once(self) -> float:
        """How far one step goes. Finds the rate, the first time."""
        if not self.rate:
            self.rate = 1e-3
            for _ in range(12):
                self.moved = self.change(self.client(), [1.0])
                if 0.01 <= self.moved <= 0.08:
                    return self.moved
                self.rate *= min(10.0, max(0.1, 0.03 / self.moved)) if self.moved > 1e-9 else 10.0
            self.rate = 0.0
            raise Defect(
                "no learning rate made a step of gradient descent raise the likelihood of what was trained"
            )
        return self.moved

    def base_sampler(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model=self.model_name).result()

    def sample(
        self, sampler: tinker.SamplingClient, prompt: Sequence[int] = TEXT, **params: object
    ) -> tinker.SampledSequence:
        options: dict[str, object] = {"max_tokens": 24, "temperature": 1.0, "seed": 7, "stop": [], **params}
        given = tinker.SamplingParams(**options)  # type: ignore[arg-type]
        return sampler.sample(tinker.ModelInput.from_ints(list(prompt)), 1, given).result().sequences[0]


def cross_entropy(text: Sequence[int], weight: float = 1.0) -> tinker.Datum:
    return datum(text, weights=[weight] * (len(text) - 1))


def datum(text: Sequence[int], **inputs: Sequence[float]) -> tinker.Datum:
    tensors = {
        name: tinker.TensorData.from_numpy(np.array(values, dtype=np.float32))
        for name, values in inputs.items()
    }
    target = tinker.TensorData.from_numpy(np.array(text[1:], dtype=np.int64))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(text[:-1])),
        loss_fn_inputs={"target_tokens": target, **tensors},
    )


def expect(condition: bool, seen: str) -> None:
    if not condition:
        raise Defect(seen)


def near(value: float, wanted: float, tolerance: float) -> bool:
    return abs(value - wanted) <= tolerance


def policy_loss(
    name: str, config: dict[str, float], logprobs: np.ndarray, sampled: np.ndarray, advantages: np.ndarray
) -> float:
    """Tinker's losses, summed over tokens (tinker-docs.thinkingmachines.ai/losses)."""
    ratio = np.exp(logprobs - sampled)
    clipped = np.clip(ratio, config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    match name:
        case "importance_sampling":
            return float(-(ratio * advantages).sum())
        case "ppo":
            return float(-np.minimum(ratio * advantages, clipped * advantages).sum())
        case _:
            return float(-(clipped * logprobs * advantages).sum())


def loss_of(probe: Probe, name: str, config: dict[str, float] | None) -> tuple[float, float]:
    """(what the server says, what it should say) of a loss whose ratios lie on both sides of every bound."""
    client = probe.client()
    logprobs = probe.logprobs(client)
    sampled = logprobs + np.resize([-0.5, 0.3, 0.05, -0.1], len(logprobs))
    advantages = np.resize([1.0, -0.7, 0.4], len(logprobs))
    given = datum(TEXT, logprobs=sampled.tolist(), advantages=advantages.tolist())
    output = client.forward_backward([given], name, config).result()  # type: ignore[arg-type]
    said = output.metrics.get("loss:sum", float("nan"))
    found = output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    return said, policy_loss(
        name, config or {}, found, np.asarray(sampled, np.float32).astype(np.float64), advantages
    )


def check_loss(name: str) -> Callable[[Probe], str]:
    def check(probe: Probe) -> str:
        said, wanted = loss_of(probe, name, None)
        expect(
            near(said, wanted, 1e-3 * max(1.0, abs(wanted))),
            f"loss:sum is {said:.5g}, by its formula {wanted:.5g}",
        )
        return f"loss:sum {said:.5g}"

    return check


def check_cross_entropy(probe: Probe) -> str:
    client = probe.client()
    output = client.forward_backward([cross_entropy(TEXT, 0.5)], "cross_entropy").result()
    wanted = -0.5 * float(output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64).sum())
    said = output.metrics.get("loss:sum", float("nan"))
    expect(
        near(said, wanted, 1e-3 * max(1.0, abs(wanted))),
        f"loss:sum is {said:.5g}, the weighted sum is {wanted:.5g}",
    )
    return f"loss:sum {said:.5g}"


def check_loss_settings(probe: Probe) -> str:
    for name in ("ppo", "cispo"):
        config = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.5}
        said, wanted = loss_of(probe, name, config)
        expect(
            near(said, wanted, 1e-3 * max(1.0, abs(wanted))),
            f"{name} with {config}: loss:sum is {said:.5g}, by its formula {wanted:.5g}",
        )
    return "clip thresholds of ppo and cispo"


def check_unknown_is_refused(probe: Probe) -> str:
    given = datum(TEXT, logprobs=[-1.0] * (len(TEXT) - 1), advantages=[1.0] * (len(TEXT) - 1))
    for what, call in (
        ("the loss no_such_loss", lambda client: client.forward_backward([given], "no_such_loss")),
        (
            "the setting no_such_setting of ppo",
            lambda client: client.forward_backward([given], "ppo", {"no_such_setting": 1.0}),
        ),
    ):
        try:
            call(probe.client()).result()
        except Exception:  # any refusal will do, the SDK's own among them
            continue
        raise Defect(f"{what} was taken without a word")
    return "loss and setting"


def check_sums(probe: Probe) -> str:
    once = probe.once()
    twice = probe.change(probe.client(), [1.0, 1.0])
    client = probe.client()
    client.forward_backward([cross_entropy(TEXT)], "cross_entropy").result()
    before = probe.step(client, [0.0])
    added = probe.mean(client) - before
    expect(
        0.8 <= added / once <= 1.2,
        f"a second call without weight changed the gradient: the step went {added / once:.2f} times as far",
    )
    client = probe.client()
    both = client.forward_backward([cross_entropy(TEXT), cross_entropy(TEXT)], "cross_entropy").result()
    expect(len(both.loss_fn_outputs) == 2, f"{len(both.loss_fn_outputs)} outputs came back for two texts")
    batch = probe.step(client, [0.0])
    batch = probe.mean(client) - batch
    for what, moved in (("two calls", twice), ("a batch of two", batch)):
        expect(
            1.6 <= moved / once <= 2.4,
            f"{what} moved {moved / once:.2f} times as far as one; gradients have to be summed",
        )
    return f"two calls {twice / once:.2f}, a batch of two {batch / once:.2f} times one"


def check_is_cleared(probe: Probe) -> str:
    client, once = probe.moved_client()
    again = probe.change(client, [0.0])
    expect(
        abs(again) < 0.1 * once,
        f"a step without a gradient moved {again / once:.2f} times as far as the one before: it was not cleared",
    )
    return "the gradient is gone after a step"


def check_learning_rate(probe: Probe) -> str:
    once = probe.once()
    half = probe.change(probe.client(), [1.0], learning_rate=0.5 * probe.rate * HUGE)
    expect(0.4 <= half / once <= 0.6, f"half the rate moved {half / once:.2f} times as far")
    return f"half the rate moves {half / once:.2f} times as far"


def check_eps(probe: Probe) -> str:
    once = probe.once()
    half = probe.change(probe.client(), [1.0], eps=2 * HUGE)
    expect(0.4 <= half / once <= 0.6, f"twice the epsilon moved {half / once:.2f} times as far, not half")
    return f"twice the epsilon moves {half / once:.2f} times as far"


def check_beta1(probe: Probe) -> str:
    """After g, then -g: m is 0 without momentum's memory, and -0.053 g (corrected for bias) with beta1 = 0.9."""
    probe.once()
    remaining = {}
    for beta1 in (0.0, 0.9):
        client = probe.client()
        moved = probe.change(client, [1.0], beta1=beta1)
        remaining[beta1] = 1 + probe.change(client, [-1.0], beta1=beta1) / moved
    expect(
        abs(remaining[0.0]) < 0.25,
        f"beta1=0: {remaining[0.0]:.2f} of a step is left after its opposite, not 0",
    )
    expect(
        0.75 <= remaining[0.9] <= 1.1,
        f"beta1=0.9: {remaining[0.9]:.2f} of a step is left after its opposite, not 0.95",
    )
    return f"after a step and its opposite {remaining[0.0]:.2f} and {remaining[0.9]:.2f} of it are left (0 and 0.9)"


def check_beta2(probe: Probe) -> str:
    """After g, then g / 10, without epsilon: the second step is 0.71 of the first with beta2 = 0.01 and 0.14 with 0.999."""
    ratio = {}
    for beta2 in (0.01, 0.999):
        client = probe.client()
        options = {"learning_rate": 1e-4, "eps": 1e-12, "beta2": beta2}
        first = probe.change(client, [1.0], **options)
        ratio[beta2] = probe.change(client, [0.1], **options) / first
    expect(
        ratio[0.01] > 2.5 * ratio[0.999],
        f"a weak step after a strong one: {ratio[0.01]:.2f} with beta2=0.01, {ratio[0.999]:.2f} with 0.999",
    )
    return f"a weak step after a strong one: {ratio[0.01]:.2f} with 0.01, {ratio[0.999]:.2f} with 0.999"


def check_weight_decay(probe: Probe) -> str:
    """A decay of half the weights takes back half the step or more, since both factors of an adapter shrink."""
    client, moved = probe.moved_client()
    rate = probe.rate * HUGE
    kept = 1 + probe.change(client, [0.0], weight_decay=0.5 / rate) / moved
    expect(kept < 0.7, f"a decay of half the weights left {kept:.2f} of what they did")
    return f"a decay of half the weights leaves {kept:.2f} of what they did"


def check_clipping(probe: Probe) -> str:
    once = probe.once()
    clipped = probe.change(probe.client(), [1.0], grad_clip_norm=1e-4)
    expect(
        abs(clipped) < 0.2 * once,
        f"a gradient clipped to a norm of 1e-4 moved {clipped / once:.2f} times as far as a whole one",
    )
    loose = probe.change(probe.client(), [1.0], grad_clip_norm=1e6)
    expect(
        0.8 <= loose / once <= 1.2, f"a bound above the norm changed the step to {loose / once:.2f} of itself"
    )
    return f"norm 1e-4 moves {clipped / once:.3f} as far, a loose bound {loose / once:.2f}"


def check_agreement(probe: Probe) -> str:
    client, _ = probe.moved_client()
    sampler = client.save_weights_and_get_sampling_client().result()
    sequence = probe.sample(sampler)
    said = np.array(sequence.logprobs or [])
    expect(
        len(said) == len(sequence.tokens),
        f"{len(sequence.tokens)} tokens came back with {len(said)} logprobs",
    )
    text = [*TEXT, *sequence.tokens]
    trained = probe.logprobs(client, text)[-len(said) :]
    scored = np.array(
        sampler.compute_logprobs(tinker.ModelInput.from_ints(text)).result()[-len(said) :], dtype=float
    )
    gap, prompt_gap = float(np.abs(said - trained).mean()), float(np.abs(scored - trained).mean())
    expect(
        gap <= probe.tolerance,
        f"sampled logprobs are {gap:.2g} from the trainer's on average; the tolerance is {probe.tolerance:g}",
    )
    expect(
        prompt_gap <= probe.tolerance, f"prompt logprobs are {prompt_gap:.2g} from the trainer's on average"
    )
    return f"sampled {gap:.1e}, prompt {prompt_gap:.1e} from the trainer's on average"


def check_freshness(probe: Probe) -> str:
    """A sampler made after a step has that step's weights; one made before keeps its own."""
    client = probe.client()
    before = client.save_weights_and_get_sampling_client().result()
    old = scored(before)
    probe.once()
    probe.step(client, [1.0] * 4)
    new, wanted = scored(client.save_weights_and_get_sampling_client().result()), probe.logprobs(client)
    expect(
        float(np.abs(new - wanted).mean()) <= probe.tolerance,
        "a sampler made after a step does not have the step's weights",
    )
    expect(
        float(np.abs(scored(before) - old).max()) <= 1e-6,
        "a sampler changed when its model was trained further",
    )
    expect(
        float(np.abs(new - old).mean()) > 1e-3, "a sampler made after a step says what the one before it said"
    )
    return f"moved by {float((new - old).mean()):.3f} per token with the step"


def scored(sampler: tinker.SamplingClient) -> np.ndarray:
    return np.array(sampler.compute_logprobs(tinker.ModelInput.from_ints(TEXT)).result()[1:], dtype=float)


def check_seed(probe: Probe) -> str:
    sampler = probe.base_sampler()
    first, again, other = (probe.sample(sampler, seed=seed).tokens for seed in (7, 7, 8))
    expect(list(first) == list(again), "the same seed gave other tokens")
    expect(list(first) != list(other), "another seed gave the same tokens")
    return "same seed same tokens, another seed others"


def check_temperature(probe: Probe) -> str:
    sampler = probe.base_sampler()
    greedy = [list(probe.sample(sampler, temperature=0.0, seed=seed).tokens) for seed in (1, 2)]
    expect(greedy[0] == greedy[1], "temperature 0 depends on the seed")
    spread = {}
    for temperature in (0.2, 3.0):
        text = [
            token
            for seed in (1, 2)
            for token in probe.sample(sampler, temperature=temperature, seed=seed).tokens[:12]
        ]
        spread[temperature] = len(set(text))
    means = {}
    for temperature in (0.2, 3.0):
        tokens = list(probe.sample(sampler, temperature=temperature, seed=3).tokens)
        values = sampler.compute_logprobs(tinker.ModelInput.from_ints([*TEXT, *tokens])).result()[len(TEXT) :]
        means[temperature] = float(np.mean(np.asarray(values, np.float64)))
    expect(
        means[0.2] > means[3.0] + 0.3,
        f"mean logprob {means[0.2]:.2f} at temperature 0.2 and {means[3.0]:.2f} at 3",
    )
    return f"mean logprob {means[0.2]:.2f} at 0.2, {means[3.0]:.2f} at 3"


def check_stops(probe: Probe) -> str:
    sampler = probe.base_sampler()
    whole = probe.sample(sampler)
    expect(
        whole.stop_reason == "length" and len(whole.tokens) == 24,
        f"{len(whole.tokens)} tokens, {whole.stop_reason}, where 24 were asked for",
    )
    tokens = list(whole.tokens)
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    cut = probe.sample(sampler, stop=[stop])
    wanted = tokens[: tokens.index(stop) + 1]
    expect(
        list(cut.tokens) == wanted,
        f"a stop token ends the sample after {len(cut.tokens)} tokens, not {len(wanted)}, itself included",
    )
    expect(cut.stop_reason == "stop", f"a stop token gave the reason {cut.stop_reason}")
    return "the stop token ends the sample and is part of it"


def check_top_k(probe: Probe) -> str:
    sampler = probe.base_sampler()
    greedy, best = probe.sample(sampler, temperature=0.0), probe.sample(sampler, top_k=1)
    expect(list(greedy.tokens) == list(best.tokens), "top_k=1 is not the likeliest token")
    return "top_k=1 is greedy"


def check_context(probe: Probe) -> str:
    """Only an endpoint that names its limit can be asked whether it keeps it."""
    limit = probe.max_context_length
    if limit is None:
        return "the endpoint names no limit"
    sampler = probe.base_sampler()
    prompt = (TEXT * (limit // len(TEXT) + 1))[: limit - 4]
    try:
        sequence = probe.sample(sampler, prompt, max_tokens=16)
    except Exception:
        return f"{len(prompt)} + 16 tokens are refused by {limit}"
    raise Defect(
        f"{len(prompt)} + 16 tokens were taken by a context of {limit}: {len(sequence.tokens)} came back"
    )


def resumed(probe: Probe, load: Callable[[str], tinker.TrainingClient]) -> tuple[float, float, float]:
    """After a step with momentum: how far its opposite moves the model itself, and one that `load` made of its checkpoint; and the loss in
    between."""
    options = {"beta1": 0.9}
    probe.once()
    client = probe.client()
    probe.step(client, [1.0], **options)
    path = client.save_state("probe", overwrite=True).result().path
    other = load(path)
    gap = float(np.abs(probe.logprobs(client) - probe.logprobs(other)).max())
    return probe.change(client, [-1.0], **options), probe.change(other, [-1.0], **options), gap


def check_load_with_optimizer(probe: Probe) -> str:
    service = probe.service
    kept, restored, gap = resumed(
        probe, lambda path: service.create_training_client_from_state_with_optimizer(path).result()
    )
    expect(gap <= 1e-5, f"logprobs differ by {gap:.2g} after loading")
    expect(
        near(restored, kept, 0.05 * abs(kept) + 1e-5),
        f"the next step moved {restored:.4f} after loading, {kept:.4f} without: no optimizer state",
    )
    return f"the next step moves {restored:.4f}, and {kept:.4f} without loading"


def check_load_without_optimizer(probe: Probe) -> str:
    service = probe.service
    kept, fresh, gap = resumed(probe, lambda path: service.create_training_client_from_state(path).result())
    expect(gap <= 1e-5, f"logprobs differ by {gap:.2g} after loading")
    expect(
        abs(fresh) > 3 * abs(kept),
        f"the next step moved {fresh:.4f} after loading weights alone, {kept:.4f} without: the moments came too",
    )
    return f"a fresh optimizer moves {fresh:.4f}, the old one {kept:.4f}"


def check_tenants(probe: Probe) -> str:
    probe.once()
    one, other = probe.client(seed=1), probe.client(seed=2)
    probe.step(other, [1.0])
    before = probe.logprobs(other)
    probe.step(one, [1.0] * 4)
    one.forward_backward([cross_entropy(OTHER)], "cross_entropy").result()
    gap = float(np.abs(probe.logprobs(other) - before).max())
    expect(gap <= 1e-6, f"training one model moved another's logprobs by {gap:.2g}")
    return "training one model leaves another as it was"


NEEDED: dict[str, Callable[[Probe], str]] = {
    "sums gradients": check_sums,
    "clears gradients": check_is_cleared,
    "learning rate": check_learning_rate,
    "beta1": check_beta1,
    "beta2": check_beta2,
    "eps": check_eps,
    "loss cross_entropy": check_cross_entropy,
    "logprobs agree": check_agreement,
    "samplers are fresh": check_freshness,
    "seeds": check_seed,
    "stop tokens": check_stops,
    "context limit": check_context,
    "loads with optimizer": check_load_with_optimizer,
    "tenants": check_tenants,
    "refuses the unknown": check_unknown_is_refused,
}
WHERE_ASKED_FOR: dict[str, Callable[[Probe], str]] = {
    "loss importance_sampling": check_loss("importance_sampling"),
    "loss ppo": check_loss("ppo"),
    "loss cispo": check_loss("cispo"),
    "loss settings": check_loss_settings,
    "weight decay": check_weight_decay,
    "gradient clipping": check_clipping,
    "temperature": check_temperature,
    "top_k": check_top_k,
    "loads without optimizer": check_load_without_optimizer,
}
