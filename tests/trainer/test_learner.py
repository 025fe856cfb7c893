import asyncio
import math

import httpx
import pytest
import tinker

from src.core.errors import BackendError, ConfigError, TrainerError
from src.learning.datums import sequences_of, to_datums
from src.learning.learner import Learner, learning_rate
from src.learning.options import LearnerOptions
from tests.fakes.backend import BanditTrainingClient
from tests.fakes.trials import turn

LOG_QUARTER = math.log(0.25)


def settings(**changes):
    options = {
        "loss_fn": "ppo",
        "learning_rate": 0.5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "weight_decay": 0.1,
        "grad_clip_norm": 1.0,
    }
    return LearnerOptions(**(options | changes))


def datums(token, *, logprob=LOG_QUARTER, advantage=1.0):
    return to_datums(sequences_of([turn([9], [token], logprob=logprob)], advantage=advantage))


@pytest.mark.seed_behaviour(73, 76)
async def test_a_substep_is_one_gradient_and_one_optimizer_step():
    client = BanditTrainingClient()
    metrics = await Learner(client, settings()).update([datums(3)])
    assert client.events == ["forward_backward", "optim_step"]
    adam = client.adam[0]
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps) == (0.5, 0.9, 0.95, 1e-8)
    assert (adam.weight_decay, adam.grad_clip_norm) == (0.1, 1.0)
    # The gradient of log p(3) at uniform logits is (-1/4, -1/4, -1/4, 3/4).
    assert client.logits.tolist() == pytest.approx([-0.125, -0.125, -0.125, 0.375])
    assert metrics["optim/grad_norm"] == pytest.approx(math.sqrt(0.75))
    assert (metrics["optim/lr"], metrics["optim/num_substeps"], metrics["optim/loss"]) == (
        0.5,
        1,
        pytest.approx(-1),
    )


async def test_update_scale_keeps_the_decay_per_optimizer_step():
    client = BanditTrainingClient()
    metrics = await Learner(client, settings(), update_scale=2.0).update([datums(3)])
    assert (client.adam[0].learning_rate, client.adam[0].weight_decay) == (1.0, 0.05)
    assert metrics["optim/lr"] == 1.0


async def test_substeps_are_sent_before_an_optimizer_step_is_awaited():
    client = BanditTrainingClient()
    events_at_await = []  # the calls that the client had received when each optimizer step was awaited
    optim_step = client.optim_step

    def recording_optim_step(adam):
        step = optim_step(adam)

        async def wait():
            await asyncio.sleep(0)
            events_at_await.append(list(client.events))
            return await step

        return wait()

    client.optim_step = recording_optim_step
    await Learner(client, settings()).update([datums(3), datums(2)])
    assert events_at_await[0] == ["forward_backward", "optim_step"] * 2


async def test_without_datums_there_is_no_optimizer_step():
    client = BanditTrainingClient()
    metrics = await Learner(client, settings()).update([[], datums(3, advantage=0.0)])
    assert client.events == []
    assert metrics["optim/num_substeps"] == 0


async def test_sampler_and_trainer_are_compared_on_the_trained_tokens():
    client = BanditTrainingClient()  # It returns log 1/4 for each of the tokens 0 to 3.
    metrics = await Learner(client, settings()).update(
        [[*datums(3, logprob=LOG_QUARTER + 0.2), *datums(2, logprob=LOG_QUARTER - 0.4)]]
    )
    assert metrics["optim/kl_sample_train_v1"] == pytest.approx(-0.1, abs=1e-6)
    assert metrics["optim/kl_sample_train_v2"] == pytest.approx(0.5 * (0.04 + 0.16) / 2, abs=1e-6)
    assert metrics["optim/entropy"] == pytest.approx(-LOG_QUARTER + 0.1, abs=1e-6)
    assert metrics["policy/rollout_train_logprobs_abs_diff_max"] == pytest.approx(0.4, abs=1e-6)
    # The ratio exp(-0.2) = 0.819 is inside the clip bounds 0.8 and 1.2, and exp(0.4) = 1.492 is outside.
    assert metrics["optim/clip_frac"] == 0.5


@pytest.mark.parametrize(
    ("loss_fn", "config", "clipped"), [("cispo", ["clip_high_threshold=1.6"], 0.0), ("ppo", None, 1.0)]
)
@pytest.mark.seed_behaviour(75)
async def test_clip_frac_uses_the_clip_bounds_of_the_loss(loss_fn, config, clipped):
    learner = Learner(BanditTrainingClient(), settings(loss_fn=loss_fn, loss_fn_config=config))
    assert (await learner.update([datums(2, logprob=LOG_QUARTER - 0.4)]))["optim/clip_frac"] == clipped


