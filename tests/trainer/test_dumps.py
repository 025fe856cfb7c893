import json
import logging
from dataclasses import replace

import pytest

from src.core.errors import ConfigError
from src.core.trajectory import TrajectoryGroup
from src.records.dumps import check_export_path, conversation, dump, dump_evaluation, dump_examples
from tests.fakes.trials import failure, task, trajectory, turn

TURNS = [turn([9, 1], [2, 9]), turn([9, 1, 2, 9, 3], [4, 9])]


def decode(token_ids, clean):
    return " ".join(str(token) for token in token_ids if not (clean and token == 9))


def group(name, *, messages=(), failures=()):
    member = trajectory(name, 1.0, TURNS)
    member.conversation.extend(messages)
    return TrajectoryGroup(task=task(name), trajectories=[member], failures=list(failures))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.seed_behaviour(29, 32, 60)
def test_an_evaluation_dump_has_a_file_per_type(tmp_path):
    messages = [{"role": "user", "content": "größer?"}, {"role": "assistant", "content": "ja"}]
    groups = [group("copy-01", messages=messages), group("move-01")]
    dump_evaluation(tmp_path, 20, groups, {"test/pass_at_1": 1.0}, decode, env_class="harbor")
    directory = tmp_path / "dumped_evals" / "global_step_20_evals"
    assert sorted(path.name for path in directory.iterdir()) == [
        "aggregated_results.jsonl",
        "copy.jsonl",
        "move.jsonl",
    ]
    [record] = lines(directory / "copy.jsonl")
    fields = (
        "input_prompt",
        "output_response",
        "score",
        "stop_reason",
        "env_class",
        "env_extras",
        "data_source",
    )
    assert set(record) == {*fields, "conversation", "conversation_history", "timestamp", "domain", "turns"}
    assert (record["env_class"], record["data_source"]) == ("harbor", "copy")
    # The text includes special tokens.
    assert (record["input_prompt"], record["output_response"]) == ("9 1", "2 9 3 4 9")
    assert record["conversation"] == messages and record["turns"] == 2 and record["score"] == [1.0]
    assert "größer" in (directory / "copy.jsonl").read_text()
    assert lines(directory / "aggregated_results.jsonl") == [{"test/pass_at_1": 1.0}]


def test_domains_with_similar_names_lose_no_trial(tmp_path):
    groups = [
        replace(group(name), task=replace(task(name), domain=domain))
        for name, domain in (("a", "数学"), ("b", "语文"), ("c", "a b"), ("d", "a_b"))
    ]
    dump_evaluation(tmp_path, 0, groups, {}, decode, env_class="data")
    directory = tmp_path / "dumped_evals" / "global_step_0_evals"
    assert [record["data_source"] for record in lines(directory / "a_b.jsonl")] == ["a b", "a_b"]
    assert sorted(path.stem for path in directory.iterdir()) == ["a_b", "aggregated_results", "数学", "语文"]


def test_a_message_that_utf_8_cannot_encode_is_dumped(tmp_path):
    messages = [{"role": "assistant", "content": "a\ud83db"}]
    dump_evaluation(tmp_path, 1, [group("copy-01", messages=messages)], {}, decode, env_class="harbor")
    [record] = lines(tmp_path / "dumped_evals" / "global_step_1_evals" / "copy.jsonl")
    assert record["conversation"] == [{"role": "assistant", "content": "a?b"}]


@pytest.mark.seed_behaviour(30, 31, 60)
def test_examples_of_steps_1_11_and_21_lack_special_tokens(tmp_path):
    groups = [group(f"copy-{number:02d}") for number in range(12)]
    for step in range(1, 22):
        dump_examples(tmp_path, step, groups, decode)
    files = sorted(path.name for path in (tmp_path / "training_examples").iterdir())
    assert files == ["step_11_examples.jsonl", "step_1_examples.jsonl", "step_21_examples.jsonl"]
    records = lines(tmp_path / "training_examples" / "step_11_examples.jsonl")
    assert [record["uid"] for record in records] == [f"copy-{number:02d}" for number in range(10)]
    fields = (
        "global_step",
        "uid",
        "conversation",
        "conversation_history",
        "env_extras",
        "input_prompt",
        "output_response",
        "reward",
        "stop_reason",
        "timestamp",
    )
    assert set(records[0]) == set(fields)
    assert (records[0]["input_prompt"], records[0]["output_response"]) == ("1", "2 3 4")


