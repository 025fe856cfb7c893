"""The worker program that runs tau2 episodes for `tau2.py`.

It reads one JSON request per line from stdin (<-) and writes one reply per line to stdout (->).

It runs in the Python environment of tau2 and imports no module of this repository. The messages of the agent
and of the user come from the trainer. This process passes them to tau2's orchestrator, which executes the
tool calls and applies the rules of the conversation. This process also grades the conversation.

    -> {"id": 0}                     the worker is ready
    <- {"id": 1, "op": "reset", "episode": "a", "domain": "mock", "task": "create_task_1", ...}
    -> {"id": 1, "speaker": "user", ...}
    <- {"id": 2, "op": "step", "episode": "a", "content": "Hello", "tool_calls": []}
    -> {"id": 2, "speaker": "agent", ...}
    <- {"id": 3, "op": "finish", "episode": "a", "grading": "all", "judge_reply": null}
    -> {"id": 3, "reward": 1.0, ...}

Each request states its timeout. A timer of the kernel enforces it: SIGALRM ends this process if a tool does
not return, for example because it computes `9**9**9`.

This file is long because it is one program: the isolated mode of Python (-I) imports no modules from the
directory of the program.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes
import functools
import json
import os
import resource
import signal
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1
AGENT, USER, OVER = "agent", "user", "over"  # who speaks next


class JudgeRequest(Exception):
    """The evaluator needs the reply of the judge, which the trainer requests."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        super().__init__()
        self.messages = messages


class JudgeError(Exception):
    """The reply of the judge does not contain one valid verdict for each assertion."""


class ScriptedParticipant:
    """An agent or a user for the orchestrator. `Episode.say` sets its next message.

    `is_stop` is true for a message without tool calls that contains `stop_token`. If `stop_token` is None,
    `is_stop` is always false. The orchestrator calls `is_stop` of the agent only. For messages of the user,
    it calls `is_stop` of tau2's UserSimulator.
    """

    def __init__(self, stop_token: str | None) -> None:
        self.next_message: Any = None
        self._stop_token = stop_token

    def get_init_state(self, message_history: Any = None) -> None:
        return None

    def generate_next_message(self, message: Any, state: None) -> tuple[Any, None]:
        return self.next_message, state

    def is_stop(self, message: Any) -> bool:
        return (
            self._stop_token is not None
            and not message.is_tool_call()
            and self._stop_token in (message.content or "")
        )

    def stop(self, message: Any = None, state: None = None) -> None:
        """Do nothing: no resources are held."""


