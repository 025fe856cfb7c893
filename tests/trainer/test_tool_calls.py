"""Tests the strategies of the parser of tool calls, their order, and texts that are no calls."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace

import pytest

from src.core.log_setup import set_log_levels
from src.core.trajectory import Trajectory
from src.envs.service.call_forms import text_parameters
from src.envs.service.tool_calls import ParsedAnswer, Strategy, ToolCall, parse
from src.learning.rollout_groups import parse_metrics
from src.policy.tool_messages import describe_tool
from tests.fakes.trials import trajectory, turn

TOOLS = {"get_order", "cancel", "list_orders"}
ORDER = ToolCall(name="get_order", arguments={"id": "#1"})
ARGUMENTS = '{"id": "#1"}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
FUNCTION = "<function=get_order>\n<parameter=id>\n#1\n</parameter>\n</function>"
JSON = '{"name": "get_order", "arguments": {"id": "#1"}}'


@pytest.mark.parametrize(
    ("answer", "strategy"),
    [
        (JSON, Strategy.WHOLE),
        (f"[{JSON}]", Strategy.WHOLE),
        (f"<tool_call>\n{JSON}\n</tool_call><|im_end|>", Strategy.TAGGED),
        (f"<tool_call>{JSON}", Strategy.TAGGED),  # the closing tag was cut off
        # The arguments are a string.
        (
            '<tool_call>{"name": "get_order", "arguments": "{\\"id\\": \\"#1\\"}"}</tool_call>',
            Strategy.TAGGED,
        ),
        ('<tool_call>{"name": "get_order", "parameters": {"id": "#1"}}</tool_call>', Strategy.TAGGED),
        (f"```json\n{JSON}\n```", Strategy.FENCED),
        (f"Let me look: {JSON}", Strategy.EMBEDDED),
        ('Thought: look it up\nAction: get_order\nAction Input: {"id": "#1"}', Strategy.REACT),
        ('I look it up.\nget_order(id="#1")', Strategy.CODE),
        (DEEPSEEK.format("get_order<｜tool▁sep｜>" + ARGUMENTS), Strategy.DEEPSEEK),  # V3.1
        (DEEPSEEK.format(f"function<｜tool▁sep｜>get_order\n```json\n{ARGUMENTS}\n```"), Strategy.DEEPSEEK),
        # The text is cut after the object.
        ("<｜tool▁call▁begin｜>get_order<｜tool▁sep｜>" + ARGUMENTS, Strategy.DEEPSEEK),
        (f"<function=get_order>{ARGUMENTS}</function>", Strategy.FUNCTION),  # Llama 3.1
        (f"<tool_call>\n{FUNCTION}\n</tool_call>", Strategy.FUNCTION),  # Qwen3-Coder, Qwen3.5
        (FUNCTION, Strategy.FUNCTION),
    ],
)
@pytest.mark.seed_behaviour(12)
def test_every_form_of_a_call_is_parsed(answer, strategy):
    parsed = parse(answer, TOOLS)
    assert (list(parsed.calls), parsed.strategy, parsed.problem, parsed.num_repaired) == (
        [ORDER],
        strategy,
        "",
        0,
    )
    assert parsed.counts == {"parse_attempts": 1, "parse_failures": 0, "parse_recovered": 0}


def test_a_bare_name_is_a_call_without_arguments():
    assert parse("list_orders", TOOLS) == ParsedAnswer(
        calls=[ToolCall(name="list_orders", arguments={})], strategy=Strategy.BARE_NAME
    )


@pytest.mark.parametrize(
    ("answer", "strategy"),
    [
        # WHOLE precedes TAGGED.
        ('{"name": "cancel", "arguments": {"note": "<tool_call>{}</tool_call>"}}', Strategy.WHOLE),
        # TAGGED precedes FENCED.
        (
            f'<tool_call>{{"name": "cancel", "arguments": {{}}}}</tool_call>\n```json\n{JSON}\n```',
            Strategy.TAGGED,
        ),
        # FENCED precedes EMBEDDED.
        (f'{JSON}\n```json\n{{"name": "cancel", "arguments": {{}}}}\n```', Strategy.FENCED),
        # EMBEDDED precedes REACT.
        ('Action: get_order\nAction Input: {"name": "cancel", "arguments": {}}', Strategy.EMBEDDED),
        # REACT precedes CODE. Text follows the JSON of the action input, so nothing is called.
        ('Action: cancel\nAction Input: {}\nget_order(id="#1")', Strategy.REACT),
    ],
)
@pytest.mark.seed_behaviour(12)
def test_the_first_strategy_that_finds_a_call_decides(answer, strategy):
    parsed = parse(answer, TOOLS)
    assert parsed.strategy == strategy
    assert [call.name for call in parsed.calls] == ([] if strategy == Strategy.REACT else ["cancel"])


def test_several_calls_in_the_forms_of_deepseek_and_qwen():
    second = "<｜tool▁call▁begin｜>cancel<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    deepseek = parse("One moment." + DEEPSEEK.format("get_order<｜tool▁sep｜>" + ARGUMENTS) + second, TOOLS)
    tags = f"<tool_call>\n{FUNCTION}\n</tool_call>\n<tool_call>\n<function=cancel>\n</function>\n</tool_call>"
    qwen = parse("One moment.\n" + tags, TOOLS)
    for parsed in (deepseek, qwen):
        assert list(parsed.calls) == [ORDER, ToolCall(name="cancel", arguments={})]
        assert (parsed.content, parsed.problem) == ("One moment.", "")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("12", 12),
        ("\n[1, 2]\n", [1, 2]),
        ("true", True),
        ("True", True),
        ("a\nb < c", "a\nb < c"),
        ('"12"', "12"),
        ("", ""),
    ],
)
def test_a_parameter_is_json_or_text(written, value):
    parsed = parse(f"<function=f><parameter=id>{written}</parameter></function>", {"f"})
    assert parsed.calls[0].arguments == {"id": value}


def test_a_parameter_whose_schema_is_text_stays_text():
    types = {"id": {"type": "string"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    both = {"type": ["string", "integer"]}
    properties = {**types, "n": {"type": "integer"}, "any": {}, "true": True, "both": both}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    values = "".join(f"<parameter={name}>7</parameter>" for name in properties)
    parsed = parse(f"<function=f>{values}</function>", {"f"}, text_parameters=text_parameters([tool]))
    assert parsed.calls[0].arguments == {"id": "7", "note": "7", "n": 7, "any": 7, "true": 7, "both": 7}


@pytest.mark.parametrize(
    ("parameters", "description"),
    [
        (None, "f(): "),
        ({"properties": None}, "f(): "),
        ({"properties": {"a": True, "b": {}}}, "f(a: any, b: any): "),
    ],
)
def test_a_tool_can_have_unusual_parameters(parameters: object, description: str):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert describe_tool(tool) == description and text_parameters([tool]) == {"f": set()}


@pytest.mark.parametrize("cut", range(1, len(FUNCTION) - 1))
def test_no_cut_function_call_is_executed(cut):
    assert not parse(FUNCTION[:-cut], TOOLS).calls


@pytest.mark.parametrize(
    "body",
    [
        "get_order",
        "get_order<｜tool▁sep｜>",
        'get_order<｜tool▁sep｜>{"id": "#',
        "function<｜tool▁sep｜>get_order",
        "function<｜tool▁sep｜>get_order\n```json\n",
        "<｜tool▁sep｜>{}",
    ],
)
def test_a_cut_deepseek_call_is_a_failure(body):
    parsed = parse("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + body, TOOLS)
    assert parsed.strategy == Strategy.DEEPSEEK and not parsed.calls and parsed.problem


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize(
    "form", ["{}", "<tool_call>{}", "<tool_call>{}</tool_call>", "```json\n{}\n```", "Well: {}"]
)
@pytest.mark.seed_behaviour(10)
def test_missing_last_braces_are_added_and_counted(form, missing):
    parsed = parse(form.replace("{}", JSON[:-missing]), TOOLS)
    assert list(parsed.calls) == [ORDER]
    assert parsed.counts == {"parse_attempts": 1, "parse_failures": 0, "parse_recovered": 1}


@pytest.mark.parametrize(
    ("answer", "calls", "num_repaired"),
    [
        (f"[{JSON[:-1]}", [ORDER], 1),  # one bracket of each kind
        (f"<tool_call>{JSON[:-1]}</tool_call><tool_call>{JSON[:-2]}", [ORDER, ORDER], 2),
        ('{"name": "get_order", "arguments": "{\\"id\\": \\"#1\\""}', [ORDER], 1),  # arguments as a string
        (
            '{"name": "get_order", "arguments": {"id": "C:\\\\"',
            [ToolCall(name="get_order", arguments={"id": "C:\\"})],
            1,
        ),
        (
            '{"name": "get_order", "arguments": {"a": {"b": "c"',
            [ToolCall(name="get_order", arguments={"a": {"b": "c"}})],
            1,
        ),
        # Four missing braces are too many.
        ('{"name": "get_order", "arguments": {"a": {"b": {"c": "d"', [], 0),
    ],
)
def test_missing_brackets_are_added_and_counted(answer, calls, num_repaired):
    parsed = parse(answer, TOOLS)
    assert list(parsed.calls) == calls
    assert parsed.counts == {
        "parse_attempts": 1,
        "parse_failures": float(not calls),
        "parse_recovered": num_repaired,
    }


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "get_order", "arguments": {"id": "#1",}}',
        '{"name": "get_order", "arguments": {}} 5',
        "{'name': 'get_order'}",
        "",
    ],
)
def test_invalid_json_without_open_brackets_has_its_json_error(text):
    with pytest.raises(json.JSONDecodeError) as error:
        json.loads(text)
    parsed = parse(f"<tool_call>{text}</tool_call>", TOOLS)
    assert not parsed.calls and parsed.problem == f"no JSON: {error.value}"


def test_an_object_with_only_a_name_is_a_call_of_a_known_tool():
    assert list(parse('{"name": "list_orders"}', TOOLS).calls) == [ToolCall(name="list_orders", arguments={})]
    assert parse('{"name": "Ann"}', TOOLS).strategy is None


@pytest.mark.parametrize("cut", range(1, len(JSON) - 2))
@pytest.mark.parametrize("form", ["{}", "<tool_call>{}", "```json\n{}", "Well: {}"])
@pytest.mark.seed_behaviour(10)
def test_no_other_cut_call_is_executed(form, cut):
    """An answer that is cut within the arguments calls nothing, or calls the tool without any argument."""
    parsed = parse(form.replace("{}", JSON[:cut]), TOOLS)
    assert list(parsed.calls) in ([], [ToolCall(name="get_order", arguments={})])


@pytest.mark.parametrize(
    "text", ['{"name": "cancel", "arguments": {"id": "#1', '{"name": "cancel", "arguments": {"id": 12']
)
@pytest.mark.seed_behaviour(10)
def test_a_value_that_was_cut_is_a_failure(text):
    parsed = parse(f"<tool_call>{text}", TOOLS)
    assert not parsed.calls and "it ends inside a" in parsed.problem
    assert parsed.counts == {"parse_attempts": 1, "parse_failures": 1, "parse_recovered": 0}


@pytest.mark.parametrize("arguments", ["[1]", "3", "null", '"[1]"'])
def test_arguments_that_are_not_an_object_are_a_parse_failure(arguments):
    parsed = parse(f'<tool_call>{{"name": "cancel", "arguments": {arguments}}}</tool_call>', TOOLS)
    assert list(parsed.calls) == [ToolCall(name="cancel", arguments={})]
    assert parsed.counts["parse_failures"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "Your order is on its way.",
        'The record says {"status": "pending"}.',
        '{"name": "Bob", "city": "Rome"}',
        "```python\nprint(1)\n```",
        "cancel the order (id=1)?",
        "unknown(id=1)",
        "",
        "  \n",
    ],
)
def test_any_other_answer_is_a_message_to_the_user(text):
    parsed = parse(text, TOOLS)
    assert parsed == ParsedAnswer(content=text.strip())
    assert parsed.counts["parse_attempts"] == 0


def test_text_next_to_a_call_is_kept():
    assert parse(f"One moment.\n<tool_call>{JSON}</tool_call>", TOOLS).content == "One moment."


@pytest.mark.parametrize("answer", ['{"name": ["get_order"]}', '```json\n[{"name": {"a": 1}}]\n```'])
def test_a_name_that_is_a_list_or_an_object_is_a_failure(answer: str) -> None:
    parsed = parse(answer, TOOLS)
    assert not parsed.calls and parsed.problem == "a call has no name"


def test_calls_keep_their_order_and_one_invalid_call_rejects_all():
    both = f'<tool_call>{JSON}</tool_call><tool_call>{{"name": "cancel", "arguments": {{}}}}</tool_call>'
    assert [call.name for call in parse(both, TOOLS).calls] == ["get_order", "cancel"]
    assert not parse(both.replace('"cancel", ', '"cancel" '), TOOLS).calls


def test_a_call_of_an_unknown_tool_is_returned():
    assert parse('<tool_call>{"name": "fly", "arguments": {}}</tool_call>', TOOLS).calls == [
        ToolCall(name="fly", arguments={})
    ]


@pytest.mark.parametrize(
    "answer",
    [
        "<think>who?</think>\n\nHello<|im_end|>",
        "<think>\n\n</think>\n\nHello",
        "who?</think>Hello",
        "Hello<think>and now",
        "<｜Assistant｜></think>Hello<｜end▁of▁sentence｜>",
        "Hello<｜tool▁calls▁end｜>",
    ],
)
def test_special_tokens_and_thoughts_are_not_shown(answer):
    assert parse(answer, TOOLS).content == "Hello"


def test_a_call_inside_a_thought_is_ignored():
    assert not parse(f"<think><tool_call>{JSON}</tool_call>", TOOLS).calls


@pytest.mark.parametrize(
    "text", ["get_order('#1')", "get_order(id=)", "get_order(id=other())", 'get_order(**{"id": 1})']
)
def test_code_is_parsed_and_never_executed(text):
    parsed = parse(text, TOOLS)
    assert parsed.strategy == Strategy.CODE and not parsed.calls and parsed.problem


@pytest.mark.seed_behaviour(11)
def test_debug_parser_logs_every_parse(monkeypatch, caplog):
    parsing = logging.getLogger("src.envs.service.tool_calls")
    monkeypatch.setattr(parsing, "level", parsing.level)
    monkeypatch.setenv("DEBUG_PARSER", "1")
    set_log_levels()
    parse(JSON, TOOLS)
    assert "strategy whole" in caplog.text and "get_order" in caplog.text


@pytest.mark.seed_behaviour(46)
def test_the_failure_rate_is_a_share_of_answers_with_calls():
    def counted(attempts: float, failures: float) -> Trajectory:
        metrics = {"parse_attempts": attempts, "parse_failures": failures, "parse_recovered": 1.0}
        return replace(trajectory(turns=[turn([1], [2])] * 5), metrics=metrics)

    assert parse_metrics([counted(2, 1), counted(1, 0)]) == {
        "reward/parse_failure_rate": 1 / 3,
        "parse/recovered": 2,
    }
    assert parse_metrics([counted(0, 0)])["reward/parse_failure_rate"] == 0
    assert parse_metrics([trajectory()]) == {}


@pytest.mark.parametrize(
    "answer",
    [
        'get_order(id="#1"), get_order(id="#2")',
        'get_order(id="#1") or cancel(id="#1")',
        "get_order(id={[]: 1})",
        "get_order(id={1, 2})",
        'get_order(id=b"#1")',
        f"get_order(id={'-' * 5000}1)",
        f'{{"name": "get_order", "arguments": {"[" * 5000}',
        f'Well: {{"name": "get_order", "arguments": {"[" * 5000}',
        f'{{"name": "get_order", "arguments": {{"id": {"9" * 5000}}}}}',
    ],
)
def test_text_that_breaks_json_or_python_is_an_unreadable_call(answer: str) -> None:
    parsed = parse(answer, TOOLS)
    assert parsed.problem and not parsed.calls and parsed.counts["parse_failures"] == 1


@pytest.mark.parametrize(
    "answer",
    ("a" + "\n" * 80_000 + "b", f"<function=f>{'<parameter=a>' * 6000}</function>"),
    ids=("lines", "tags"),
)
def test_a_repetitive_answer_is_parsed_in_linear_time(answer: str) -> None:
    started = time.process_time()
    parse(answer, {"f"})
    assert time.process_time() - started < 1


def nested_call(depth: int) -> str:
    return f'{{"name": "cancel", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}'


def test_arguments_of_any_accepted_depth_can_be_stored() -> None:
    """The files of a run contain the arguments inside other objects, with a limit on the depth."""
    accepted, refused = 1, 100_000
    while refused - accepted > 1:
        depth = (accepted + refused) // 2
        accepted, refused = (depth, refused) if parse(nested_call(depth), TOOLS).calls else (accepted, depth)
    stored: object = parse(nested_call(accepted), TOOLS).calls[0].arguments
    for _ in range(20):
        stored = {"a": stored}
    assert accepted > 100 and json.dumps(stored)
    assert parse(nested_call(refused), TOOLS).problem