@pytest.mark.seed_behaviour(147)
def test_lines_of_one_task_are_grouped_by_task_key(tmp_path):
    members = [
        replace(trajectory("copy-01", 1.0, TURNS), trial_name=f"t{n}", member=n, seed=7 + n) for n in (0, 1)
    ]
    evaluated = TrajectoryGroup(task=task("copy-01"), trajectories=members)
    dump_evaluation(tmp_path, 0, [evaluated], {}, decode, env_class="harbor")
    dump_examples(tmp_path, 1, [evaluated], decode)
    dumped = lines(tmp_path / "dumped_evals" / "global_step_0_evals" / "copy.jsonl")
    examples = lines(tmp_path / "training_examples" / "step_1_examples.jsonl")
    names = ("task_key", "data_source", "trial", "member", "seed")
    assert [[record["env_extras"][name] for name in names] for record in dumped] == [
        ["copy-01", "copy", "t0", 0, 7],
        ["copy-01", "copy", "t1", 1, 8],
    ]
    assert [record["env_extras"] for record in examples] == [dumped[0]["env_extras"]]


@pytest.mark.seed_behaviour(29)
def test_dumped_tool_calls_are_json_objects():
    messages = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": '<tool_call>{"name": "f", "arguments": {}}</tool_call>'},
        {"role": "tool", "content": "here"},
    ]
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    fields = {1: {"content": "", "tool_calls": calls}, 2: {"name": "f", "tool_call_id": "call_1"}}
    result = replace(trajectory(turns=TURNS), conversation=messages, tool_fields=fields)
    assert conversation(result, decode) == [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "here", "name": "f", "tool_call_id": "call_1"},
    ]


@pytest.mark.seed_behaviour(32)
def test_tasks_without_a_graded_trial_give_no_example(tmp_path):
    lost = TrajectoryGroup(task=task("lost"), trajectories=[], failures=[failure()])
    dump_examples(tmp_path, 1, [lost], decode)
    assert not (tmp_path / "training_examples").exists()


@pytest.mark.seed_behaviour(58)
def test_a_missing_conversation_is_decoded_from_the_tokens():
    assert conversation(trajectory(turns=TURNS), decode) == [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2 3 4"},
    ]
    malformed = trajectory(turns=TURNS)
    malformed.conversation.append({"content": "no role"})
    assert conversation(malformed, decode)[0] == {"role": "user", "content": "1"}
    assert conversation(trajectory(turns=[]), decode) == []


@pytest.mark.seed_behaviour(59)
def test_conversations_have_no_sampled_special_tokens():
    messages = [
        {"role": "assistant", "content": "Hi<|im_end|><|im_start|> there"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "f<｜tool▁sep｜>{}<｜end▁of▁sentence｜>"},
    ]
    result = trajectory(turns=TURNS)
    result.conversation.extend(messages)
    assert conversation(result, decode) == [
        {"role": "assistant", "content": "Hi there"},
        messages[1],
        {"role": "assistant", "content": "f<｜tool▁sep｜>{}"},
    ]


def test_an_export_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    check_export_path(str(tmp_path / "new" / "directory"))
    with pytest.raises(ConfigError, match=r"^export_path=.*file cannot be written: .*; give another"):
        check_export_path(str(tmp_path / "file"))


@pytest.mark.seed_behaviour(33)
async def test_a_dump_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    path, shown = tmp_path / "file", []
    path.write_text("")
    writes = (
        lambda: dump_examples(path, 1, [group("a")], decode),
        lambda: dump_evaluation(path, 1, [group("a")], {}, decode, env_class="harbor"),
    )
    for write in writes:
        await dump(write, upload_to=None, say=shown.append)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == shown
    assert len(shown) == 2
    for line in shown:
        assert line.startswith(f"the dump failed: cannot write {path}")
        assert line.endswith("the run continues without this file")