class LossClient(BanditTrainingClient):
    """Records the number of datums, the loss and its settings of each call of `forward`.

    If `refusal` is set, `forward` raises the error of a server that refuses the loss with this message.
    """

    def __init__(self, *, refusal=None):
        super().__init__()
        self.refusal = refusal
        self.requests = []

    def forward(self, data, loss_fn, loss_fn_config=None):
        self.requests.append((len(data), loss_fn, loss_fn_config))
        if self.refusal is not None:
            response = httpx.Response(400, request=httpx.Request("POST", "http://h:1"))
            raise tinker.BadRequestError("400", response=response, body={"detail": self.refusal})
        return super().forward(data, loss_fn, loss_fn_config)


async def test_require_loss_evaluates_a_server_loss_on_one_datum():
    client = LossClient()
    options = settings(loss_fn="server:soft_clip", loss_fn_config=["sharpness=2"])
    await Learner(client, options).require_loss()
    assert client.requests == [(1, "soft_clip", {"sharpness": 2.0})]


async def test_a_standard_loss_needs_no_evaluation():
    client = LossClient()
    await Learner(client, settings(loss_fn="cispo")).require_loss()
    assert client.requests == []


async def test_a_loss_that_the_server_refuses_is_a_config_error():
    client = LossClient(refusal="loss 'mine' is not supported by this server")
    with pytest.raises(ConfigError, match=r"^loss_fn=server:mine: loss 'mine' is not supported by"):
        await Learner(client, settings(loss_fn="server:mine")).require_loss()


async def test_losses_that_do_not_clip_report_no_clipping():
    metrics = await Learner(BanditTrainingClient(), settings(loss_fn="importance_sampling")).update(
        [datums(2)]
    )
    assert "optim/clip_frac" not in metrics


async def test_logprobs_that_are_not_finite_are_a_trainer_error():
    client = BanditTrainingClient()
    client.logits[0] = math.nan
    with pytest.raises(TrainerError, match="step 7: the logprobs are not finite"):
        await Learner(client, settings()).update([datums(3)], step=7)


async def test_an_error_of_the_server_is_a_backend_error():
    client = BanditTrainingClient()

    async def fail():
        raise OSError("gone")

    client.optim_step = lambda adam: fail()
    with pytest.raises(BackendError, match="training: OSError: gone"):
        await Learner(client, settings()).update([datums(3)])


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),  # SkyRL's first step has the rate 0.
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1, 1, 0.5]),
        ("cosine", 0, [1, 0.8535534, 0.5, 0.1464466]),
    ],
)
@pytest.mark.seed_behaviour(77)
def test_the_learning_rate_follows_its_schedule(schedule, warmup, rates):
    options = settings(learning_rate=1.0, lr_schedule=schedule, lr_warmup_steps=warmup)
    assert [
        learning_rate(options, options.learning_rate, step=step, num_steps=4) for step in range(1, 5)
    ] == pytest.approx(rates)


async def test_all_substeps_of_a_batch_have_the_same_learning_rate():
    client = BanditTrainingClient()
    metrics = await Learner(client, settings(lr_schedule="linear"), num_steps=4).update(
        [datums(3), datums(2)], step=3
    )
    assert [adam.learning_rate for adam in client.adam] == [0.25, 0.25]
    assert metrics["optim/lr"] == 0.25


async def test_the_trainers_logprobs_take_one_forward_call():
    client = BanditTrainingClient()
    [values] = await Learner(client, settings()).logprobs(datums(3))
    assert client.events == ["forward"] and values.tolist() == pytest.approx([0, LOG_QUARTER])
    assert client.gradient.tolist() == [0, 0, 0, 0]


async def test_streamed_groups_have_the_gradient_of_their_batch():
    whole, streamed = BanditTrainingClient(), BanditTrainingClient()
    await Learner(whole, settings()).update([[*datums(3), *datums(1, advantage=-0.5)]])
    learner = Learner(streamed, settings())
    learner.add(datums(3))
    learner.add([])
    learner.add(datums(1, advantage=-0.5))
    assert streamed.events == ["forward_backward", "forward_backward"]
    metrics = await learner.update()
    assert streamed.events == ["forward_backward", "forward_backward", "optim_step"]
    assert streamed.logits.tolist() == pytest.approx(whole.logits.tolist())
    assert metrics["optim/num_substeps"] == 1 and metrics["optim/loss"] == pytest.approx(-0.5)
    assert (await learner.update())["optim/num_substeps"] == 0, "the second update used groups of the first"


async def test_logprobs_abs_diff_covers_exactly_the_added_groups():
    # The client returns log 1/4 for each of the tokens 0 to 3 before the first optimizer step.
    learner = Learner(BanditTrainingClient(), settings())
    learner.add(datums(3, logprob=LOG_QUARTER + 0.2))
    learner.add(datums(2, logprob=LOG_QUARTER - 0.4))
    metrics = await learner.update([datums(1, logprob=LOG_QUARTER + 5.0)])
    assert metrics["policy/rollout_train_logprobs_abs_diff_mean"] == pytest.approx(0.3, abs=1e-6)
    assert metrics["policy/rollout_train_logprobs_abs_diff_max"] == pytest.approx(0.4, abs=1e-6)
