import json
import logging

from src.core.trajectory import TrajectoryGroup
from src.records.dumps import conversation, dump_evaluation, dump_examples
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


def test_an_evaluation_dump_has_a_file_per_family(tmp_path):
    said = [{"role": "user", "content": "größer?"}, {"role": "assistant", "content": "ja"}]
    dump_evaluation(
        tmp_path, 20, [group("copy-01", messages=said), group("move-01")], {"test/pass_at_1": 1.0}, decode
    )
    folder = tmp_path / "dumped_evals" / "global_step_20_evals"
    assert sorted(path.name for path in folder.iterdir()) == [
        "aggregated_results.jsonl",
        "copy.jsonl",
        "move.jsonl",
    ]
    [record] = lines(folder / "copy.jsonl")
    fields = (
        "input_prompt",
        "output_response",
        "score",
        "stop_reason",
        "env_class",
        "env_extras",
        "data_source",
    )
    assert set(record) == {*fields, "conversation", "timestamp", "domain", "turns"}
    assert (record["input_prompt"], record["output_response"]) == (
        "9 1",
        "2 9 3 4 9",
    )  # including special tokens
    assert record["conversation"] == said and record["turns"] == 2 and record["score"] == [1.0]
    assert "größer" in (folder / "copy.jsonl").read_text()
    assert lines(folder / "aggregated_results.jsonl") == [{"test/pass_at_1": 1.0}]


def test_examples_are_of_steps_1_11_and_21_and_clean(tmp_path):
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
        "input_prompt",
        "output_response",
        "reward",
        "stop_reason",
        "timestamp",
    )
    assert set(records[0]) == set(fields)
    assert (records[0]["input_prompt"], records[0]["output_response"]) == ("1", "2 3 4")


def test_tasks_without_a_graded_trial_give_no_example(tmp_path):
    lost = TrajectoryGroup(task=task("lost"), trajectories=[], failures=[failure()])
    dump_examples(tmp_path, 1, [lost], decode)
    assert not (tmp_path / "training_examples").exists()


def test_a_conversation_falls_back_on_the_tokens():
    assert conversation(trajectory(turns=TURNS), decode) == [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2 3 4"},
    ]
    malformed = trajectory(turns=TURNS)
    malformed.conversation.append({"content": "no role"})
    assert conversation(malformed, decode)[0] == {"role": "user", "content": "1"}
    assert conversation(trajectory(turns=[]), decode) == []


def test_conversations_have_no_sampled_special_tokens():
    said = [
        {"role": "assistant", "content": "Hi<|im_end|><|im_start|> there"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "f<｜tool▁sep｜>{}<｜end▁of▁sentence｜>"},
    ]
    spoken = trajectory(turns=TURNS)
    spoken.conversation.extend(said)
    assert conversation(spoken, decode) == [
        {"role": "assistant", "content": "Hi there"},
        said[1],
        {"role": "assistant", "content": "f<｜tool▁sep｜>{}"},
    ]


def test_a_dump_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        dump_examples(tmp_path / "file", 1, [group("a")], decode)
        dump_evaluation(tmp_path / "file", 1, [group("a")], {}, decode)
    assert caplog.text.count("the dump failed") == 2
