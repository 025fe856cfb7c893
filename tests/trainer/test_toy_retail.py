"""Tests the toy_retail domain: its tasks, grading, tokenizer and episodes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.quick_starts import QUICKSTARTS
from scripts.quickstart.words import Pool, pool_of
from scripts.recipe_options import RECIPE_OF_KIND
from scripts.toy_retail import make_tasks
from scripts.toy_retail.tokenizer import build_tokenizer, fixed_texts
from src.cli.command_line import parse
from src.core.errors import ConfigError
from src.core.length_limits import LengthLimits
from src.core.trajectory import StopReason, Task, Trajectory
from src.envs.episodes import EnvSpec
from src.envs.message_env import EpisodeSettings, MessageEnv, StepResult, run_episode
from src.envs.registry import check_environment, open_task_source
from src.envs.service.service_env import MAX_ERRORS, ServiceEnv, do_nothing
from src.envs.service.tau_bench import open_toy_retail
from src.envs.service.toy_retail import (
    DIRECTORY,
    NAME,
    TOOLS,
    ToolError,
    ToyRetailEpisode,
    after_gold,
    call,
    communicates,
    content_hash,
    scripted,
)
from src.envs.service.user_simulator import OUT_OF_SCOPE, STOP, TRANSFER, ScriptedUserSimulator, ends
from src.policy.chat import Chat, load_chat
from src.records.dumps import conversation
from tests.fakes.policy import FakePolicy

BASE = ["model_name=m", "backend=skyrl-tx", "skyrl_tx_url=http://h:1", "env=tau_bench"]
PROVIDER = open_toy_retail(parse(BASE), None)
DOMAIN = EnvSpec(
    tasks=PROVIDER.official(NAME, "train"), held_out=PROVIDER.official(NAME, "test"), make=PROVIDER.make
)
TASKS = [*DOMAIN.tasks, *DOMAIN.held_out]
LIMITS = LengthLimits(
    max_input_length=1900, max_generate_length=100, max_sequence_length=2000, context_limit=2000
)

DATABASE = {
    "orders": {"kala": {"status": "pending", "product": "mive", "address": "3 dopa"}},
    "products": {"mive": {"price": 1042}, "sadu": {"price": 12}},
    "customers": {"rone": {"points": 17}},
}


@pytest.fixture(scope="module")
def chat() -> Chat:
    return load_chat(str(DIRECTORY / "model"))


def saying(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def gold(row) -> list[str]:
    """Return the answers of a perfect agent: the gold actions, and a last answer with all facts."""
    return [
        *(saying(action["name"], **action["arguments"]) for action in row["actions"]),
        f"Done. {' '.join(row['communicate'])}",
    ]


async def run_answers(env: MessageEnv, answers: Sequence[str]) -> list[StepResult]:
    """Run an episode with the answers. The last answer is repeated until the episode ends."""
    await env.start()
    observations = []
    while not observations or not observations[-1].is_done:
        observations.append(await env.step(answers[min(len(observations), len(answers) - 1)]))
        assert len(observations) < 50
    await env.close()
    return observations


def service(actions=(), communicate=(), **options) -> ServiceEnv:
    row = {"actions": list(actions), "communicate": list(communicate)}
    return ServiceEnv(
        ToyRetailEpisode(row, database=DATABASE, policy="p", user=ScriptedUserSimulator(("Hello.",))),
        **options,
    )


CANCEL = {"name": "cancel_order", "arguments": {"order": "kala"}}


# The data


def test_the_generator_reproduces_the_committed_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_tasks", str(tmp_path)])
    make_tasks.main()
    for name in ("db.json", "policy.md", "tasks.json"):
        assert (tmp_path / name).read_bytes() == (DIRECTORY / name).read_bytes()


@pytest.mark.seed_behaviour(21)
def test_training_and_held_out_tasks_share_no_names():
    assert (len(DOMAIN.tasks), len(DOMAIN.held_out)) == (40, 20)

    def names(tasks: Sequence[Task]) -> set[str]:
        actions = [action for task in tasks for action in task.row["actions"]]  # type: ignore[attr-defined]
        return {
            word
            for action in actions
            for value in action["arguments"].values()
            for word in value.split()
            if word.isalpha()
        }

    assert all(pool_of(name) is Pool.TRAIN for name in names(DOMAIN.tasks))
    assert all(pool_of(name) is Pool.HELD_OUT for name in names(DOMAIN.held_out))
    assert len(TOOLS) == 8


def test_gold_actions_have_reward_1_in_every_task():
    for task in TASKS:
        for seed in range(3):
            last = asyncio.run(run_answers(DOMAIN.make(task, seed), gold(task.row)))[-1]
            assert last.reward == 1 and last.metrics["tool_errors"] == 0, task.id


def test_refusing_everything_solves_only_refusal_tasks():
    solved = [
        [task.id for task in tasks if asyncio.run(do_nothing(DOMAIN.make(task, 0)))]
        for tasks in (DOMAIN.tasks, DOMAIN.held_out)
    ]
    print(f"no-op success: train {len(solved[0])}/40, held out {len(solved[1])}/20")
    assert [len(ids) for ids in solved] == [6, 2]
    assert all("refused" in task_id for ids in solved for task_id in ids)


def test_the_seed_determines_the_script_of_the_user():
    async def opening(seed: int) -> str:
        return await scripted(DOMAIN.tasks[0].row, seed).reply([])

    first = [asyncio.run(opening(seed)) for seed in range(20)]
    assert first == [asyncio.run(opening(seed)) for seed in range(20)] and len(set(first)) == 3


def test_the_tokenizer_is_lossless_and_reproducible(chat: Chat):
    assert build_tokenizer().to_str(pretty=True) == (DIRECTORY / "model" / "tokenizer.json").read_text()
    for task in TASKS:
        text = json.dumps(task.row)
        ids = chat.tokenizer.encode(text, add_special_tokens=False)
        assert (
            chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
        )
    for text in fixed_texts():
        assert len(chat.tokenizer.encode(text, add_special_tokens=False)) == 1


# The tools and the grade


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fly", {}, "there is no tool fly"),
        ("get_order", {}, "get_order takes order, each a string"),
        ("get_order", {"order": "kala", "why": "x"}, "get_order takes order, each a string"),
        ("get_order", {"order": 7}, "get_order takes order, each a string"),
        ("get_order", {"order": "nobody"}, "there is no order nobody"),
        ("change_product", {"order": "kala", "product": "gold"}, "there is no product gold"),
    ],
)
def test_a_bad_call_is_an_error_that_changes_nothing(name, arguments, message):
    before = content_hash(DATABASE)
    with pytest.raises(ToolError, match=message):
        call(DATABASE, name, arguments)
    assert content_hash(DATABASE) == before


@pytest.mark.seed_behaviour(9)
def test_every_tool_has_a_schema_and_only_writers_write():
    arguments = {"order": "kala", "product": "sadu", "customer": "rone", "address": "9 nimu", "summary": "s"}
    for tool in TOOLS.values():
        function = tool.schema["function"]
        assert tool.schema["type"] == "function" and set(function) == {"name", "description", "parameters"}  # type: ignore[arg-type]
        changed = after_gold(
            DATABASE,
            {"actions": [{"name": tool.name, "arguments": {k: arguments[k] for k in tool.parameters}}]},
        )
        assert (content_hash(changed) != content_hash(DATABASE)) == tool.writes


@pytest.mark.parametrize(
    ("answers", "reward", "database", "communicate"),
    [
        ([saying("cancel_order", order="kala"), "It costs 1,042."], 1, 1, 1),
        ([saying("cancel_order", order="kala"), "it COSTS 1042"], 1, 1, 1),
        ([saying("cancel_order", order="kala"), "It costs 1043."], 0, 1, 0),
        (["It costs 1042."], 0, 0, 1),
        # The agent also performs an action that is not a gold action.
        ([saying("cancel_order", order="kala"), saying("return_order", order="kala"), "1042"], 0, 0, 1),
        ([f"1042 {STOP}"], 0, 0, 1),  # The agent may also end the conversation.
    ],
)
async def test_the_reward_is_the_product_of_database_and_facts(answers, reward, database, communicate):
    last = (await run_answers(service([CANCEL], ["1042"]), answers))[-1]
    assert last.reward == reward
    assert (last.metrics["reward_db"], last.metrics["reward_communicate"]) == (database, communicate)
    assert last.metrics["no_write_action"] == (not answers[0].startswith("<"))


async def test_text_next_to_a_call_does_not_reach_the_user():
    last = (
        await run_answers(service([], ["1042"]), [f"1042 {saying('get_product', product='mive')}", "Bye."])
    )[-1]
    assert last.metrics["reward_communicate"] == 0


def test_facts_are_compared_without_case_and_commas():
    assert (
        communicates(["Pending!"], "pending")
        and communicates(["1,042 euros"], "1042")
        and not communicates(["104", "2"], "1042")
    )


# A service episode


async def test_a_failed_call_is_reported_and_counted():
    first, *_ = await run_answers(service(), [saying("get_order", order="x"), "Bye."])
    assert first.messages == [{"role": "tool", "content": "Error: there is no order x"}]
    assert (first.metrics["tool_calls"], first.metrics["tool_errors"], first.is_done) == (1, 1, False)


@pytest.mark.parametrize(("is_parallel", "num_calls"), [(False, 1), (True, 2)])
async def test_parallel_tool_calls_runs_all_calls_of_an_answer(is_parallel, num_calls):
    both = saying("get_order", order="kala") + saying("get_product", product="mive")
    first, *_ = await run_answers(service(parallel_tool_calls=is_parallel), [both, "Bye."])
    assert [message["role"] for message in first.messages] == ["tool"] * num_calls
    assert first.metrics["tool_calls"] == num_calls


@pytest.mark.seed_behaviour(10)
async def test_a_call_cut_inside_a_string_calls_nothing():
    first, last = await run_answers(service([CANCEL]), [saying("cancel_order", order="kala")[:-20], "Done."])
    assert (
        first.messages[0]["content"] == "Error: the call could not be read: no JSON: it ends inside a string"
    )
    assert (
        last.reward,
        last.metrics["parse_failures"],
        last.metrics["parse_attempts"],
        last.metrics["tool_calls"],
    ) == (0, 1, 1, 0)


async def test_added_braces_are_counted_as_recovered():
    *_, last = await run_answers(
        service([CANCEL]), ['<tool_call>{"name": "cancel_order", "arguments": {"order": "kala"', "Done."]
    )
    assert (last.reward, last.metrics["parse_recovered"], last.metrics["parse_failures"]) == (1, 1, 0)


@pytest.mark.parametrize(
    "answer",
    ["", "  ", "<think>hm", saying("fly"), '<tool_call>{"name": "get_order", "arguments": {"order": "ka'],
)
@pytest.mark.seed_behaviour(13)
async def test_ten_errors_end_the_episode_without_a_reward(answer):
    observations = await run_answers(service(), [answer])
    assert len(observations) == MAX_ERRORS and observations[-1].reward == 0
    assert all(observation.messages[0]["content"].startswith("Error: ") for observation in observations)  # type: ignore[union-attr]


async def test_arguments_that_are_not_an_object_fail_the_call():
    first, *_ = await run_answers(
        service(), ['<tool_call>{"name": "get_order", "arguments": 3}</tool_call>', "Bye."]
    )
    assert (first.metrics["parse_failures"], first.metrics["tool_errors"]) == (1, 1)


@pytest.mark.parametrize(
    ("text", "is_end"), [(f"Thanks. {STOP}", True), (TRANSFER, True), (OUT_OF_SCOPE, True), ("Stop.", False)]
)
def test_the_user_ends_the_conversation_with_tau2s_markers(text, is_end):
    assert ends(text) == is_end


# Trials of the task source that a run opens


@pytest.mark.seed_behaviour(4, 29)
async def test_a_native_gold_episode_trains_the_agents_answers(chat):
    config = parse([*BASE, "use_native_tool_calling=true", "context_limit=2000", "max_tokens=100"])
    source = open_task_source(config, chat)
    assert (len(source.train), len(source.eval)) == (40, 20)
    task = next(task for task in source.train if task.id == "cancel-and-price-train-1")
    policy = FakePolicy(chat, gold(task.row))
    result = await source.trial(task, directory=DIRECTORY, seed=3, temperature=1.0).run(policy)
    assert isinstance(result, Trajectory) and result.reward == 1 and result.stop_reason == StopReason.STOP
    prompt = chat.tokenizer.decode(
        policy.calls[0].prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert "# Tools" in prompt and all(json.dumps(tool.schema) in prompt for tool in TOOLS.values())
    roles = [message["role"] for message in result.conversation]
    assert roles[:5] == ["system", "user", "assistant", "tool", "assistant"]
    messages: Any = conversation(result, lambda ids, clean: "")
    [call] = messages[2]["tool_calls"]
    actions: Any = task.row["actions"]
    first = actions[0]
    assert call["function"] == {"name": first["name"], "arguments": first["arguments"]}
    assert (messages[3]["name"], messages[3]["tool_call_id"]) == (first["name"], call["id"])
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert ids == [f"call_{number}" for number in range(1, 1 + int(result.metrics["tool_calls"]))]
    assert messages[2]["content"] == "" and first["name"] in str(result.conversation[2]["content"])


@pytest.mark.seed_behaviour(8)
def test_the_tau_quick_start_uses_native_tools():
    options = QUICKSTARTS["tau_bench"].options | RECIPE_OF_KIND["tau_bench"]
    arguments = [f"{name}={value}" for name, value in options.items()]
    assert parse([*BASE[:3], *arguments]).use_native_tool_calling


@pytest.mark.seed_behaviour(4)
async def test_the_task_is_solved_in_text_mode_without_schemas(chat):
    policy = FakePolicy(chat, gold(DOMAIN.tasks[0].row))
    settings = EpisodeSettings(temperature=1.0, seed=0)
    result = await run_episode(DOMAIN.make(DOMAIN.tasks[0], 0), policy, chat, LIMITS, settings, task_id="a")
    assert isinstance(result, Trajectory) and result.reward == 1
    prompt = chat.tokenizer.decode(
        policy.calls[0].prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert "# Tools" not in prompt and "- cancel_order(order: string): Cancel an order." in prompt


async def test_an_episode_that_a_limit_ends_has_reward_0(chat):
    settings = EpisodeSettings(temperature=1.0, seed=0, max_turns=1)
    result = await run_episode(
        DOMAIN.make(TASKS[0], 0), FakePolicy(chat, gold(TASKS[0].row)), chat, LIMITS, settings, task_id="a"
    )
    assert isinstance(result, Trajectory) and (result.reward, result.stop_reason) == (0, StopReason.MAX_TURNS)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("environment_kwargs=domain=shoes", "environment_kwargs: domain=shoes is not one of toy_retail"),
        ("environment_kwargs=domain=toy_retail,speed=3", "domain=toy_retail has no option speed; remove it"),
        (
            "environment_kwargs=user_simulator=angry",
            "user_simulator=angry is not one of scripted, openai, tinker",
        ),
        ("tasks_dir=nowhere", "nowhere contains no toy_retail domain"),
        ("eval_tasks=absent", "eval_tasks: 'absent' matches no task"),
    ],
)
def test_invalid_options_are_rejected_with_one_line(option, message, chat):
    for reject in (check_environment, lambda config: open_task_source(config, chat)):
        with pytest.raises(ConfigError, match=message):
            reject(parse([*BASE, option]))


def test_the_check_needs_no_tokenizer_of_a_user_simulator():
    check_environment(parse([*BASE, "environment_kwargs=user_simulator=tinker"]))


def test_an_invalid_gold_action_is_rejected_when_the_tasks_load(tmp_path):
    for name in ("db.json", "policy.md"):
        (tmp_path / name).write_text((DIRECTORY / name).read_text())
    rows = json.loads((DIRECTORY / "tasks.json").read_text())
    rows[3]["actions"][0]["arguments"]["order"] = "nobody"
    (tmp_path / "tasks.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=f"{rows[3]['id']}: a gold action fails: there is no order nobody"):
        open_toy_retail(parse([*BASE, f"tasks_dir={tmp_path}"]), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [{"id": "a"}], '{"id": "a"} is not an object with actions, communicate, id, '),
        (lambda rows: {"tasks": []}, '{"tasks": []} is not an object with actions'),
        (lambda rows: [{**rows[0], "actions": [{"name": "get_order"}]}], "a gold action fails: 'arguments'"),
        (lambda rows: [{**rows[0], "actions": ["get_order"]}], "a gold action fails: string indices"),
    ],
)
def test_an_invalid_row_is_rejected_when_the_tasks_load(tmp_path, change, message):
    for name in ("db.json", "policy.md"):
        (tmp_path / name).write_text((DIRECTORY / name).read_text())
    rows = json.loads((DIRECTORY / "tasks.json").read_text())
    (tmp_path / "tasks.json").write_text(json.dumps(change(rows)))
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_toy_retail(parse([*BASE, f"tasks_dir={tmp_path}"]), None)
