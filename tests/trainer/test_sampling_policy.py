import pytest
import tinker

from src.core.errors import BackendError
from src.core.trajectory import StopReason
from src.policy.sampling_policy import SampleRequest, TinkerPolicy, TopPPolicy, sdk_boundary
from tests.fakes.backend import Ready


class FixedClient:
    """A sampling client that always returns the same completion. `last_request` has the arguments of the last
    call of `sample`."""

    def __init__(self, tokens, logprobs, stop_reason: tinker.types.StopReason = "stop", prompt_logprobs=()):
        self.sequence = tinker.SampledSequence(
            stop_reason=stop_reason, sequence_id="s", _tokens_list=tokens, _logprobs_list=logprobs
        )
        self.prompt_logprobs = list(prompt_logprobs)

    def sample(self, prompt, num_samples, sampling_params):
        self.last_request = (prompt.to_ints(), num_samples, sampling_params)
        return Ready(tinker.SampleResponse(sequences=[self.sequence]))

    def compute_logprobs(self, prompt):
        return Ready(self.prompt_logprobs)


class FailingClient:
    """A sampling client that has lost its connection."""

    def sample(self, *_args, **_kwargs):
        raise OSError("connection lost")


async def sample(client):
    request = SampleRequest(prompt_ids=[1, 2], max_tokens=5, temperature=0.7, seed=3, stop_token_ids=[9])
    return await TinkerPolicy(client, version=4).sample(request)


@pytest.mark.seed_behaviour(5)
async def test_a_turn_holds_the_ids_and_logprobs_of_the_sampler():
    client = FixedClient([7, 9], [-0.25, -1.0])
    turn = await sample(client)
    assert (turn.prompt_ids, turn.completion_ids, turn.logprobs) == ([1, 2], [7, 9], [-0.25, -1.0])
    assert (turn.stop_reason, turn.policy_version) == (StopReason.STOP, 4)
    prompt, num_samples, params = client.last_request
    assert (prompt, num_samples) == ([1, 2], 1)
    assert (params.max_tokens, params.temperature, params.seed, params.stop) == (5, 0.7, 3, [9])


async def test_top_p_of_an_evaluation_reaches_the_sampler():
    client = FixedClient([7, 9], [-0.25, -1.0])
    request = SampleRequest(prompt_ids=[1], max_tokens=5, temperature=0.7)
    await TopPPolicy(TinkerPolicy(client, version=4), 0.95).sample(request)
    assert client.last_request[2].top_p == 0.95
    await TinkerPolicy(client, version=4).sample(request)
    assert client.last_request[2].top_p == 1


async def test_a_completion_cut_at_max_tokens_has_stop_reason_length():
    assert (await sample(FixedClient([7], [-1.0], stop_reason="length"))).stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("logprobs", [None, [-1.0]])
async def test_missing_logprobs_are_an_error_not_zeros(logprobs):
    with pytest.raises(BackendError, match="2 tokens with"):
        await sample(FixedClient([7, 9], logprobs))


async def test_an_error_of_the_client_is_a_backend_error():
    with pytest.raises(BackendError, match="sampling: OSError: connection lost"):
        await sample(FailingClient())


async def test_prompt_logprobs_omit_the_first_token():
    policy = TinkerPolicy(FixedClient([], [], prompt_logprobs=[None, -1.0, -2.0]), version=0)
    assert await policy.logprobs([5, 6, 7]) == [-1.0, -2.0]
    with pytest.raises(BackendError, match="2 logprobs for the 3 tokens after the first"):
        await policy.logprobs([5, 6, 7, 8])


async def test_prompt_logprobs_that_are_not_finite_are_an_error():
    policy = TinkerPolicy(FixedClient([], [], prompt_logprobs=[None, -1.0, float("nan")]), version=0)
    with pytest.raises(BackendError, match=r"computing logprobs: .* not finite"):
        await policy.logprobs([5, 6, 7])


def test_a_failed_request_is_reported_with_the_servers_message():
    error = tinker.RequestFailedError(
        "Request failed: no such loss for self.request_id='7' and expected type self.model_cls=<class 'X'>",
        request_id="7",
        category=tinker.types.RequestErrorCategory.User,
    )
    with pytest.raises(BackendError) as caught, sdk_boundary("training"):
        raise error
    assert str(caught.value) == "training: no such loss"
