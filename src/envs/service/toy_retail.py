"""toy_retail, a small service domain: eight tools over a JSON database, a written policy, user simulators
and tau2's grading.

The domain is a directory, by default datasets/toy_retail:

    db.json       {"orders": {id: {...}}, "products": {name: {...}}, "customers": {id: {...}}}
    policy.md     the rules for the agent, which the tools do not enforce
    tasks.json    a list of tasks with id, split, instruction, scripts (each a list of lines that a scripted
                  user says), actions (the gold actions, which are the calls of a solution), communicate
                  (facts that the user must be told)

The reward is 1 if the database equals the result of the gold actions and the agent communicated every fact;
otherwise it is 0.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.core.errors import ConfigError
from src.envs.message_env import ResetResult
from src.envs.service.service_env import ActionResult, Grade
from src.envs.service.tool_calls import ToolCall
from src.envs.service.user_simulator import (
    STOP,
    ScriptedUserSimulator,
    UserSimulator,
    ends,
)
from src.policy.chat import Message

NAME = "toy_retail"
INSTRUCTIONS = (  # the prompt of the model of a user simulator
    "You are a customer of a shop and talk to its service agent. {}\n"
    "Say one short thing at a time and only what is asked or needed. Once you have what you want, or the "
    "agent says that it is not "
    f"possible, answer {STOP} and nothing else."
)
ROW_KEYS = {"id", "split", "instruction", "scripts", "actions", "communicate"}
DIRECTORY = Path(__file__).resolve().parents[3] / "datasets" / NAME

Database = dict[str, dict[str, dict[str, Any]]]  # table -> key -> record


class ToolError(ValueError):
    """A call failed. The agent sees the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: Sequence[str]  # all are required strings
    run: Callable[..., Mapping[str, object]]  # (database, **arguments) -> the result that the agent sees
    writes: bool = False

    @property
    def schema(self) -> dict[str, object]:
        """The tool in OpenAI's format."""
        properties = {name: {"type": "string"} for name in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def record(database: Database, table: str, key: str) -> dict[str, Any]:
    if key not in database[table]:
        raise ToolError(f"there is no {table.removesuffix('s')} {key}")
    return database[table][key]


def get_order(database: Database, *, order: str) -> Mapping[str, object]:
    return record(database, "orders", order)


def get_product(database: Database, *, product: str) -> Mapping[str, object]:
    return record(database, "products", product)


def get_customer(database: Database, *, customer: str) -> Mapping[str, object]:
    return record(database, "customers", customer)


def cancel_order(database: Database, *, order: str) -> Mapping[str, object]:
    return _changed(record(database, "orders", order), status="cancelled")


def return_order(database: Database, *, order: str) -> Mapping[str, object]:
    return _changed(record(database, "orders", order), status="returned")


def change_address(database: Database, *, order: str, address: str) -> Mapping[str, object]:
    return _changed(record(database, "orders", order), address=address)


def change_product(database: Database, *, order: str, product: str) -> Mapping[str, object]:
    record(database, "products", product)
    return _changed(record(database, "orders", order), product=product)


def transfer_to_human(database: Database, *, summary: str) -> Mapping[str, object]:
    return {"transferred": True}


def _changed(entry: dict[str, Any], **values: object) -> Mapping[str, object]:
    entry.update(values)
    return values


# The formatter would write each entry in six lines.
# fmt: off
TOOLS = {tool.name: tool for tool in (
    Tool(name="get_order", description="Status, product and address of an order.",
        parameters=["order"], run=get_order),
    Tool(name="get_product", description="Price of a product.", parameters=["product"], run=get_product),
    Tool(name="get_customer", description="Points of a customer.", parameters=["customer"], run=get_customer),
    Tool(name="cancel_order", description="Cancel an order.",
        parameters=["order"], run=cancel_order, writes=True),
    Tool(name="return_order", description="Take an order back.",
        parameters=["order"], run=return_order, writes=True),
    Tool(name="change_address", description="Send an order to another address.",
        parameters=["order", "address"], run=change_address, writes=True),
    Tool(name="change_product", description="Put another product in an order.",
        parameters=["order", "product"], run=change_product, writes=True),
    Tool(name="transfer_to_human", description="Hand over what no other tool can do.",
        parameters=["summary"], run=transfer_to_human),
)}
# fmt: on


def call(
    database: Database, name: str, arguments: Mapping[str, object], tools: Mapping[str, Tool] = TOOLS
) -> Mapping[str, object]:
    """Execute a tool, which may change `database`, and return its result. Raises ToolError for an unknown
    tool or wrong arguments, or if the tool fails."""
    if name not in tools:
        raise ToolError(f"there is no tool {name}")
    tool = tools[name]
    if set(arguments) != set(tool.parameters) or not all(
        isinstance(value, str) for value in arguments.values()
    ):
        raise ToolError(f"{name} takes {', '.join(tool.parameters)}, each a string")
    return tool.run(database, **arguments)


def content_hash(database: Database) -> str:
    return hashlib.sha256(json.dumps(database, sort_keys=True).encode()).hexdigest()


def after_gold(database: Database, row: Mapping[str, Any], tools: Mapping[str, Tool] = TOOLS) -> Database:
    """Apply the gold actions of a row of tasks.json to a copy of the database, and return the copy. Raises
    ToolError if an action fails."""
    replayed = copy.deepcopy(database)
    for action in row["actions"]:
        call(replayed, action["name"], action["arguments"], tools)
    return replayed


def communicates(messages: Sequence[str], fact: str) -> bool:
    """Return whether a message contains the fact. As in tau2, case and the commas of messages are ignored."""
    return any(fact.lower() in text.lower().replace(",", "") for text in messages)


class ToyRetailEpisode:
    """An episode with tools over a JSON database. Implements `ServiceEpisode`."""

    def __init__(
        self,
        row: Mapping[str, Any],
        *,
        database: Database,
        policy: str,
        user: UserSimulator,
        tools: Mapping[str, Tool] = TOOLS,
    ) -> None:
        self._row = row
        self._tools = tools
        self._policy = policy
        self._user = user
        self._initial_database = database
        self._database = copy.deepcopy(database)
        self._conversation: list[Message] = []
        self._has_written = False

    async def start(self) -> ResetResult:
        request = await self._user_message()
        messages: list[Message] = [
            {"role": "system", "content": self._policy},
            {"role": "user", "content": request},
        ]
        return ResetResult(
            messages=messages,
            tools=[tool.schema for tool in self._tools.values()],
            use_native_tool_calling=True,
        )

    async def step(self, content: str, calls: Sequence[ToolCall]) -> ActionResult:
        if calls:
            results = [self._call(tool_call) for tool_call in calls]
            messages = [{"role": "tool", "content": result} for result, _ in results]
            return ActionResult(messages=messages, num_errors=sum(failed for _, failed in results))
        self._conversation.append({"role": "assistant", "content": content})
        if STOP in content:
            return ActionResult(is_done=True)
        reply = await self._user_message()
        return ActionResult(messages=[{"role": "user", "content": reply}], is_done=ends(reply))

    async def grade(self) -> Grade:
        answers = [
            str(message["content"]) for message in self._conversation if message["role"] == "assistant"
        ]
        database = float(
            content_hash(self._database)
            == content_hash(after_gold(self._initial_database, self._row, self._tools))
        )
        communicate = float(all(communicates(answers, fact) for fact in self._row["communicate"]))
        metrics = {
            "reward_db": database,
            "reward_communicate": communicate,
            "no_write_action": float(not self._has_written),
        }
        return Grade(reward=database * communicate, metrics=metrics)

    async def close(self) -> None:
        pass

    async def _user_message(self) -> str:
        text = await self._user.reply(self._conversation)
        self._conversation.append({"role": "user", "content": text})
        return text

    def _call(self, tool_call: ToolCall) -> tuple[str, bool]:
        """Return the text that the agent sees, and whether the call failed."""
        try:
            result = call(self._database, tool_call.name, tool_call.arguments, self._tools)
        except ToolError as error:
            return f"Error: {error}", True
        self._has_written |= self._tools[tool_call.name].writes
        return json.dumps(result), False


def scripted(row: Mapping[str, Any], seed: int) -> UserSimulator:
    """Return a user simulator that follows one script of the task, which the seed selects."""
    return ScriptedUserSimulator(random.Random(seed).choice(row["scripts"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shop:
    """The contents of a domain directory."""

    database: Database
    policy: str
    rows: Sequence[Mapping[str, Any]]


def read_shop(directory: Path) -> Shop:
    """Read a domain directory. Raises ConfigError if a file cannot be read or a row lacks a key."""
    try:
        database: Database = json.loads((directory / "db.json").read_text())
        policy = (directory / "policy.md").read_text().strip()
        rows = json.loads((directory / "tasks.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} contains no {NAME} domain ({error}); give tasks_dir=DIRECTORY with db.json, "
            "policy.md, tasks.json"
        ) from error
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, dict) or not row.keys() >= ROW_KEYS:
            raise ConfigError(
                f"{directory}/tasks.json: {json.dumps(row):.80} is not an object with "
                f"{', '.join(sorted(ROW_KEYS))}; correct it"
            )
    return Shop(database=database, policy=policy, rows=rows)