class Episode:
    """One trial of one task."""

    def __init__(self, domain: str, task: Any, *, max_steps: int, max_errors: int) -> None:
        from tau2.orchestrator.orchestrator import Orchestrator
        from tau2.registry import registry
        from tau2.user.user_simulator_base import STOP

        self.domain, self.task = domain, task
        self._participants = {AGENT: ScriptedParticipant(STOP), USER: ScriptedParticipant(None)}
        self._num_shown = {AGENT: 0, USER: 0}
        self._num_calls = 0
        self.num_writes = 0  # the agent's calls of tools that may change the database
        self.environment = registry.get_env_constructor(domain)()
        self.orchestrator = Orchestrator(
            domain=domain,
            agent=self._participants[AGENT],
            user=self._participants[USER],
            environment=self.environment,
            task=task,
            max_steps=max_steps,
            max_errors=max_errors,
        )
        self.orchestrator._run_start_time, self.orchestrator._run_start_perf = "", time.perf_counter()
        self.orchestrator.initialize()
        self._advance()

    @property
    def speaker(self) -> str:
        """Who speaks next: AGENT, USER, or OVER if the conversation has ended."""
        if self.orchestrator.done:
            return OVER
        return AGENT if self.orchestrator.to_role.value == "agent" else USER

    def say(self, content: str | None, tool_calls: list[dict[str, Any]]) -> None:
        """Add a message of `speaker`. Raises ValueError if the message is empty."""
        from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
        from tau2.utils.utils import get_now

        requestor = "assistant" if self.speaker == AGENT else "user"
        calls = [
            ToolCall(id=f"call_{number}", name=call["name"], arguments=call["arguments"], requestor=requestor)
            for number, call in enumerate(tool_calls, self._num_calls + 1)
        ]
        self._num_calls += len(calls)
        if self.speaker == AGENT:
            self.num_writes += sum(
                self.environment._has_tool(call.name) and self.environment._is_mutating_tool(call.name)
                for call in calls
            )
        kind = AssistantMessage if self.speaker == AGENT else UserMessage
        self._participants[self.speaker].next_message = kind(
            role=requestor, content=content, tool_calls=calls or None, timestamp=get_now()
        )
        self._step()
        self._advance()

    def unseen_messages(self) -> list[dict[str, Any]]:
        """Return the messages that `speaker` has not seen, in OpenAI's format.

        For the user, they include the user's own messages with the ids of their tool calls. For the agent,
        they do not include the messages that the agent added with `say`.
        """
        from tau2.agent.base_agent import is_valid_agent_history_message
        from tau2.user.user_simulator_base import is_valid_user_history_message

        if self.speaker == OVER:
            return []
        may_see = is_valid_agent_history_message if self.speaker == AGENT else is_valid_user_history_message
        messages = self.orchestrator.trajectory[self._num_shown[self.speaker] :]
        self._num_shown[self.speaker] = len(self.orchestrator.trajectory) + (self.speaker == AGENT)
        return [as_openai(message) for message in messages if may_see(message)]

    def _advance(self) -> None:
        while not self.orchestrator.done and self.orchestrator.to_role.value == "env":
            self._step()

    def _step(self) -> None:
        self.orchestrator.step()
        self.orchestrator._check_termination()


def as_openai(message: Any) -> dict[str, Any]:
    """Convert a message to OpenAI's format. The role of the agent is `assistant`, that of the user `user`."""
    if message.role == "tool":
        return {"role": "tool", "content": message.content, "tool_call_id": message.id}
    shown: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return shown


