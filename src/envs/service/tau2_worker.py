"""The program that plays tau2 episodes, many at once, for `tau2.py`: a request per line on stdin, its reply per line on stdout.

It is run by the Python of tau2's own environment and imports nothing but the standard library and tau2. It is driven where tau2's
orchestrator takes turns: both sides of the conversation are played elsewhere, what is left here are the tools, the rules and the grading.

    {"id": 1, "op": "reset", "episode": "a", "domain": "mock", "task": "create_task_1", ...}  ->  {"id": 1, "turn": "customer", ...}
    {"id": 2, "op": "step", "episode": "a", "content": "Hello", "tool_calls": []}             ->  {"id": 2, "turn": "agent", ...}
    {"id": 3, "op": "finish", "episode": "a", "grading": "all", "judged": null}               ->  {"id": 3, "reward": 1.0, ...}

Each request names its deadline, which the kernel keeps: a tool that computes for ever (`9**9**9`) ends this process by SIGALRM.
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
AGENT, CUSTOMER, OVER = "agent", "customer", "over"


class JudgeRequest(Exception):
    """The evaluator wants a language model's answer, which is got elsewhere."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        super().__init__()
        self.messages = messages


class JudgeError(Exception):
    """The judge's answer is no verdict."""


class ScriptedParticipant:
    """A participant whose next message is put into its mouth; stands for the agent and for the customer alike."""

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
        """There is nothing to stop."""


class Episode:
    """One task being played; `turn` is whose message comes next."""

    def __init__(self, domain: str, task: Any, *, max_steps: int, max_errors: int) -> None:
        from tau2.orchestrator.orchestrator import Orchestrator
        from tau2.registry import registry
        from tau2.user.user_simulator_base import STOP

        self.domain, self.task = domain, task
        self._puppets = {AGENT: ScriptedParticipant(STOP), CUSTOMER: ScriptedParticipant(None)}
        self._num_shown = {AGENT: 0, CUSTOMER: 0}
        self._num_calls = 0
        self.num_writes = 0  # calls of the agent's that may change the database
        self.environment = registry.get_env_constructor(domain)()
        self.play = Orchestrator(
            domain=domain,
            agent=self._puppets[AGENT],
            user=self._puppets[CUSTOMER],
            environment=self.environment,
            task=task,
            max_steps=max_steps,
            max_errors=max_errors,
        )
        self.play._run_start_time, self.play._run_start_perf = "", time.perf_counter()
        self.play.initialize()
        self._advance()

    @property
    def turn(self) -> str:
        if self.play.done:
            return OVER
        return AGENT if self.play.to_role.value == "agent" else CUSTOMER

    def say(self, content: str | None, tool_calls: list[dict[str, Any]]) -> None:
        """The message of whoever's turn it is. ValueError when it holds nothing."""
        from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
        from tau2.utils.utils import get_now

        requestor = "assistant" if self.turn == AGENT else "user"
        calls = []
        for call in tool_calls:
            self._num_calls += 1
            calls.append(
                ToolCall(
                    id=f"call_{self._num_calls}",
                    name=call["name"],
                    arguments=call["arguments"],
                    requestor=requestor,
                )
            )
        if self.turn == AGENT:
            self.num_writes += sum(
                self.environment._has_tool(call.name) and self.environment._is_mutating_tool(call.name)
                for call in calls
            )
        kind = AssistantMessage if self.turn == AGENT else UserMessage
        self._puppets[self.turn].next_message = kind(
            role=requestor, content=content, tool_calls=calls or None, timestamp=get_now()
        )
        self._step()
        self._advance()

    def news(self) -> list[dict[str, Any]]:
        """What whoever's turn it is has not been told yet, in OpenAI's format.

        The customer's own messages are among it, with the ids of their calls; the agent has its own as it wrote them.
        """
        from tau2.agent.base_agent import is_valid_agent_history_message
        from tau2.user.user_simulator_base import is_valid_user_history_message

        if self.turn == OVER:
            return []
        may_see = is_valid_agent_history_message if self.turn == AGENT else is_valid_user_history_message
        messages = self.play.trajectory[self._num_shown[self.turn] :]
        self._num_shown[self.turn] = len(self.play.trajectory) + (self.turn == AGENT)
        return [as_openai(message) for message in messages if may_see(message)]

    def _advance(self) -> None:
        while not self.play.done and self.play.to_role.value == "env":
            self._step()

    def _step(self) -> None:
        self.play.step()
        self.play._check_termination()


