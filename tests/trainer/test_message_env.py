"""Tests `run_episode`: tools, errors, empty answers, sampling parameters and metrics of an episode."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from src.core.errors import PromptTooLong, SandboxError
from src.core.trajectory import (
    FailureKind,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    TrialFailure,
    Turn,
    ZeroReason,
)
from src.envs.message_env import MessageEnv, ResetResult, StepResult, run_episode, turn_seed
from src.learning.datums import sequences_of
from src.learning.filters import is_trainable, with_failures_rewarded
from src.policy.chat import Chat, Message
from tests.fakes.envs import ScriptedEnv, ending, saying
from tests.fakes.episodes import OB, SETTINGS, fail, filters, limits, run_graded
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import ToyTokenizer, toy_chat
from tests.fakes.trials import task

# Tools


class ToolTokenizer(ToyTokenizer):
    """A tokenizer whose template renders the name of each tool after the letter T."""

    def apply_chat_template(self, conversation, *, tools, **options):
        names = "".join("T" + tool["function"]["name"] for tool in tools or ())
        return names + super().apply_chat_template(conversation, tools=tools, **options)


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"properties": {}}}}
    for name in ("f", "g")
]


async def test_native_tools_are_in_the_first_prompt_and_stay_there():
    script = [saying("ob", role="tool"), ending()]
    native = replace(SETTINGS, use_native_tool_calling=True)
    _, policy, _ = await run_graded(
        script,
        ["AB", "C"],
        settings=native,
        chat=Chat(ToolTokenizer()),
        tools=TOOLS,
        use_native_tool_calling=True,
    )
    assert policy.calls[0].prompt_ids[:5] == [*map(ord, "TfTg"), 1]
    assert policy.calls[1].prompt_ids[:5] == [*map(ord, "TfTg"), 1]
    assert policy.calls[1].prompt_ids.count(ord("T")) == 2


@pytest.mark.parametrize(("env", "run"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.seed_behaviour(3)
async def test_tools_are_native_if_environment_and_run_permit_it(env, run):
    settings = replace(SETTINGS, use_native_tool_calling=run)
    _, policy, _ = await run_graded(
        [ending()],
        ["A"],
        settings=settings,
        chat=Chat(ToolTokenizer()),
        tools=TOOLS,
        use_native_tool_calling=env,
    )
    prompt = "".join(map(chr, policy.calls[0].prompt_ids))
    assert prompt.startswith("TfTg") == (env and run)
    assert ("- f(): d" in prompt and "- g(): d" in prompt) == (not (env and run))


@pytest.mark.parametrize(("env", "run"), [(False, False), (True, True)])
@pytest.mark.seed_behaviour(1)
async def test_without_tools_the_prompt_is_unchanged(env, run):
    settings = replace(SETTINGS, use_native_tool_calling=run)
    _, policy, _ = await run_graded(
        [ending()], ["A"], settings=settings, chat=Chat(ToolTokenizer()), use_native_tool_calling=env
    )
    assert len(policy.calls[0].prompt_ids) == 9


async def test_described_tools_are_added_to_the_system_message():
    opening = [{"role": "system", "content": "policy"}, {"role": "user", "content": "x"}]
    trajectory, _, _ = await run_graded([ending()], ["A"], opening=opening, tools=TOOLS)
    roles = [message["role"] for message in trajectory.conversation]
    assert roles == ["system", "user", "assistant"]
    assert str(trajectory.conversation[0]["content"]).startswith("policy\n\nYou can call a function")


# Errors


async def test_a_failed_start_is_a_failure():
    failure, policy, _ = await fail([], ["AB"], opening=RuntimeError("no user simulator"))
    assert policy.calls == []
    assert failure.kind == FailureKind.ENV_INIT_FAILED
    assert re.fullmatch(
        r"RuntimeError: no user simulator \(tests/fakes/envs.py:\d+ in start\)", failure.message
    )


async def test_a_failed_start_can_become_a_trajectory_without_turns():
    # SkyRL always creates a trajectory of reward 0. Here, that needs failed_trial_reward=0.
    failure, _, _ = await fail([], ["AB"], opening=RuntimeError("no user simulator"))
    group = TrajectoryGroup(task=task("a"), trajectories=[], failures=[failure])
    [substitute] = with_failures_rewarded(group, 0).trajectories
    assert (substitute.turns, substitute.reward) == ([], 0)
    assert not is_trainable(substitute, filters("stop_reason"))


TOO_LONG = PromptTooLong("sampling from m: maximum context length")


async def test_a_later_prompt_that_the_endpoint_refuses_is_graded():
    trajectory, _, _ = await run_graded([StepResult(messages=OB.messages, reward=0.5)], ["AB", TOO_LONG])
    assert trajectory.stop_reason is StopReason.CONTEXT_LENGTH
    assert (len(trajectory.turns), trajectory.reward) == (1, 0.5)


async def test_a_refused_first_prompt_is_a_failure():
    failure, _, _ = await fail([], [TOO_LONG])
    assert failure.kind is FailureKind.BACKEND and "maximum context length" in failure.message


RAISES_IN_SECOND_STEP = [StepResult(messages=OB.messages, reward=0.5), ValueError("bad state")]


async def test_an_answer_that_makes_step_raise_has_reward_0():
    trajectory, _, _ = await run_graded(RAISES_IN_SECOND_STEP, ["AB", "C"])
    assert (trajectory.reward, trajectory.turn_rewards) == (0.0, [0.0, 0.0])
    assert trajectory.zero_reason is ZeroReason.ENV_ERROR


async def test_answers_too_long_for_a_model_of_the_environment_get_0():
    trajectory, _, _ = await run_graded([StepResult(messages=OB.messages, reward=0.5), TOO_LONG], ["AB", "C"])
    assert (trajectory.reward, trajectory.turn_rewards) == (0.0, [0.0, 0.0])
    assert trajectory.zero_reason is ZeroReason.ENV_ERROR


async def test_an_answer_that_makes_step_raise_is_trained():
    trajectory, _, _ = await run_graded(RAISES_IN_SECOND_STEP, ["AB", "C"])
    assert [len(turn.completion_ids) > 0 for turn in trajectory.turns] == [True, True]


async def test_an_exception_of_step_is_logged_with_its_line(caplog):
    await run_graded(RAISES_IN_SECOND_STEP, ["AB", "C"])
    [record] = [record for record in caplog.records if record.name.startswith("src.")]
    assert record.exc_info is not None and "in step" in caplog.text


async def test_only_the_traceback_of_the_environment_is_logged(caplog):
    await run_graded([ValueError("bad state")], ["AB"])
    [record] = [record for record in caplog.records if record.name.startswith("src.")]
    assert record.exc_info is not None
    text = logging.Formatter().formatException(record.exc_info)
    assert text.count("Traceback") == text.count('File "') == 1 and text.endswith("ValueError: bad state")


async def test_a_system_exit_of_step_has_reward_0():
    class Exiting(ScriptedEnv):
        async def step(self, answer: str) -> StepResult:
            raise SystemExit("usage: ...")

    chat = toy_chat()
    trajectory = await run_episode(
        Exiting([]), FakePolicy(chat, ["AB"]), chat, limits(), SETTINGS, task_id="t"
    )
    assert isinstance(trajectory, Trajectory) and trajectory.zero_reason is ZeroReason.ENV_ERROR


@pytest.mark.parametrize(
    "error", [ConnectionError("refused"), TimeoutError("no reply"), SandboxError("no sandbox")]
)
async def test_an_error_that_no_answer_can_cause_is_a_failure(error):
    failure, _, _ = await fail([error], ["AB"])
    assert failure.kind == FailureKind.ENV_ERROR


async def test_a_step_without_a_result_is_a_failure_that_names_it():
    failure, _, _ = await fail([cast(StepResult, None)], ["A"])
    assert failure.kind == FailureKind.ENV_ERROR
    assert failure.message.startswith("TypeError: step of ScriptedEnv returned NoneType, not StepResult")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            StepResult(messages=cast(list[Message], "hi")),
            "returned the message 'h'; return messages of the form",
        ),
        (StepResult(messages=[{"rol": "user", "content": "hi"}]), "returned the message \"{'rol': 'user'"),
        (StepResult(messages=[{"role": "user", "content": None}]), "returned the message \"{'role': 'user'"),
        (StepResult(metrics={"a": cast(float, "b")}), "returned the metric a='b', which is not a number"),
    ],
    ids=["text", "no role", "no content", "metric"],
)
async def test_a_wrong_part_of_a_step_result_is_named(result: StepResult, message: str):
    failure, _, _ = await fail([result], ["A"])
    assert failure.kind == FailureKind.ENV_ERROR
    assert failure.message.startswith(f"TypeError: step of ScriptedEnv {message}")


@pytest.mark.parametrize(
    ("messages", "message"),
    [([], "returned no messages; return at least one"), ([{"role": "user"}], "returned the message")],
)
async def test_wrong_first_messages_are_a_failure(messages: list[Message], message: str):
    class Broken(ScriptedEnv):
        async def start(self) -> ResetResult:
            return ResetResult(messages=messages)

    chat = toy_chat()
    result = await run_episode(Broken([]), FakePolicy(chat, ["AB"]), chat, limits(), SETTINGS, task_id="t")
    assert isinstance(result, TrialFailure) and result.kind == FailureKind.ENV_ERROR
    assert result.message.startswith(f"TypeError: start of Broken {message}")


async def test_a_step_that_is_not_async_is_a_failure():
    class Broken(ScriptedEnv):
        def step(self, answer: str) -> StepResult:  # pyright: ignore[reportIncompatibleMethodOverride]
            return StepResult(is_done=True)

    chat, env = toy_chat(), cast(MessageEnv, Broken([]))
    result = await run_episode(env, FakePolicy(chat, ["AB"]), chat, limits(), SETTINGS, task_id="t")
    assert isinstance(result, TrialFailure) and result.kind == FailureKind.ENV_ERROR
    assert result.message.startswith("NotAsyncError: step of Broken is not async; write `async def step`")


async def test_a_message_that_is_not_json_is_a_failure():
    class Broken(ScriptedEnv):
        async def step(self, answer: str) -> StepResult:
            return StepResult(messages=[{"role": "user", "content": "x", "extra": object()}], is_done=True)

    chat = toy_chat()
    result = await run_episode(Broken([]), FakePolicy(chat, ["AB"]), chat, limits(), SETTINGS, task_id="t")
    assert isinstance(result, TrialFailure) and result.kind == FailureKind.ENV_ERROR


@pytest.mark.parametrize(
    "result",
    [
        StepResult(is_done=True, tool_fields={0: {"tool_calls": {1, 2}}}),
        StepResult(is_done=True, stop_reason=cast(StopReason, "finished")),
    ],
)
async def test_a_result_that_the_run_directory_cannot_store_is_a_failure(result: StepResult):
    failure, _, _ = await fail([result], ["A"])
    assert failure.kind == FailureKind.ENV_ERROR


async def test_a_stop_reason_can_be_a_text():
    result = StepResult(is_done=True, stop_reason=cast(StopReason, "timeout"))
    trajectory, _, _ = await run_graded([result], ["A"])
    assert trajectory.stop_reason is StopReason.TIMEOUT


@pytest.mark.seed_behaviour(104)
async def test_a_cancelled_episode_closes_its_environment():
    environment = ScriptedEnv([], hang_at=1)
    chat = toy_chat()
    running = asyncio.create_task(
        run_episode(environment, FakePolicy(chat, ["AB"]), chat, limits(), SETTINGS, task_id="a")
    )
    await environment.hangs.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert environment.num_closed == 1


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf"), -1.7e308])
async def test_a_reward_that_is_not_finite_becomes_0(reward):
    trajectory, _, _ = await run_graded([saying("ok", reward=reward), ending()], ["A", "B"])
    assert (trajectory.reward, trajectory.turn_rewards, trajectory.zero_reason) == (
        0.0,
        [0.0],
        ZeroReason.UNREADABLE_REWARD,
    )
    assert {"role": "assistant", "content": "A"} in trajectory.conversation


async def test_rewards_whose_sum_is_too_large_become_0():
    trajectory, _, _ = await run_graded([saying("ok", reward=6e299), ending(6e299)], ["A", "B"])
    assert (trajectory.reward, trajectory.turn_rewards, trajectory.zero_reason) == (
        0.0,
        [0.0, 0.0],
        ZeroReason.UNREADABLE_REWARD,
    )


async def test_a_hanging_close_is_abandoned(monkeypatch):
    class Hanging(ScriptedEnv):
        async def close(self):
            await asyncio.Event().wait()

    monkeypatch.setattr("src.envs.message_env.CLOSE_TIMEOUT_S", 0.01)
    chat = toy_chat()
    running = run_episode(Hanging([ending()]), FakePolicy(chat, ["A"]), chat, limits(), SETTINGS, task_id="a")
    async with asyncio.timeout(10):
        assert isinstance(await running, Trajectory)


async def test_a_system_exit_of_close_is_ignored():
    class Exiting(ScriptedEnv):
        async def close(self):
            raise SystemExit(3)

    chat = toy_chat()
    result = await run_episode(
        Exiting([ending()]), FakePolicy(chat, ["A"]), chat, limits(), SETTINGS, task_id="a"
    )
    assert isinstance(result, Trajectory)


@pytest.mark.seed_behaviour(13)
async def test_an_empty_answer_reaches_the_environment_only():
    class SecondAnswerEmpty(FakePolicy):
        async def sample(self, request) -> Turn:
            turn = await super().sample(request)
            return replace(turn, completion_ids=[], logprobs=[]) if len(self.calls) == 2 else turn

    chat = toy_chat()
    script = [OB, saying("say something", reward=0.25), ending()]
    trajectory, _, environment = await run_graded(script, [], policy=SecondAnswerEmpty(chat, ["AB", "", "C"]))
    assert environment.answers == ["AB", "", "C"]
    assert len(trajectory.turns) == 2 and trajectory.metrics["empty_completions"] == 1
    assert trajectory.turn_rewards == [0.25, 1.0] and trajectory.reward == 1.25
    [sequence] = sequences_of(trajectory.turns, advantage=1.0)
    assert sequence.num_sampled == 5


@pytest.mark.seed_behaviour(5, 69)
async def test_empty_answers_alone_give_no_turns():
    class OnlyEmptyAnswers(FakePolicy):
        async def sample(self, request) -> Turn:
            return replace(await super().sample(request), completion_ids=[], logprobs=[])

    trajectory, policy, _ = await run_graded(
        [StepResult()] * 100, [], limits(60), policy=OnlyEmptyAnswers(toy_chat(), [""])
    )
    assert (trajectory.turns, trajectory.reward, trajectory.stop_reason) == ([], 0, StopReason.CONTEXT_LENGTH)
    assert len(policy.calls) < 20  # Each empty turn adds ids to the context, so the episode ends.


async def test_max_turns_ends_an_episode():
    trajectory, _, _ = await run_graded([OB] * 3, ["AB"], settings=replace(SETTINGS, max_turns=2))
    assert trajectory.stop_reason == StopReason.MAX_TURNS and len(trajectory.turns) == 2


async def test_each_call_has_a_seed_of_its_own():
    _, policy, _ = await run_graded([OB] * 3, ["AB"], settings=replace(SETTINGS, max_turns=2))
    assert [call.seed for call in policy.calls] == [turn_seed(5, 1), turn_seed(5, 2)]


async def test_each_call_has_the_sampling_parameters_of_the_run():
    _, policy, _ = await run_graded([OB] * 3, ["AB"], settings=replace(SETTINGS, max_turns=2))
    assert [call.temperature for call in policy.calls] == [0.7, 0.7]
    assert [call.stop_token_ids for call in policy.calls] == [[2], [2]]


@pytest.mark.seed_behaviour(104)
async def test_a_trajectory_has_the_metrics_of_its_environment():
    trajectory, _, _ = await run_graded(
        [saying("ob", tool_calls=1.0), saying(is_done=True, tool_calls=2.0)], ["AB", "C"]
    )
    assert trajectory.metrics["tool_calls"] == 2 and trajectory.metrics["duration_s"] >= 0


@pytest.mark.seed_behaviour(36)
async def test_numpy_rewards_and_metrics_are_json():
    env = (
        saying("ob", reward=cast(float, np.float32(0.5)), score=np.float64(2)),
        saying(is_done=True, reward=cast(float, np.float32(0.5))),
    )
    trajectory, _, _ = await run_graded(list(env), ["AB", "C"])
    assert json.loads(json.dumps([trajectory.reward, trajectory.turn_rewards, dict(trajectory.metrics)]))[
        :2
    ] == [1.0, [0.5, 0.5]]
