import asyncio
import contextlib
import json
import math
from collections.abc import Callable
from functools import partial

import httpx2
import openai
import pytest

from src.cli.command_line import parse_as
from src.core.errors import BackendError, ConfigError, PromptTooLong
from src.core.trajectory import StopReason
from src.evaluate.config import EvaluateConfig
from src.evaluate.run import open_policy_and_tasks
from src.policy.openai_client import (
    ChatEndpoint,
    EndpointPolicy,
    MessageCodec,
    connect_endpoint,
    endpoint_chat,
)
from src.policy.sampling_policy import SampleRequest

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "grüß \x03Gott\n"}]


def endpoint(answer: Callable[[httpx2.Request], httpx2.Response]) -> ChatEndpoint:
    transport = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    return ChatEndpoint(
        openai.AsyncOpenAI(base_url="http://h/v1", api_key="k", http_client=transport, max_retries=0), "big"
    )


def policy(answer: Callable[[httpx2.Request], httpx2.Response]) -> EndpointPolicy:
    return EndpointPolicy(endpoint(answer))


def reply(content: str | None, finish: str = "stop") -> httpx2.Response:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content}}
    return httpx2.Response(
        200, json={"id": "1", "object": "chat.completion", "created": 1, "model": "big", "choices": [choice]}
    )


@pytest.mark.parametrize("text", ["", "abc", "abcd", "abcde", "über \x00 \U0001f600"])
def test_the_codec_is_lossless(text):
    codec = MessageCodec()
    ids = codec.encode(text, add_special_tokens=False)
    assert codec.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    assert len(ids) == math.ceil(len(text.encode()) / 4)


async def test_a_conversation_reaches_the_endpoint_as_messages():
    """`MessageCodec`, which replaces the tokenizer, writes \\x02 before and \\x03 after the text of each
    message, and removes these characters from the text.
    """
    chat, requests = endpoint_chat(), []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(json.loads(request.content))
        return reply("sure \x02thing")

    first = await policy(answer).sample(
        SampleRequest(prompt_ids=chat.render(MESSAGES), max_tokens=9, temperature=0.5, seed=3)
    )
    assert requests[0] == {
        **{"model": "big", "max_tokens": 9, "temperature": 0.5, "seed": 3},
        "messages": [MESSAGES[0], {"role": "user", "content": "grüß Gott\n"}],
    }
    assert (chat.decode(first.completion_ids), first.stop_reason) == ("sure thing", StopReason.STOP)
    assert all(math.isnan(value) for value in first.logprobs) and len(first.logprobs) == len(
        first.completion_ids
    )
    extended = chat.extend(first.prompt_ids, first.completion_ids, [{"role": "user", "content": "go on"}])
    assert extended[: len(first.prompt_ids)] == first.prompt_ids
    await policy(answer).sample(SampleRequest(prompt_ids=extended, max_tokens=9, temperature=0.5, seed=3))
    assert requests[1]["messages"][2:] == [
        {"role": "assistant", "content": "sure thing"},
        {"role": "user", "content": "go on"},
    ]


async def test_a_cut_answer_is_reported_and_can_be_extended():
    chat = endpoint_chat()
    turn = await policy(lambda _: reply("half", "length")).sample(
        SampleRequest(prompt_ids=chat.render(MESSAGES), max_tokens=1, temperature=1, seed=1)
    )
    assert (turn.stop_reason, chat.decode(turn.completion_ids)) == (StopReason.LENGTH, "half")
    messages = MessageCodec().messages(
        chat.extend(turn.prompt_ids, turn.completion_ids, [{"role": "user", "content": "x"}])
    )
    assert [message["content"] for message in messages[2:]] == ["half", "x"]


async def test_a_reply_without_content_is_an_empty_completion():
    turn = await policy(lambda _: reply(None)).sample(
        SampleRequest(prompt_ids=endpoint_chat().render(MESSAGES), max_tokens=1, temperature=1, seed=1)
    )
    assert endpoint_chat().decode(turn.completion_ids) == ""


async def test_an_unpaired_surrogate_in_a_reply_becomes_a_question_mark():
    content = reply("TEXT").content.replace(b"TEXT", rb"a\ud83d")
    headers = {"content-type": "application/json"}
    turn = await policy(lambda _: httpx2.Response(200, content=content, headers=headers)).sample(
        SampleRequest(prompt_ids=endpoint_chat().render(MESSAGES), max_tokens=9, temperature=1, seed=1)
    )
    assert endpoint_chat().decode(turn.completion_ids) == "a?"


async def test_a_failing_endpoint_is_a_backend_error():
    failing = policy(lambda _: httpx2.Response(500, json={"error": {"message": "out of order"}}))
    with pytest.raises(BackendError, match="sampling from big: InternalServerError"):
        await failing.sample(
            SampleRequest(prompt_ids=endpoint_chat().render(MESSAGES), max_tokens=1, temperature=1, seed=1)
        )