def as_openai(message: Any) -> dict[str, Any]:
    """Agents are `assistant` and customers `user`, whoever looks."""
    if message.role == "tool":
        return {"role": "tool", "content": message.content, "tool_call_id": message.id}
    shown: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        names = zip(message.tool_calls, calls, strict=True)
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function} for call, function in names
        ]
    return shown


class Player:
    """The operations, and the episodes they are about."""

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}

    def tasks(
        self, *, domain: str, split: str | None, definitions: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """The official tasks of a split (None: all of them), or those that are defined.

        What only the grading may know is left out, but for the gold actions, which checks replay.
        """
        environment = environment_of(domain)
        found = (
            official_tasks(domain, split)
            if definitions is None
            else [defined(definition) for definition in definitions]
        )
        tools = (
            {tool.name: tool.openai_schema["function"]["parameters"] for tool in environment.get_tools()}
            if definitions
            else {}
        )
        for definition in definitions or ():
            for action in definition["actions"]:
                require_callable(action, tools, task=definition["id"])
        return {"tasks": [described(task, environment) for task in found]}

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

        found = task_of(domain, task) if definition is None else defined(definition)
        begun = self.episodes[episode] = Episode(domain, found, max_steps=max_steps, max_errors=max_errors)
        environment = begun.environment
        customer_tools = (
            None if environment.user_tools is None else environment.get_user_tools(include=found.user_tools)
        )
        simulator = UserSimulator(llm="", instructions=str(found.user_scenario), tools=customer_tools)
        opening = {
            "agent_prompt": SYSTEM_PROMPT.format(
                domain_policy=environment.get_policy(), agent_instruction=AGENT_INSTRUCTION
            ),
            "agent_tools": [tool.openai_schema for tool in environment.get_tools()],
            "customer_prompt": simulator.system_prompt,
            "customer_tools": [tool.openai_schema for tool in customer_tools or ()],
        }
        return opening | self._state(begun)

    def step(self, *, episode: str, content: str | None, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
        playing = self.episodes[episode]
        playing.say(content, tool_calls)
        return self._state(playing)

    def finish(self, *, episode: str, grading: str, judged: str | None) -> dict[str, Any]:
        """The official evaluator's word on an episode that is over, or what it wants to ask a judge (`ask`) before it has one."""
        playing = self.episodes[episode]
        run = playing.play._finalize()
        graded: dict[str, Any] = {
            "reward": 0.0,
            "breakdown": {},
            "termination": str(run.termination_reason.value),
            "eval_error": None,
        }
        try:
            info = evaluated(playing, run, grading=grading, judged=judged)
        except JudgeRequest as asked:
            return {"ask": asked.messages}
        except ValueError as error:  # a replay that differs from what was played
            return graded | {"eval_error": str(error)}
        breakdown = {kind.value: value for kind, value in (info.reward_breakdown or {}).items()}
        return graded | {"reward": info.reward, "breakdown": breakdown}

    def drop(self, *, episode: str) -> dict[str, Any]:
        self.episodes.pop(episode, None)
        return {}

    def _state(self, playing: Episode) -> dict[str, Any]:
        counts = {"tool_errors": playing.play.num_errors, "writes": playing.num_writes}
        return {"turn": playing.turn, "messages": playing.news(), **counts}


def evaluated(playing: Episode, run: Any, *, grading: str, judged: str | None) -> Any:
    """`grading` is tau2's own name of what counts: `all` for the task's whole basis, `env` for the end state alone."""
    from tau2.data_model.message import AssistantMessage
    from tau2.evaluator import evaluator_nl_assertions
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    def generate(*, messages: Any, **_: Any) -> Any:
        if judged is None:
            raise JudgeRequest([{"role": message.role, "content": message.content} for message in messages])
        require_verdicts(judged, num_assertions=len(playing.task.evaluation_criteria.nl_assertions))
        return AssistantMessage(role="assistant", content=judged)

    evaluator_nl_assertions.generate = generate
    return evaluate_simulation(
        simulation=run,
        task=playing.task,
        evaluation_type=EvaluationType(grading),
        solo_mode=False,
        domain=playing.domain,
    )


def require_verdicts(judged: str, *, num_assertions: int) -> None:
    """Misjudged unless every assertion has its verdict: the evaluator would take an empty list for success."""
    try:
        verdicts = json.loads(judged)["results"]
        fair = [
            type(verdict["metExpectation"]) is bool and verdict.keys() >= {"expectedOutcome", "reasoning"}
            for verdict in verdicts
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JudgeError(
            f"the judge's answer cannot be read ({type(error).__name__}): {judged[:200]!r}"
        ) from error
    if not all(fair) or len(fair) != num_assertions:
        raise JudgeError(
            f"the judge's answer has {sum(fair)} verdicts on {num_assertions} assertions: {judged[:200]!r}"
        )


def require_callable(action: dict[str, Any], tools: dict[str, dict[str, Any]], *, task: str) -> None:
    """ValueError for a gold action that no tool would take: the evaluator would pass over it, and compare with what it left undone."""
    if action["name"] not in tools:
        raise ValueError(f"{task}: there is no tool {action['name']}")
    parameters = tools[action["name"]]
    known, needed, given = (
        parameters.get("properties", {}).keys(),
        set(parameters.get("required", ())),
        action["arguments"].keys(),
    )
    if not needed <= given or not given <= known:
        raise ValueError(
            f"{task}: {action['name']} takes {', '.join(known) or 'nothing'}, not {', '.join(given) or 'nothing'}"
        )


@functools.cache
def official_tasks(domain: str, split: str | None) -> list[Any]:
    from tau2.registry import registry

    return registry.get_tasks_loader(domain)(split)


@functools.cache
def task_of(domain: str, task_id: str) -> Any:
    return {task.id: task for task in official_tasks(domain, None)}[task_id]


def defined(definition: dict[str, Any]) -> Any:
    """A task that is not the benchmark's, graded as tau-bench's were: by the end state and what was told."""
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


def described(task: Any, environment: Any) -> dict[str, Any]:
    criteria = task.evaluation_criteria
    actions = (criteria and criteria.actions) or []
    basis = [kind.value for kind in criteria.reward_basis] if criteria else []
    return {
        "id": task.id,
        "reward_basis": basis,
        "needs_judge": bool("NL_ASSERTION" in basis and criteria.nl_assertions),
        "num_assertions": len((criteria and criteria.nl_assertions) or []),
        "gold_writes": any(environment._is_mutating_tool(action.name) for action in actions),
        "gold_actions": [
            {"requestor": one.requestor, "name": one.name, "arguments": one.arguments} for one in actions
        ],
        "communicate_info": (criteria and criteria.communicate_info) or [],
    }


def prepare() -> None:
    """Imports tau2 quietly, and has each database file parsed once. ImportError for the unrelated package of that name."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else litellm asks the network at import
    try:
        from loguru import logger

        logger.remove()
        import tau2.environment.db
        from tau2.registry import registry
    except ImportError as error:
        wanted = "tau2 of sierra-research/tau2-bench (PyPI's tau2 is an unrelated package)"
        raise ImportError(f"{sys.executable} has no {wanted}: {error}; run scripts/setup_tau.sh") from error
    assert registry.get_domains()
    # Pydantic builds every record anew from the parsed text; that is the copy each episode needs, in less time than a deep copy takes.
    tau2.environment.db.load_file = functools.cache(tau2.environment.db.load_file)


def answer(player: Player, request: dict[str, Any]) -> dict[str, Any]:
    arguments = {name: value for name, value in request.items() if name not in ("id", "op", "timeout_s")}
    signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
    try:
        return getattr(player, request["op"])(**arguments)
    except Exception as error:  # the border: one request fails, not the others' episodes
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tau2 prints is no reply
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
    player = Player()
    for line in sys.stdin:
        request = json.loads(line)
        reply({"id": request["id"]} | answer(player, request))


if __name__ == "__main__":
    main()