class EpisodeServer:
    """The operations that requests name (`op`), and the episodes of this worker."""

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}

    def tasks(
        self, *, domain: str, split: str | None, definitions: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return the official tasks of a split (None: of all splits), or a task for each definition.

        The records contain the gold actions, because scripts/check_tau2.py replays them.
        """
        environment = environment_of(domain)
        tasks = (
            official_tasks(domain, split)
            if definitions is None
            else [task_from(definition) for definition in definitions]
        )
        tools = (
            {tool.name: tool.openai_schema["function"]["parameters"] for tool in environment.get_tools()}
            if definitions
            else {}
        )
        for definition in definitions or ():
            for action in definition["actions"]:
                require_callable(action, tools, task=definition["id"])
        return {"tasks": [task_record(task, environment) for task in tasks]}

    def reset(
        self,
        *,
        episode: str,
        domain: str,
        task: str,
        max_steps: int,
        max_errors: int,
        definition: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
        from tau2.user.user_simulator import UserSimulator

        tau2_task = task_of(domain, task) if definition is None else task_from(definition)
        new_episode = self.episodes[episode] = Episode(
            domain, tau2_task, max_steps=max_steps, max_errors=max_errors
        )
        environment = new_episode.environment
        user_tools = (
            None
            if environment.user_tools is None
            else environment.get_user_tools(include=tau2_task.user_tools)
        )
        simulator = UserSimulator(llm="", instructions=str(tau2_task.user_scenario), tools=user_tools)
        opening = {
            "agent_prompt": SYSTEM_PROMPT.format(
                domain_policy=environment.get_policy(), agent_instruction=AGENT_INSTRUCTION
            ),
            "agent_tools": [tool.openai_schema for tool in environment.get_tools()],
            "user_prompt": simulator.system_prompt,
            "user_tools": [tool.openai_schema for tool in user_tools or ()],
        }
        return opening | self._state(new_episode)

    def step(self, *, episode: str, content: str | None, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
        current = self.episodes[episode]
        current.say(content, tool_calls)
        return self._state(current)

    def finish(self, *, episode: str, grading: str, judge_reply: str | None) -> dict[str, Any]:
        """Return the official evaluator's result, or the messages for a judge (`judge_request`) whose reply
        the evaluator needs.
        """
        current = self.episodes[episode]
        run = current.orchestrator._finalize()
        graded: dict[str, Any] = {
            "reward": 0.0,
            "breakdown": {},
            "termination": str(run.termination_reason.value),
            "eval_error": None,
        }
        try:
            info = evaluated(current, run, grading=grading, judge_reply=judge_reply)
        except JudgeRequest as request:
            return {"judge_request": request.messages}
        except ValueError as error:  # the replay of the episode gave different results
            return graded | {"eval_error": str(error)}
        breakdown = {kind.value: value for kind, value in (info.reward_breakdown or {}).items()}
        return graded | {"reward": info.reward, "breakdown": breakdown}

    def drop(self, *, episode: str) -> dict[str, Any]:
        self.episodes.pop(episode, None)
        return {}

    def _state(self, current: Episode) -> dict[str, Any]:
        counts = {"tool_errors": current.orchestrator.num_errors, "writes": current.num_writes}
        return {"speaker": current.speaker, "messages": current.unseen_messages(), **counts}


def evaluated(current: Episode, run: Any, *, grading: str, judge_reply: str | None) -> Any:
    """Return tau2's evaluation of an episode. Raises JudgeRequest if the evaluator needs the judge and
    `judge_reply` is None, JudgeError for an invalid `judge_reply`, and ValueError if the evaluator's replay
    of the episode gives different results.

    `grading` is a term of tau2: `all` is the full reward, and `env` is the part that checks the end state.
    """
    from tau2.data_model.message import AssistantMessage
    from tau2.evaluator import evaluator_nl_assertions
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    def generate(*, messages: Any, **_: Any) -> Any:
        if judge_reply is None:
            raise JudgeRequest([{"role": message.role, "content": message.content} for message in messages])
        require_verdicts(judge_reply, num_assertions=len(current.task.evaluation_criteria.nl_assertions))
        return AssistantMessage(role="assistant", content=judge_reply)

    evaluator_nl_assertions.generate = generate
    return evaluate_simulation(
        simulation=run,
        task=current.task,
        evaluation_type=EvaluationType(grading),
        solo_mode=False,
        domain=current.domain,
    )


def require_verdicts(judge_reply: str, *, num_assertions: int) -> None:
    """Raise JudgeError unless every assertion has a verdict, because the evaluator would count an empty list
    of verdicts as success.
    """
    try:
        verdicts = json.loads(judge_reply)["results"]
        is_valid = [
            type(verdict["metExpectation"]) is bool
            and isinstance(verdict["expectedOutcome"], str)
            and isinstance(verdict["reasoning"], str)
            for verdict in verdicts
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JudgeError(
            f"the judge's answer cannot be read ({type(error).__name__}): {judge_reply[:200]!r}"
        ) from error
    if not all(is_valid) or len(is_valid) != num_assertions:
        raise JudgeError(
            f"the judge's answer has {len(is_valid)} verdicts, of which {sum(is_valid)} are valid, on "
            f"{num_assertions} assertions: "
            f"{judge_reply[:200]!r}"
        )


def require_callable(action: dict[str, Any], tools: dict[str, dict[str, Any]], *, task: str) -> None:
    """Raise ValueError for a gold action (a call of the solution) that no tool accepts. The evaluator would
    skip this action, and compare episodes with a wrong end state.
    """
    if action["name"] not in tools:
        raise ValueError(f"{task}: there is no tool {action['name']}")
    schema = tools[action["name"]]
    parameters, required = schema.get("properties", {}).keys(), schema.get("required", ())
    arguments = action["arguments"].keys()
    if not set(required) <= arguments or not arguments <= parameters:
        shown_parameters = (
            f"the parameters {', '.join(parameters)} (required: {', '.join(required) or 'none'})"
            if parameters
            else "no parameters"
        )
        shown_arguments = f"the arguments {', '.join(arguments)}" if arguments else "no arguments"
        raise ValueError(
            f"{task}: {action['name']} has {shown_parameters}, but the gold action has {shown_arguments}"
        )


@functools.cache
def official_tasks(domain: str, split: str | None) -> list[Any]:
    from tau2.registry import registry

    return registry.get_tasks_loader(domain)(split)


@functools.cache
def task_of(domain: str, task_id: str) -> Any:
    return {task.id: task for task in official_tasks(domain, None)}[task_id]


def task_from(definition: dict[str, Any]) -> Any:
    """Return the task that a definition describes.

    As in tau-bench, the task is graded by the end state and the communicated facts.
    """
    from tau2.data_model.tasks import Task

    actions = [{"action_id": str(number), **action} for number, action in enumerate(definition["actions"])]
    criteria = {
        "actions": actions,
        "communicate_info": definition["facts"],
        "reward_basis": ["DB", "COMMUNICATE"],
    }
    scenario = {"instructions": definition["instruction"]}
    return Task.model_validate(
        {"id": definition["id"], "user_scenario": scenario, "evaluation_criteria": criteria}
    )


@functools.cache
def environment_of(domain: str) -> Any:
    from tau2.registry import registry

    return registry.get_env_constructor(domain)()


def task_record(task: Any, environment: Any) -> dict[str, Any]:
    criteria = task.evaluation_criteria
    actions = (criteria and criteria.actions) or []
    basis = [kind.value for kind in criteria.reward_basis] if criteria else []
    return {
        "id": task.id,
        "reward_basis": basis,
        "needs_judge": bool("NL_ASSERTION" in basis and criteria.nl_assertions),
        "num_assertions": len((criteria and criteria.nl_assertions) or []),
        "has_writes": any(environment._is_mutating_tool(action.name) for action in actions),
        "gold_actions": [
            {"requestor": action.requestor, "name": action.name, "arguments": action.arguments}
            for action in actions
        ],
        "communicate_info": (criteria and criteria.communicate_info) or [],
    }


def prepare() -> None:
    """Import tau2 without its log output, and cache the parsed database files.

    Raises ImportError if tau2-bench is not installed. The package tau2 on PyPI is unrelated to it.
    """
    # Without this variable, litellm sends a request when it is imported.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        from loguru import logger

        logger.remove()
        import tau2.environment.db
        from tau2.registry import registry
    except ImportError as error:
        package = "tau2 of sierra-research/tau2-bench (PyPI's tau2 is an unrelated package)"
        raise ImportError(f"{sys.executable} has no {package}: {error}; run scripts/setup_tau.sh") from error
    assert registry.get_domains()
    # Pydantic creates new records from the parsed file, so each episode has its own copy. This is faster than
    # a deep copy.
    tau2.environment.db.load_file = functools.cache(tau2.environment.db.load_file)


def answer(server: EpisodeServer, request: dict[str, Any]) -> dict[str, Any]:
    arguments = {name: value for name, value in request.items() if name not in ("id", "op", "timeout_s")}
    signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
    try:
        return getattr(server, request["op"])(**arguments)
    except Exception as error:  # an error fails this request, not the other episodes
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of tau2 must not mix with the replies
    limit = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def reply(record: dict[str, Any]) -> None:
        replies.write(json.dumps(record) + "\n")

    try:
        prepare()
    except ImportError as error:
        reply({"id": 0, "error": str(error)})
        return
    reply({"id": 0})
    server = EpisodeServer()
    for line in sys.stdin:
        request = json.loads(line)
        reply({"id": request["id"]} | answer(server, request))


if __name__ == "__main__":
    main()