@pytest.mark.parametrize(
    ("error", "is_too_long"),
    [
        ({"code": "context_length_exceeded", "message": "use a shorter prompt"}, True),
        ({"code": 400, "message": "This model's maximum context length is 64 tokens. However, ..."}, True),
        ({"code": 400, "message": "temperature must be at most 2"}, False),
    ],
)
async def test_a_prompt_that_is_too_long_has_an_error_of_its_own(error, is_too_long):
    refusing = policy(lambda _: httpx2.Response(400, json={"error": error}))
    with pytest.raises(BackendError, match="sampling from big: BadRequestError") as raised:
        await refusing.sample(
            SampleRequest(prompt_ids=endpoint_chat().render(MESSAGES), max_tokens=1, temperature=1, seed=1)
        )
    assert isinstance(raised.value, PromptTooLong) == is_too_long


@pytest.mark.parametrize(
    ("status", "message", "is_refused"),
    [
        (400, "Unsupported value: 'temperature' does not support 0.5 with this model.", True),
        (422, "seed is not permitted", True),
        (400, "This model's maximum context length is 64 tokens.", False),
        (500, "out of order", False),
        (200, "", False),
    ],
)
async def test_an_endpoint_that_refuses_the_options_is_refused_at_once(status, message, is_refused):
    requests = []

    def answer(request):
        requests.append(request)
        return (
            reply("yes") if status == 200 else httpx2.Response(status, json={"error": {"message": message}})
        )

    expected = pytest.raises(ConfigError, match="big refuses a request with temperature")
    with expected if is_refused else contextlib.nullcontext():
        await endpoint(answer).check(temperature=0.5, top_p=1.0, seed=1, max_tokens=9)
    assert len(requests) == 1


async def test_an_evaluation_checks_its_options_before_the_first_trial(tmp_path, monkeypatch):
    @contextlib.asynccontextmanager
    async def connect(*arguments, **options):
        yield endpoint(lambda request: httpx2.Response(400, json={"error": {"message": "no top_p"}}))

    monkeypatch.setattr("src.evaluate.run.connect_endpoint", connect)
    (tmp_path / "a.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    options = ["base_url=http://h/v1", "model_name=big", f"data={tmp_path / 'a.jsonl'}", "reward=exact"]
    config = parse_as(EvaluateConfig, [*options, "top_p=0.9"])
    with pytest.raises(ConfigError, match=r"top_p=0\.9 and a seed: .*no top_p"):
        async with open_policy_and_tasks(config, None):
            pass


async def test_an_unreachable_endpoint_is_reported_in_one_line():
    with pytest.raises(
        BackendError,
        match=r"no OpenAI-compatible server answers at http://127.0.0.1:9/v1 \(APIConnectionError\)",
    ):
        async with connect_endpoint("http://127.0.0.1:9/v1", "m", heartbeat_timeout_s=9):
            pass


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (403, ConfigError, r"does not allow the API key to list the models \(HTTP 403\); set OPENAI_API_KEY"),
        (
            503,
            BackendError,
            r"http://h/v1 answers GET /models with HTTP 503; check the server or correct base_url",
        ),
    ],
)
async def test_a_refused_model_list_is_reported_with_its_status(monkeypatch, status, error, message):
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, json={}))
    client = httpx2.AsyncClient(transport=transport)
    monkeypatch.setattr(openai, "AsyncOpenAI", partial(openai.AsyncOpenAI, http_client=client))
    with pytest.raises(error, match=message):
        async with connect_endpoint("http://h/v1", "m", heartbeat_timeout_s=9):
            pass


async def test_heartbeat_timeout_s_alone_limits_the_model_list(monkeypatch):
    async def silent(request: httpx2.Request) -> httpx2.Response:
        assert set(request.extensions["timeout"].values()) == {None}
        return await asyncio.Future[httpx2.Response]()

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(silent))
    monkeypatch.setattr(openai, "AsyncOpenAI", partial(openai.AsyncOpenAI, http_client=client))
    with pytest.raises(BackendError, match=r"http://h/v1 did not answer within heartbeat_timeout_s=0\.01; "):
        async with connect_endpoint("http://h/v1", "m", heartbeat_timeout_s=0.01):
            pass


@pytest.mark.seed_behaviour(7, 102)
async def test_an_endpoint_gets_tools_and_reports_token_counts():
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    requests = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(json.loads(request.content))
        choice = {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": None, "tool_calls": [call]},
        }
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        body = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "big",
            "choices": [choice],
            "usage": usage,
        }
        return httpx2.Response(200, json=body)

    chat_reply = await endpoint(answer).reply(MESSAGES[:1], temperature=0, seed=None, tools=[tool])
    assert requests == [{"model": "big", "messages": MESSAGES[:1], "temperature": 0, "tools": [tool]}]
    assert (chat_reply.text, list(chat_reply.tool_calls)) == ("", [{"name": "look", "arguments": "{}"}])
    assert (chat_reply.num_prompt_tokens, chat_reply.num_completion_tokens, chat_reply.was_cut) == (
        7,
        2,
        False,
    )
