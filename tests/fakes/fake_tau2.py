"""A fake tau2 worker. It has the requests, replies and failures of the real worker, but few and small tasks.

Every domain has the same tasks, except `telecom`, for which `tasks` returns an error. The reward is 1 if the
agent has called `save`. The tool `calculate` ends the worker with SIGALRM, as a timeout does in the real
worker. The tool `die` ends the worker with status 3. The tasks `judged-*` require a judge. For the tasks
`broken-*`, `finish` reports an evaluation error and the reward 0.
"""

import json
import os
import signal
import sys
from typing import Any

GREETING = {"role": "assistant", "content": "Hi! How can I help you today?"}
episodes: dict[str, dict[str, Any]] = {}


def schema(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }


def task_row(name: str, split: str) -> dict[str, Any]:
    return {"id": f"{name}-{split}", "needs_judge": name == "judged", "has_writes": name != "judged"}


def tasks(
    *, domain: str, split: str | None, definitions: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    if domain == "telecom":
        return {"error": "FileNotFoundError: tasks.json"}
    if definitions is not None:
        return {
            "tasks": [
                {
                    "id": definition["id"],
                    "needs_judge": False,
                    "has_writes": bool(definition["actions"]),
                }
                for definition in definitions
            ]
        }
    splits = ("train", "test") if split is None else (split,)
    return {"tasks": [task_row(name, split) for split in splits for name in ("save", "judged", "broken")]}


def reset(
    *,
    episode: str,
    domain: str,
    task: str,
    max_steps: int,
    max_errors: int,
    definition: dict[str, Any] | None,
) -> dict[str, Any]:
    episodes[episode] = {
        "task": task,
        "speaker": "user",
        "saved": 0,
        "errors": 0,
        "opening": [GREETING],
        "user_messages": [],
    }
    prompt = {"agent_prompt": f"policy of {domain}", "agent_tools": [schema("save"), schema("calculate")]}
    scenario = "save it" if definition is None else definition["instruction"]
    user = {
        "user_prompt": f"guidelines <scenario>\n{scenario}\n</scenario>",
        "user_tools": [schema("look")],
    }
    return prompt | user | state(episode, [GREETING])


def step(*, episode: str, content: str | None, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
    conversation = episodes[episode]
    if conversation["speaker"] == "user":
        if tool_calls:
            tool_result = {
                "role": "tool",
                "tool_call_id": "c1",
                "content": f"saw {tool_calls[0]['arguments']}",
            }
            return state(
                episode, [{"role": "user", "content": "", "tool_calls": calls(tool_calls)}, tool_result]
            )
        conversation["speaker"] = "over" if "###" in str(content) else "agent"
        conversation["user_messages"] = [{"role": "user", "content": content}]
        opening, conversation["opening"] = conversation["opening"], []
        return state(
            episode, [*opening, *conversation["user_messages"]] if conversation["speaker"] == "agent" else []
        )
    if not tool_calls:
        conversation["speaker"] = "user"
        # The result includes the messages of the user, as in tau2's worker.
        return state(episode, [*conversation["user_messages"], {"role": "assistant", "content": content}])
    return state(
        episode, [{"role": "tool", "content": run_tool(conversation, call["name"])} for call in tool_calls]
    )


def run_tool(conversation: dict[str, Any], name: str) -> str:
    if name == "calculate":
        os.kill(os.getpid(), signal.SIGALRM)
    if name == "die":
        os._exit(3)
    conversation["saved"] += name == "save"
    conversation["errors"] += name != "save"
    return "saved" if name == "save" else "Error: no such tool"


def finish(*, episode: str, grading: str, judge_reply: str | None) -> dict[str, Any]:
    conversation = episodes[episode]
    if conversation["task"].startswith("judged") and grading == "all":
        if judge_reply is None:
            return {"judge_request": [{"role": "user", "content": "was it polite?"}]}
        if judge_reply != "yes":
            return {"error": "JudgeError: the judge's answer cannot be read"}
    reward = float(conversation["saved"] > 0)
    if conversation["task"].startswith("broken"):
        return {
            "reward": 0.0,
            "breakdown": {},
            "termination": "user_stop",
            "eval_error": "Tool call returned something else",
        }
    return {"reward": reward, "breakdown": {"DB": reward}, "termination": "user_stop", "eval_error": None}


def drop(*, episode: str) -> dict[str, Any]:
    episodes.pop(episode, None)
    return {}


def calls(tool_calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": f"c{number}", "type": "function", "function": call}
        for number, call in enumerate(tool_calls, 1)
    ]


def state(episode: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    conversation = episodes[episode]
    return {
        "speaker": conversation["speaker"],
        "messages": messages,
        "tool_errors": conversation["errors"],
        "writes": conversation["saved"],
    }


OPERATIONS = {"tasks": tasks, "reset": reset, "step": step, "finish": finish, "drop": drop}

print(json.dumps({"id": 0}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    arguments = {name: value for name, value in request.items() if name not in ("id", "op", "timeout_s")}
    print(json.dumps({"id": request["id"], **OPERATIONS[request["op"]](**arguments)}), flush=True)
