"""Tests `src.sft`: the tokens of chats, mistakes in files, and runs that are killed and resumed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from src.cli.agent_trainer import command_line
from src.cli.command_line import parse_as
from src.core.errors import ConfigError, ServerLost
from src.loop.outcome import resume_command
from src.policy.chat import Chat as Template
from src.policy.tool_messages import describe_tool
from src.records import checkpoints
from src.records.journal import Journal, RolloutKey
from src.records.metrics_table import metric_of
from src.records.rollout_store import FinishedRollout, FinishedRollouts
from src.sft.__main__ import main
from src.sft.chats import LINE_ADAPTER, Chat, chat_of, read_chats
from src.sft.config import SftConfig, TrainOn
from src.sft.dataset import Batch, Dataset, load, schedule, split
from src.sft.learning_rate import recommended_rate, size_of
from src.sft.rendering import render
from tests.fakes.chat_templates import FAMILIES, TOOLS, Family, family_tokenizer
from tests.fakes.killable_sft import OPTIONS, SftRun, write_chats
from tests.fakes.run import OWN_SERVER, groups_trained
from tests.fakes.run_files import records
from tests.fakes.tokenizer import toy_chat
from tests.fakes.trials import trajectory, turn
from tests.fakes.wandb_module import FakeWandb

ROOT = Path(__file__).resolve().parents[2]
APPEND_ONLY_TEMPLATES = [
    family for family in FAMILIES if family.name in ("qwen2_5", "qwen3_2507", "llama3_1")
]
CALL = {"id": "0", "type": "function", "function": {"name": "get_order", "arguments": '{"id": null}'}}
MESSAGES = [
    {"role": "system", "content": "The policy."},
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "0", "content": "sent"},
    {"role": "assistant", "content": [{"type": "text", "text": "It is sent."}]},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye", "trainable": True},
    {"role": "user", "content": "?"},
]


def chat(messages: Sequence[Mapping[str, object]] = MESSAGES) -> Chat:
    line = LINE_ADAPTER.validate_json(json.dumps({"messages": messages, "tools": TOOLS}))
    return chat_of(line, "f.jsonl, line 1")


def trained_texts(template: Template, train_on: TrainOn) -> list[str]:
    """Return the text of each contiguous range of trained tokens."""
    sequence = render(chat(), template, train_on=train_on, context_limit=10_000).sequence
    edges = np.flatnonzero(np.diff([0, *sequence.weights, 0]))
    return [
        template.tokenizer.decode(
            sequence.tokens[start:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


@pytest.mark.parametrize("family", APPEND_ONLY_TEMPLATES, ids=lambda family: family.name)
def test_the_tokens_are_those_of_the_chat_template(family: Family) -> None:
    tokenizer = family_tokenizer(family)
    tokens = render(
        chat(), Template(tokenizer), train_on="all_assistant_messages", context_limit=10_000
    ).sequence.tokens
    text = tokenizer.apply_chat_template(
        chat().messages, tools=TOOLS, tokenize=False, tools_in_user_message=True
    )
    assert isinstance(text, str)
    assert tokens.tolist() == tokenizer.encode(text, add_special_tokens=False)[: len(tokens)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_tokens_are_those_that_a_rollout_sees(family: Family) -> None:
    template, messages = Template(family_tokenizer(family)), chat().messages
    prompt = template.render(messages[:2], tools=TOOLS)
    for index, following in ((2, messages[3:4]), (4, messages[5:6])):
        prompt = template.extend(prompt, template.answer_ids(messages[index]), following)
    sequence = render(chat(), template, train_on="last_assistant_message", context_limit=10_000).sequence
    assert sequence.tokens.tolist() == [*prompt, *template.answer_ids(messages[6])]
    assert template.decode(sequence.tokens[len(prompt) :].tolist()) == "Bye"
    assert not sequence.weights[: len(prompt)].any() and sequence.weights[len(prompt) :].all()


def test_train_on_selects_the_trained_messages() -> None:
    template = Template(family_tokenizer(APPEND_ONLY_TEMPLATES[0]))
    call = '<tool_call>\n{"name": "get_order", "arguments": {"id": null}}\n</tool_call><|im_end|>'
    answers = [call, "It is sent.<|im_end|>", "Bye<|im_end|>"]
    assert trained_texts(template, "all_assistant_messages") == answers
    assert trained_texts(template, "last_assistant_message") == answers[-1:]
    assert trained_texts(template, "customized") == answers[-1:]
    assert trained_texts(template, "all_tokens")[0].endswith("Bye<|im_end|>")
    assert len(trained_texts(template, "all_tokens")) == 1
    with pytest.raises(ConfigError, match=r"f.jsonl, line 1: train_on=last_assistant_turn leaves no message"):
        trained_texts(template, "last_assistant_turn")


def test_reasoning_that_a_rollout_never_samples_is_refused() -> None:
    template = Template(family_tokenizer(FAMILIES[1]))
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    with pytest.raises(
        ConfigError, match=r"line 1: messages.1: this message cannot follow the generation prompt"
    ):
        render(chat([MESSAGES[1], answer]), template, train_on="all_assistant_messages", context_limit=10_000)


def test_messages_that_the_template_rejects_are_named() -> None:
    tokenizer = family_tokenizer(FAMILIES[0])
    rejection = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    tokenizer.chat_template = rejection + str(tokenizer.chat_template)
    with pytest.raises(
        ConfigError, match=r"line 1: the chat template rejects the chat: No system role; change the"
    ):
        render(chat(), Template(tokenizer), train_on="all_assistant_messages", context_limit=10_000)


def test_tools_with_empty_fields_are_described() -> None:
    parameters = {"properties": {"a": {"type": "integer"}, "b": None, "c": True}}
    function = {"name": "f", "description": None, "parameters": parameters}
    assert describe_tool({"function": function}) == "f(a: integer, b: any, c: any): "
    assert describe_tool({"function": {"name": "g", "parameters": None}}) == "g(): "


DEEP = "[" * 100_000
GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"chats.jsonl, line 1: the file has no chat"),
        ("\n", r"chats.jsonl, line 1: the file has no chat"),
        (GOOD + '{"messages": [', r"chats.jsonl, line 2: Invalid JSON: EOF while parsing"),
        (GOOD + "\n[1]\n", r"chats.jsonl, line 3: Input should be an object"),
        (GOOD + '{"prompt": 1}\n', r"chats.jsonl, line 2: messages: Field required"),
        (GOOD + '{"messages": []}\n', r"chats.jsonl, line 2: messages: List should have at least 1 item"),
        (GOOD.replace("user", "customer"), r"line 1: messages.0.role: Input should be 'system', 'user'"),
        (
            GOOD.replace('"b"', "null"),
            r"line 1: messages.1: content is missing or null; only a message",
        ),
        (GOOD.replace('"content": "b"', '"text": "b"'), r"line 1: messages.1: content is missing or null"),
        (GOOD.replace('"b"', "1"), r"line 1: messages.1.content: Input should be a valid string"),
        (GOOD.replace('"b"', '[{"type": "image"}]'), r"line 1: messages.1.content: Input should be a valid"),
        (
            GOOD.replace('"b"', '"", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]'),
            r"line 1: messages.1.tool_calls.0.function.arguments: not valid JSON",
        ),
        (
            GOOD.replace(
                '"b"', f'"", "tool_calls": [{{"function": {{"name": "f", "arguments": "{DEEP}"}}}}]'
            ),
            r"line 1: messages.1.tool_calls.0.function.arguments: not valid JSON: recursion limit exceeded",
        ),
        (
            GOOD.replace('"b"', '"b", "weight": 0'),
            r"line 1: messages.1: weight=0 has no effect; set .trainable",
        ),
        (
            GOOD.replace("]}", '], "tools": [{"name": "f", "parameters": {}}]}'),
            r"line 1: tools.0: not an OpenAI schema",
        ),
        (GOOD.replace("assistant", "system"), r"line 1: train_on=all_assistant_messages leaves no message"),
        (GOOD.replace("user", "assistant"), r"line 1: the first message is the assistant's"),
        (
            GOOD + GOOD.replace('"b"', f'"{"b" * 200}"'),
            r"line 2: the sequence has \d+ tokens, more than context",
        ),
    ],
)
def test_a_mistake_in_a_file_gives_a_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "chats.jsonl").write_text(text)
    config = parse_as(
        SftConfig, [*OWN_SERVER, f"data={tmp_path / 'chats.jsonl'}", "eval_split=0", "context_limit=99"]
    )
    with pytest.raises(ConfigError, match=message) as caught:
        load(config, toy_chat())
    assert "\n" not in str(caught.value)


def test_an_invalid_line_stops_the_command_before_any_work(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.sft.run.load_chat", lambda name: toy_chat())
    data, directory = tmp_path / "chats.jsonl", tmp_path / "run"
    data.write_text(GOOD + "{")
    assert main([f"data={data}", *OWN_SERVER, f"log_path={directory}"]) == 2
    assert f"error: {data}, line 2: Invalid JSON" in capfd.readouterr().err
    assert not directory.exists()
    assert main([f"data={tmp_path / 'none'}", *OWN_SERVER, f"log_path={directory}"]) == 2
    assert "none: No such file or directory; correct data= or eval_data=" in capfd.readouterr().err


def dataset(tmp_path: Path, *options: str) -> tuple[Dataset, SftConfig]:
    data = write_chats(tmp_path / "chats.jsonl", count=10)
    config = parse_as(SftConfig, [*OWN_SERVER, f"data={data}", *options])
    return load(config, toy_chat()), config


def test_every_epoch_has_every_chat_once(tmp_path: Path) -> None:
    loaded, config = dataset(tmp_path, "batch_size=4", "n_epochs=2", "eval_split=0.1")
    batches = schedule(loaded, config)
    assert [(batch.step, batch.epoch, len(batch.chats)) for batch in batches] == [
        *((1, 0, 4), (2, 0, 4), (3, 0, 1)),
        *((4, 1, 4), (5, 1, 4), (6, 1, 1)),
    ]
    epochs = [[chat for batch in part for chat in batch.chats] for part in (batches[:3], batches[3:])]
    hashes = [[chat.content_hash for chat in epoch] for epoch in epochs]
    assert sorted(hashes[0]) == sorted(hashes[1]) and hashes[0] != hashes[1]
    assert len(set(hashes[0])) == 9 and len(loaded.held_out) == 1
    assert schedule(loaded, parse_as(SftConfig, [*OWN_SERVER, "data=f", "max_steps=1"]))[1:] == []


def test_equal_chats_are_never_both_trained_and_held_out(tmp_path: Path) -> None:
    loaded, config = dataset(tmp_path, "eval_split=0.3")
    twice = split([*loaded.train, *loaded.held_out, *loaded.train], config)
    trained, held_out = ({chat.content_hash for chat in part} for part in (twice.train, twice.held_out))
    assert len(held_out) == 3 and not trained & held_out
    both_config = parse_as(
        SftConfig, [*OWN_SERVER, *(f"{key}={config.data[0]}" for key in ("data", "eval_data"))]
    )
    with pytest.raises(
        ConfigError, match=r"line 1: the held-out chat or task is also trained \(.*, line 1\)"
    ):
        load(both_config, toy_chat())


async def test_a_run_lowers_the_held_out_nll_and_saves(tmp_path: Path) -> None:
    run = SftRun(tmp_path)
    await run.go(f"data={write_chats(tmp_path / 'chats.jsonl')}", *OPTIONS)
    lines = records(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(13))
    assert lines[0]["test/nll"] == pytest.approx(np.log(300)) and lines[-1]["test/nll"] < 4.9
    assert lines[-1]["sft/trained_tokens"] == lines[-1]["sft/chats"] * 4
    assert lines[1]["optim/loss"] == pytest.approx(lines[1]["sft/nll"], rel=1e-5)
    unknown = [name for line in lines for name in line if name != "step" and metric_of(name) is None]
    assert unknown == []
    assert set(groups_trained(tmp_path / "run").values()) == {1}
    text = run.text.getvalue()
    assert "chats: 7 to train on (28 trained tokens), 2 held out; 12 steps, learning rate 5" in text
    assert "held-out NLL: 5.7038 before" in text
    assert "agent-trainer train load_checkpoint_path=tinker://m/weights/000012" in text


async def test_a_resumed_run_continues_with_its_optimizer(tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl")
    await SftRun(tmp_path / "whole").go(f"data={data}", *OPTIONS)
    parts = SftRun(tmp_path / "parts")
    await parts.go(f"data={data}", *OPTIONS, "max_steps=3")
    await parts.go(f"data={data}", *OPTIONS)
    assert parts.opened[1].load_checkpoint_path == "tinker://m/weights/000003"
    assert parts.opened[1].load_optimizer
    states = [(tmp_path / name / "server" / "000012").read_text() for name in ("whole", "parts")]
    assert states[0] == states[1]
    last = checkpoints.last(tmp_path / "parts" / "run")
    assert last is not None and last.final and last.batch == 12


async def test_a_resume_reports_the_steps_of_this_process(tmp_path: Path) -> None:
    data, run = write_chats(tmp_path / "chats.jsonl"), SftRun(tmp_path)
    await run.go(f"data={data}", *OPTIONS, "max_steps=1")
    await run.go(f"data={data}", *OPTIONS, "max_steps=3")
    assert "done: 2 steps (3 in total) in " in run.text.getvalue()
    await run.go(f"data={data}", *OPTIONS, "max_steps=3")
    assert "nothing to do: all 3 steps are finished; add max_steps=6" in run.text.getvalue()


async def test_a_cancelled_run_shows_the_command_that_resumes_it(tmp_path: Path) -> None:
    def cancel() -> None:
        raise asyncio.CancelledError

    run = SftRun(tmp_path, tick=cancel)
    with pytest.raises(asyncio.CancelledError):
        await run.go(f"data={write_chats(tmp_path / 'chats.jsonl')}", *OPTIONS)
    assert run.text.getvalue().splitlines()[-1] == f"continue: {resume_command(tmp_path / 'run')}"


async def test_changed_chats_and_other_programs_cannot_resume(tmp_path: Path) -> None:
    data, run = write_chats(tmp_path / "chats.jsonl"), SftRun(tmp_path)
    await run.go(f"data={data}", *OPTIONS, "max_steps=3")
    data.write_text(data.read_text().replace("say 3", "tell 3"))
    with pytest.raises(ConfigError, match=r"step \d of this run has other chats in the journal: data=,"):
        await run.go(f"data={data}", *OPTIONS)
    with pytest.raises(ConfigError, match=r"has train_on=all_assistant_messages, not all_tokens"):
        await run.go(f"data={data}", *OPTIONS, "train_on=all_tokens")
    config = tmp_path / "run" / "config.json"
    options = json.loads(config.read_text())
    del options["train_on"]
    config.write_text(json.dumps(options))
    with pytest.raises(ConfigError, match=r"was started by python -m src.train; resume it with that"):
        await run.go(f"data={data}", *OPTIONS)


async def test_agent_trainer_resumes_a_run_with_its_options(tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl")
    await SftRun(tmp_path).go(f"data={data}", *OPTIONS, "max_steps=1")
    module, *arguments = command_line("resume", [str(tmp_path / "run"), "max_steps=2"])
    assert module == "src.sft"
    config = parse_as(SftConfig, arguments)
    assert (config.data, config.max_steps, config.learning_rate) == ([str(data)], 2, 5)
    assert config.behavior_if_log_dir_exists == "resume"


async def test_a_lost_server_does_not_change_the_weights(tmp_path: Path) -> None:
    data, count = write_chats(tmp_path / "chats.jsonl"), 0

    def lose_the_server_once() -> None:
        nonlocal count
        count += 1
        if count == 15:
            raise ServerLost("the server was restarted")

    await SftRun(tmp_path / "whole").go(f"data={data}", *OPTIONS)
    run = SftRun(tmp_path / "lost", tick=lose_the_server_once)
    await run.go(f"data={data}", *OPTIONS)
    assert len(run.opened) == 2 and run.opened[1].load_checkpoint_path is not None
    states = [(tmp_path / name / "server" / "000012").read_text() for name in ("whole", "lost")]
    assert states[0] == states[1]
    assert set(groups_trained(tmp_path / "lost" / "run").values()) == {1}


async def test_wandb_gets_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    fake.released.set()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    data = write_chats(tmp_path / "chats.jsonl")
    await SftRun(tmp_path).go(f"data={data}", *OPTIONS, "wandb_project=p", "max_steps=3")
    assert [step for step, _ in fake.logged] == [0, 1, 2, 3]
    assert "sft/nll" in fake.logged[1][1] and "test/nll" in fake.logged[3][1]


def test_the_learning_rate_follows_the_hidden_size(tmp_path: Path) -> None:
    assert recommended_rate(*size_of(str(tmp_path))) == 5e-4
    (tmp_path / "config.json").write_text('{"hidden_size": 1000, "model_type": "llama"}')
    assert recommended_rate(*size_of(str(tmp_path))) == pytest.approx(5e-4 * 2**0.781)
    (tmp_path / "config.json").write_text('{"hidden_size": 1000, "model_type": "qwen3"}')
    assert recommended_rate(*size_of(str(tmp_path))) == pytest.approx(5e-4 * 2**0.0775)


def test_the_size_of_the_model_precedes_that_of_the_tokenizer(tmp_path: Path) -> None:
    for name, size in (("model", 64), ("tokenizer", 128)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"hidden_size": {size}}}')
    assert size_of(str(tmp_path / "model"), str(tmp_path / "tokenizer")) == (64, "")
    assert size_of("local/alias", str(tmp_path / "tokenizer")) == (128, "")
    assert size_of("local/alias", None) == (None, "")


def test_sigkill_at_many_points_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fakes.killable_sft", str(tmp_path), "20", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "21 of 21 runs ended like the uninterrupted one" in done.stdout


def run_directory(path: Path, **config: str) -> Path:
    """Create a run directory with three trials of each task, which have the rewards 0, 0.5 and 1."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_name": "m"} | config))
    store = FinishedRollouts(path, Journal(path))
    for purpose, tasks in (("step", ("a", "b", "c")), ("eval", ("held",))):
        for task in tasks:
            for member in range(3):
                prompt = [1, ord(task[0])]
                turns = [turn(prompt, [5, member]), turn([*prompt, 5, member, 2], [6])]
                store.add(
                    RolloutKey(purpose=purpose, step=1, task=task, member=member),
                    FinishedRollout(
                        result=trajectory(task, member / 2, turns, name=f"{task}-{member}"),
                        seed=0,
                        attempts=1,
                    ),
                )
    return path


