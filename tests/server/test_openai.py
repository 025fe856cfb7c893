"""Tests of the OpenAI routes with the official `openai` client on a loopback port.

A `TextEngine` replaces the model and returns the texts that the test sets.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import litellm
import numpy as np
import openai
import pytest
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionMessageParam,
)

from skyrl_tx_server.engine.engine import Watcher
from skyrl_tx_server.engine.operations import LoraSpec, Sample, SampleResult, SamplingSettings
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.http.wire.call_syntax import CallSyntax
from skyrl_tx_server.http.wire.chat_format import TextPieces, load_tokenizer
from skyrl_tx_server.http.wire.openai_replies import ChatFormat
from skyrl_tx_server.http.wire.output_parser import AnswerParser, Content, ParsedDelta
from tests.fakes.server import fake_context, serving
from tests.fakes.text_engine import END, TextEngine, save_tokenizer

MODEL = "local/fake"
CHAT_TEMPLATES = Path(__file__).resolve().parents[1] / "fixtures" / "chat_templates"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
LS: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "ls", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "/é"}}\n</tool_call>'
NAN_CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": NaN}}\n</tool_call>'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("openai") / "model")


@pytest.fixture
def engine() -> TextEngine:
    return TextEngine(["Grüße, 世界!"])


@pytest.fixture
def context(tmp_path: Path, model_dir: Path, engine: TextEngine) -> AppState:
    state = fake_context(tmp_path, settings=HttpSettings(model_dir=model_dir))
    state.engine.stop()  # type: ignore[attr-defined]
    return replace(state, engine=engine)


@pytest.fixture
def client(context: AppState) -> Iterator[openai.OpenAI]:
    with (
        serving(StartupState(state=context)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def streamed(client: openai.OpenAI, **options: object) -> tuple[str, str, list[dict[str, str]], str | None]:
    """Return content, reasoning, tool calls and finish reason of a streamed chat."""
    content, reasoning, reason, calls = "", "", None, {}
    for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **options):  # type: ignore[call-overload]
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            calls[call.index] = {"name": call.function.name, "arguments": call.function.arguments}
        reason = chunk.choices[0].finish_reason or reason
    return content, reasoning, [calls[index] for index in sorted(calls)], reason


def with_template(context: AppState, directory: Path, template: str) -> AppState:
    """Return the state of a server whose tokenizer, which is saved in `directory`, has another template."""
    save_tokenizer(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return replace(context, settings=HttpSettings(model_dir=directory))


def test_simultaneous_first_requests_share_one_tokenizer(tmp_path: Path) -> None:
    model_dir = save_tokenizer(tmp_path / "model")
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(load_tokenizer, [model_dir] * 8))
    assert all(tokenizer is loaded[0] for tokenizer in loaded)


def test_a_chat_is_rendered_by_the_template_and_answered(client: openai.OpenAI, engine: TextEngine) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
        temperature=0.5,
        top_p=0.9,
        seed=7,
        max_completion_tokens=100,
        n=2,
    )
    assert engine.prompt_text() == "<system>Be brief.<|im_end|><user>Hello<|im_end|><assistant>"
    assert engine.received[-1].settings == SamplingSettings(
        max_tokens=100, temperature=0.5, top_p=0.9, seed=7, stop_token_ids=(END,)
    )
    assert [choice.message.content for choice in reply.choices] == ["Grüße, 世界!"] * 2
    assert [(choice.index, choice.finish_reason) for choice in reply.choices] == [(0, "stop"), (1, "stop")]
    num_tokens = len("Grüße, 世界!".encode()) + 1
    assert reply.usage is not None and reply.usage.completion_tokens == 2 * num_tokens
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 2 * num_tokens
    assert reply.usage.prompt_tokens == len(engine.received[-1].prompt)


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "num_calls", "reason"),
    [
        ("Grüße, 世界!", "Grüße, 世界!", "", 0, "stop"),
        ("<think>\nHm, </thin\n</think>\n\nYes.", "Yes.", "Hm, </thin", 0, "stop"),
        (f"I look.\n{CALL}", "I look.", "", 1, "tool_calls"),
        (f"<think>\n<tool_call> no\n</think>\n\n{CALL}\n{CALL}", "", "<tool_call> no", 2, "tool_calls"),
        ("<tool_call>\n{ls}\n</tool_call>", "<tool_call>\n{ls}\n</tool_call>", "", 0, "stop"),
        ("a <tool_call> {", "a <tool_call> {", "", 0, "stop"),
        (NAN_CALL, NAN_CALL, "", 0, "stop"),
        ("a < b  ", "a < b  ", "", 0, "stop"),
        ("<think", "<think", "", 0, "stop"),
    ],
)
def test_streamed_and_whole_replies_are_equal(
    client: openai.OpenAI,
    engine: TextEngine,
    text: str,
    content: str,
    reasoning: str,
    num_calls: int,
    reason: str,
) -> None:
    engine.texts = [text]
    choice = client.chat.completions.create(model=MODEL, messages=HELLO, tools=[LS]).choices[0]
    whole_calls = [
        {"name": call.function.name, "arguments": call.function.arguments}
        for call in choice.message.tool_calls or []
        if call.type == "function"
    ]
    assert [json.loads(call["arguments"]) for call in whole_calls] == [{"path": "/é"}] * num_calls
    assert (
        choice.message.content or "",
        getattr(choice.message, "reasoning_content", ""),
        choice.finish_reason,
    ) == (
        content,
        reasoning,
        reason,
    )
    assert streamed(client, tools=[LS]) == (content, reasoning, whole_calls, reason)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("ls", r'{"path": "\ud800/\ud83d\ude00"}', {"name": "ls", "arguments": '{"path": "?/😀"}'}),
        ("ls", r'"\ud800"', {"name": "ls", "arguments": "?"}),
        (r"ls\ud800", "{}", {"name": "ls?", "arguments": "{}"}),
    ],
)
def test_an_unpaired_surrogate_of_a_call_is_replaced(
    client: openai.OpenAI, engine: TextEngine, name: str, arguments: str, expected: dict[str, str]
) -> None:
    engine.texts = [f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>']
    message = client.chat.completions.create(model=MODEL, messages=HELLO, tools=[LS]).choices[0].message
    functions = [call.function for call in message.tool_calls or [] if call.type == "function"]
    assert [function.model_dump() for function in functions] == [expected]
    assert streamed(client, tools=[LS])[2] == [expected]


def test_a_call_with_too_deeply_nested_arguments_is_content() -> None:
    nested = "[" * 100_000 + "]" * 100_000
    text = f'<tool_call>{{"name": "ls", "arguments": {nested}}}</tool_call>'
    parser = AnswerParser(call_syntax=CallSyntax())
    assert [*parser.add(text), *parser.flush()] == [Content(text=text)]


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('{"name": "ls", "parameters": {"path": "/é"}}', "", ['{"path": "/é"}']),
        ('<|python_tag|>{"name": "ls", "parameters": {}}\n', "", ["{}"]),
        ('{"name": "ls"}; {"name": "ls"}', '{"name": "ls"}; {"name": "ls"}', []),
        ('{"path": "/"}', '{"path": "/"}', []),
        ('{"name": "ls", "param', '{"name": "ls", "param', []),
        ('I call {"name": "ls", "parameters": {}}', 'I call {"name": "ls", "parameters": {}}', []),
    ],
)
def test_an_answer_that_is_a_call_of_llama_is_parsed(
    tmp_path: Path, context: AppState, engine: TextEngine, text: str, content: str, arguments: list[str]
) -> None:
    template = (CHAT_TEMPLATES / "llama3_1.jinja").read_text()
    engine.info = replace(engine.info, max_context_length=1000)
    engine.texts = [text]
    reason = "tool_calls" if arguments else "stop"
    calls = [{"name": "ls", "arguments": argument} for argument in arguments]
    with (
        serving(StartupState(state=with_template(context, tmp_path / "llama", template))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        choice = client.chat.completions.create(model=MODEL, messages=HELLO, tools=[LS]).choices[0]
        assert [
            call.function.model_dump() for call in choice.message.tool_calls or [] if call.type == "function"
        ] == calls
        assert (choice.message.content or "", choice.finish_reason) == (content, reason)
        assert streamed(client, tools=[LS]) == (content, "", calls, reason)


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ("", "{}"),
        ("<parameter=path>\n12\n</parameter>\n", '{"path": "12"}'),
        ("<parameter=path>\na\n\nb\n</parameter>\n", '{"path": "a\\n\\nb"}'),
        (
            "<parameter=depth>\n12\n</parameter>\n<parameter=all>True</parameter>",
            '{"depth": 12, "all": true}',
        ),
        ("<parameter=path>\na\n", None),
        ("path", None),
    ],
)
def test_a_call_of_qwen3_coder_is_parsed(
    client: openai.OpenAI, engine: TextEngine, parameters: str, arguments: str | None
) -> None:
    text = f"<tool_call>\n<function=ls>\n{parameters}</function>\n</tool_call>"
    engine.texts = [text]
    expected = ("", [{"name": "ls", "arguments": arguments}]) if arguments is not None else (text, [])
    content, _, calls, _ = streamed(client, tools=[LS])
    assert (content, calls) == expected


def test_tools_and_past_calls_reach_the_chat_template(client: openai.OpenAI, engine: TextEngine) -> None:
    past: ChatCompletionMessageFunctionToolCallParam = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "ls", "arguments": '{"path": "/"}'},
    }
    messages: list[ChatCompletionMessageParam] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages, tools=[LS])
    expected = '<tools>ls;</tools><user>Hello<|im_end|><assistant>[ls {"path": "/"}]<|im_end|>'
    expected += "<tool>a<|im_end|><assistant>"
    assert engine.prompt_text() == expected
    client.chat.completions.create(model=MODEL, messages=HELLO, tools=[LS], tool_choice="none")
    assert engine.prompt_text() == "<user>Hello<|im_end|><assistant>"


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ("", "{}"),
        ('{"inode": 36893488147419103233}', '{"inode": 36893488147419103233}'),
        ('{"path": ', '"{\\"path\\": "'),
    ],
)
def test_the_arguments_of_a_past_call_keep_their_value(
    client: openai.OpenAI, engine: TextEngine, arguments: str, rendered: str
) -> None:
    past: ChatCompletionMessageFunctionToolCallParam = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "ls", "arguments": arguments},
    }
    client.chat.completions.create(
        model=MODEL, messages=[*HELLO, {"role": "assistant", "tool_calls": [past]}]
    )
    assert f"[ls {rendered}]" in engine.prompt_text()


def test_enable_thinking_reaches_the_template(client: openai.OpenAI, engine: TextEngine) -> None:
    client.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert engine.prompt_text().endswith("<assistant><no>")


def test_a_stop_string_is_not_part_of_the_text(client: openai.OpenAI, engine: TextEngine) -> None:
    engine.texts = ["one STO two STOP three"]
    whole = client.completions.create(model=MODEL, prompt="x", stop=["STOP", "never"]).choices[0]
    assert (whole.text, whole.finish_reason) == ("one STO two ", "stop")
    chunks = list(client.completions.create(model=MODEL, prompt="x", stop="STOP", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one STO two "
    assert len(chunks) > 3


def test_the_finish_reason_at_max_tokens_is_length(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Gr", "length")


def test_every_sampled_token_has_a_logprob(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, max_tokens=2).choices[0]
    assert chat.logprobs is not None and chat.logprobs.content is not None
    assert [(token.token, token.logprob) for token in chat.logprobs.content] == [("G", -0.5), ("r", -0.5)]
    text = client.completions.create(model=MODEL, prompt="x", logprobs=0, max_tokens=2).choices[0]
    assert text.logprobs is not None
    assert (text.logprobs.tokens, text.logprobs.token_logprobs, text.logprobs.text_offset) == (
        ["G", "r"],
        [-0.5, -0.5],
        [0, 1],
    )
    chunks = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, stream=True)
    counts = [len(chunk.choices[0].logprobs.content or []) for chunk in chunks if chunk.choices[0].logprobs]
    assert sum(counts) == len("Grüße, 世界!".encode()) + 1 and len(counts) > 3


def test_return_token_ids_adds_the_exact_token_ids(client: openai.OpenAI, engine: TextEngine) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body={"return_token_ids": True}
    ).model_dump()
    assert reply["prompt_token_ids"] == engine.received[-1].prompt.tolist()
    assert reply["choices"][0]["token_ids"][-1] == END


@pytest.mark.parametrize("stream", [False, True])
def test_each_text_choice_has_the_ids_of_its_prompt(client: openai.OpenAI, stream: bool) -> None:
    url, prompt = f"{client.base_url}completions", [5, 6, 7]
    fields = {"model": MODEL, "prompt": prompt, "n": 2, "max_tokens": 4, "return_token_ids": True}
    reply = httpx.post(url, json=fields | {"stream": stream}, timeout=60)
    bodies = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    choices = [choice for body in bodies if body != "[DONE]" for choice in json.loads(body)["choices"]]
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [prompt] * 2


def test_the_first_chunk_of_a_chat_has_the_prompt_ids(client: openai.OpenAI, engine: TextEngine) -> None:
    fields = {"model": MODEL, "messages": HELLO, "stream": True, "return_token_ids": True}
    reply = httpx.post(f"{client.base_url}chat/completions", json=fields, timeout=60)
    first = json.loads(reply.text.splitlines()[0].removeprefix("data: "))
    assert first["prompt_token_ids"] == engine.received[-1].prompt.tolist()


@pytest.mark.parametrize("invalid", [b"\xe4", b"\xb8", b"\xf0\x9f\x98", b"\xf0\x9f\x98\x80\xc3"])
def test_decoding_invalid_utf8_takes_linear_time(invalid: bytes) -> None:
    num_decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return bytes(ids).decode(errors="replace")

    text = b"a" + invalid * 500 + "世".encode()
    pieces = TextPieces(decode)
    parts = [pieces.add([byte]) for byte in text]
    assert "".join(parts) == text.decode(errors="replace")
    assert num_decoded < 200 * len(text)


def test_a_large_reply_does_not_block_the_event_loop(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_made, is_answered = threading.Event(), threading.Event()
    whole = ChatFormat.whole

    def wait_for_health(self: ChatFormat, pieces: Sequence[ParsedDelta]) -> dict[str, object]:
        is_made.set()
        assert is_answered.wait(10), "the event loop answers no other request"
        return whole(self, pieces)

    monkeypatch.setattr(ChatFormat, "whole", wait_for_health)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(client.chat.completions.create, model=MODEL, messages=HELLO)
        assert is_made.wait(60)
        httpx.get(str(client.base_url.join("/api/v1/healthz")), timeout=60).raise_for_status()
        is_answered.set()
        assert reply.result().choices[0].finish_reason == "stop"


def test_several_prompts_may_be_text_or_tokens(client: openai.OpenAI, engine: TextEngine) -> None:
    assert [
        choice.index
        for choice in client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=3).choices
    ] == [0, 1, 2, 3]
    for prompt, expected in (([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])):
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=3)
        received = engine.received[-len(expected) :]
        assert sorted(request.prompt.tolist() for request in received) == expected


def test_a_stream_sends_tokens_during_sampling(client: openai.OpenAI, engine: TextEngine) -> None:
    engine.gate.clear()
    stream = client.completions.create(
        model=MODEL, prompt="x", stream=True, stream_options={"include_usage": True}
    )
    # The server holds back the first byte of ü, and the engine waits for the gate.
    assert next(stream).choices[0].text == "Gr"
    engine.gate.set()
    rest = list(stream)
    assert (
        rest[-1].choices == []
        and rest[-1].usage is not None
        and rest[-1].usage.completion_tokens == len("Grüße, 世界!".encode()) + 1
    )
    assert "".join(chunk.choices[0].text for chunk in rest[:-1]) == "üße, 世界!"


def test_a_stream_has_chunks_while_a_call_is_written(client: openai.OpenAI, engine: TextEngine) -> None:
    engine.texts = [f'<tool_call>{{"name": "ls", "arguments": {{"path": "{"x" * 60}"}}}}</tool_call>']
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, tools=[LS], stream=True))
    num_blocks = len(engine.texts[0]) // 3
    assert len(chunks) > num_blocks


def test_closing_a_stream_withdraws_the_request(client: openai.OpenAI, engine: TextEngine) -> None:
    engine.texts = ["x" * 300]
    engine.gate.clear()
    stream = client.completions.create(model=MODEL, prompt="x", stream=True)
    next(stream)
    stream.close()
    # After this reply the server has noticed the closed connection.
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    engine.gate.set()
    assert engine.withdrawn.wait(60)


def test_a_client_timeout_withdraws_the_request(client: openai.OpenAI, engine: TextEngine) -> None:
    engine.texts = ["x" * 300]
    engine.gate.clear()
    while not engine.received:  # a client may time out before the server has read its request
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(model=MODEL, prompt="x", timeout=0.3)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    engine.gate.set()
    assert engine.withdrawn.wait(60)


def test_a_client_timeout_withdraws_a_waiting_stream(
    client: openai.OpenAI, engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Future[SampleResult]()

    def submit(op: Sample, watcher: Watcher) -> Future[SampleResult]:
        engine.received.append(op)
        return waiting

    monkeypatch.setattr(engine, "submit", submit)
    withdrawn = threading.Event()
    waiting.add_done_callback(lambda _: withdrawn.set())
    while not engine.received:  # a client may time out before the server has read its request
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(model=MODEL, prompt="x", stream=True, timeout=0.3)
    assert withdrawn.wait(10) and waiting.cancelled()


def test_models_are_the_base_model_samplers_and_checkpoints(
    client: openai.OpenAI, context: AppState, engine: TextEngine
) -> None:
    for kind in ("weights", "sampler_weights"):
        arrays, lora = {"x": np.zeros(1, np.float32)}, LoraSpec(rank=2)
        context.checkpoints.write(f"tinker://run/{kind}/last", arrays, lora=lora, step=1, user_metadata={})
    session = context.registry.open_session(tags=[], user_metadata={}, display_name=None).session_id
    context.registry.add_sampler(
        session, f"{session}:sample:0", model_path=None, weights=f"{session}:sample:0"
    )
    saved = "tinker://run/sampler_weights/last"
    assert [model.id for model in client.models.list()] == [MODEL, f"{session}:sample:0", saved]
    assert client.models.retrieve(MODEL).id == MODEL
    for name, weights in ((MODEL, None), (f"{session}:sample:0", f"{session}:sample:0"), (saved, saved)):
        assert client.models.retrieve(name).id == name
        assert (
            client.chat.completions.create(model=name, messages=HELLO).choices[0].message.content
            == "Grüße, 世界!"
        )
        assert engine.received[-1].weights == weights
    with pytest.raises(openai.BadRequestError, match="is not a sampler checkpoint"):
        client.chat.completions.create(model="tinker://run/weights/last", messages=HELLO)
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'") as error:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format: only"),
        ({"tools": [LS], "tool_choice": "required"}, "tool_choice must be 'auto' or 'none'"),
        ({"tools": [LS], "parallel_tool_calls": False}, "parallel_tool_calls=false"),
        ({"tools": [LS, {"type": "function", "function": {}}]}, "tools[1].function: name is missing"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]},
            "tools[0].function: parameters must be an object",
        ),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"extra_body": {"guided_regex": "a+"}}, "unknown field guided_regex"),
        ({"extra_body": {"chat_template_kwargs": {"shout": True}}}, "'shout' is not an option"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": False}}}, "'thinking' is not an option"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "differ; send one"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"n": 0}, "n=0 must lie between 1"),
        ({"temperature": -1}, "temperature=-1.0 must not be negative"),
        ({"temperature": 1e-9}, "temperature=1e-09 must be 0 (greedy) or at least 1e-06"),
        ({"stop": [""]}, "stop must be a non-empty string"),
        ({"stop": ["a"] * 65}, "stop: at most 64 strings"),
        ({"extra_body": {"stop_token_ids": [0] * 17}}, "17 stop tokens: at most 16"),
        ({"reasoning_effort": "low"}, "use chat_template_kwargs"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "role 'critic'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "text only",
        ),
        ({"messages": []}, "messages is missing"),
    ],
)
def test_unsupported_parameters_have_openais_error_shape(
    client: openai.OpenAI, options: dict[str, object], message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**({"model": MODEL, "messages": HELLO} | options))  # type: ignore[call-overload]
    assert error.value.type == "invalid_request_error" and message in error.value.message


@pytest.mark.parametrize("best_of", [0, 3])
def test_best_of_must_equal_the_number_of_samples(client: openai.OpenAI, best_of: int) -> None:
    client.completions.create(model=MODEL, prompt="x", n=2, best_of=2)
    with pytest.raises(openai.BadRequestError, match="best_of other than n is not supported"):
        client.completions.create(model=MODEL, prompt="x", n=2, best_of=best_of)


def test_a_prompt_over_the_context_has_its_own_error_code(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match="This model's maximum context length is 400 tokens"
    ) as error:
        client.completions.create(model=MODEL, prompt="x" * 399, max_tokens=2)
    assert error.value.code == "context_length_exceeded"


def test_a_token_outside_the_models_vocabulary_is_refused(client: openai.OpenAI, engine: TextEngine) -> None:
    engine.info = replace(engine.info, vocab_size=END)
    with pytest.raises(
        openai.BadRequestError, match=f"prompt: token {END} is outside this model's vocabulary of {END}"
    ):
        client.chat.completions.create(model=MODEL, messages=HELLO)


def test_parameters_without_effect_are_accepted(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        user="me",
        metadata={"a": "b"},
        presence_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        extra_body={"prompt_cache_options": {"mode": "implicit"}},
    )


def test_arguments_are_text_if_the_template_takes_text(
    tmp_path: Path, context: AppState, engine: TextEngine
) -> None:
    """The templates of DeepSeek concatenate the arguments with strings."""
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "{{ '[' + call.function.arguments + ']' }}{% endfor %}{% endfor %}"
    )
    call = {"id": "0", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/"}'}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    with serving(StartupState(state=with_template(context, tmp_path / "text", template))) as url:
        fields = {"model": MODEL, "messages": messages}
        reply = httpx.post(f"{url}/v1/chat/completions", json=fields, timeout=60)
    assert reply.status_code == 200, reply.text
    assert engine.prompt_text() == '[{"path": "/"}]'


def test_tools_are_refused_if_the_template_ignores_them(tmp_path: Path, context: AppState) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    plain = with_template(context, tmp_path / "plain", template)
    with serving(StartupState(state=plain)) as url:
        reply = httpx.post(
            f"{url}/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "tools": [LS]}
        )
    assert reply.status_code == 400 and "does not use them" in reply.json()["error"]["message"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # caused by LiteLLM's types
def test_litellm_sends_its_own_answer_back_in_a_second_turn(
    client: openai.OpenAI, engine: TextEngine
) -> None:
    """LiteLLM adds provider_specific_fields and other fields to every assistant message."""
    engine.texts = [f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"]

    def turn(messages: list[object]) -> Any:
        """Return the message of the reply.

        The tools are in `extra_body`, because LiteLLM's handling of tools imports a package that is not
        installed.
        """
        options = {
            "model": f"openai/{MODEL}",
            "api_base": str(client.base_url),
            "api_key": "none",
            "extra_body": {"tools": [LS]},
        }
        reply: Any = litellm.completion(messages=messages, **options)
        return reply.choices[0].message

    first = turn([*HELLO])
    assert first.tool_calls and first.reasoning_content
    engine.texts = ["Done."]
    messages = [
        *HELLO,
        first.model_dump(),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a b"},
    ]
    assert turn(messages).content == "Done."
    assert "I look." in engine.prompt_text() and "a b" in engine.prompt_text()
    unchanged = [*HELLO, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a b"}]
    assert turn(unchanged).content == "Done."


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("provider_specific_fields", {"refusal": None}),
        ("annotations", []),
        ("audio", None),
        ("images", []),
        ("refusal", None),
        ("function_call", None),
        ("thinking_blocks", None),
        ("thinking_blocks", []),
    ],
)
def test_ignored_fields_of_returned_messages_are_accepted(
    client: openai.OpenAI, field: str, value: object
) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "Yes.", field: value}, *HELLO]
    assert client.chat.completions.create(model=MODEL, messages=messages).choices


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"refusal": "I cannot."}, "put its text into content"),
        ({"audio": {"id": "a"}}, "audio"),
        ({"images": [{"image_url": "a"}]}, "images"),
        ({"function_call": {"name": "ls"}}, "use tool_calls"),
        ({"thinking_blocks": [{"thinking": "Hm."}]}, "send the text as reasoning_content"),
        ({"reasoning": "Hm.", "reasoning_content": "So."}, "differ"),
        ({"unheard_of": 1}, "unknown field unheard_of"),
    ],
)
def test_unsupported_fields_of_an_assistant_message_are_refused(
    client: openai.OpenAI, fields: dict[str, object], message: str
) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "Yes.", **fields}]
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model=MODEL, messages=messages)


def test_errors_outside_of_routes_have_openais_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has no POST /v1/embeddings"):
        client.embeddings.create(model=MODEL, input="text")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="text")
    reply = httpx.post(f"{client.base_url}chat/completions", content=b"{}")
    assert reply.status_code == 415 and reply.json()["error"]["type"] == "invalid_request_error"