def test_successes_of_a_run_keep_their_sampled_tokens(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "rl")
    config = parse_as(SftConfig, [*OWN_SERVER, f"data={run},reward>=0.5", "eval_split=0.3"])
    loaded = load(config, toy_chat())
    assert len(loaded.train) == 4 and len(loaded.held_out) == 2
    assert {chat.task for chat in loaded.train}.isdisjoint(chat.task for chat in loaded.held_out)
    sequences = {chat.where.rpartition(" ")[2]: chat.sequence for chat in loaded.train + loaded.held_out}
    assert sorted(sequences) == ["a-1", "a-2", "b-1", "b-2", "c-1", "c-2"]
    assert sequences["b-2"].tokens.tolist() == [1, ord("b"), 5, 2, 2, 6]
    assert sequences["b-2"].weights.tolist() == [0, 0, 1, 1, 0, 1]
    above = parse_as(SftConfig, [*OWN_SERVER, f"data={run},reward>0.5", "eval_split=0"])
    assert len(load(above, toy_chat()).train) == 3


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("RUN", (), r'is a run directory; write "data=.*rl,reward>=1", with the quotes'),
        ("RUN,reward", (), r'data=reward is not a condition; write "data=RUN,reward>=1", with the quotes'),
        ("reward>=1", (), r"data=reward>=1 has no run directory before it"),
        ("RUN,reward>=1,reward>=0", (), r"data=reward>=0: .*rl already has a condition; remove one"),
        ("rewards.jsonl", (), r"rewards.jsonl"),
        ("RUN,reward>=2", (), r"rl has no training trial with reward>=2; lower the bound"),
        ("RUN,reward>=1", ("tokenizer=n",), r"has tokens of tokenizer m, but this fine-tuning uses n"),
        (
            "RUN,reward>=1",
            ("train_on=customized",),
            r"selects messages of chats, but .*rl is a run directory",
        ),
        ("RUN,reward>=1", ("context_limit=3",), r"rl, trial a-2: the sequence has 6 tokens, more than"),
        ("none,reward>=1", (), r"none has no config.json; give the directory of a run"),
    ],
)
def test_a_mistake_in_a_run_gives_a_one_line_error(
    tmp_path: Path, data: str, options: tuple[str, ...], message: str
) -> None:
    run = run_directory(tmp_path / "rl")
    config = parse_as(SftConfig, [*OWN_SERVER, f"data={data.replace('RUN', str(run))}", *options])
    with pytest.raises(ConfigError, match=message) as caught:
        load(config, toy_chat())
    assert "\n" not in str(caught.value)


def test_keys_of_equal_chats_in_a_batch_differ(tmp_path: Path) -> None:
    chat = dataset(tmp_path)[0].train[0]
    assert len(set(Batch(step=1, epoch=0, chats=[chat, chat]).keys)) == 2


def test_a_chat_file_is_read_in_its_order(tmp_path: Path) -> None:
    chats = read_chats(write_chats(tmp_path / "chats.jsonl", count=3))
    assert [item.messages[0]["content"] for item in chats] == ["say 0", "say 1", "say 2"]
