"""The types of toy_retail tasks: the requests of users, their wordings and the gold actions.

A request contains its database records, so that any number of new tasks can be generated for demonstrations.
Names come from one of two disjoint pools of words (scripts/quickstart/words.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scripts.quickstart.words import Pool, Words
from src.envs.service.toy_retail import Database

STATUSES = ("pending", "shipped", "delivered")


@dataclass(frozen=True, kw_only=True)
class Action:
    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a user."""

    # The messages of the user in each wording of the request. If a wording has a second message, the agent
    # has to ask for the information in the second message.
    wordings: Sequence[Sequence[str]]
    question: str  # the agent's question, which the second message answers
    instruction: str  # the instruction for a user simulator that uses a model
    lookup: Action
    write: Action | None = None  # None: the user wants no change, or the policy forbids it
    tell: str = ""  # the fact that the agent has to communicate, if any
    answer: str  # the last message of an agent without mistakes
    records: Database


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A generated task without an id. `scripts` has one list of user messages for each wording."""

    task_type: str
    requests: Sequence[Request]
    scripts: Sequence[Sequence[str]] = field(default=())

    @property
    def actions(self) -> list[Action]:
        """The gold actions, including the look-ups."""
        return [
            action
            for request in self.requests
            for action in (request.lookup, request.write)
            if action is not None
        ]

    @property
    def communicate(self) -> list[str]:
        return [request.tell for request in self.requests if request.tell]


def order(words: Words, status: str) -> tuple[str, Database]:
    """Return the id of a new order, and the records of the order and its product."""
    name, product = words.word(), words.word()
    records: Database = {
        "orders": {
            name: {
                "status": status,
                "product": product,
                "address": f"{words.random.randint(2, 98)} {words.word()}",
            }
        },
        "products": {product: {"price": words.random.randint(11, 98)}},
        "customers": {},
    }
    return name, records


def change(
    words: Words, *, verb: str, tool: str, allowed: str, status: str, arguments: Mapping[str, str], wish: str
) -> Request:
    """Return a request to change an order. The policy permits the change only if the order's status is
    `allowed`."""
    name, records = order(words, status)
    if "product" in arguments:
        records["products"][arguments["product"]] = {"price": words.random.randint(11, 98)}
    return Request(
        wordings=[
            [f"Please {verb} order {name}{wish}."],
            [f"I want to {verb} order {name}{wish}."],
            [f"I want to {verb} an order{wish}.", f"It is order {name}."],
        ],
        question="Which order?",
        instruction=f"You want to {verb} order {name}{wish}.",
        lookup=Action(name="get_order", arguments={"order": name}),
        write=Action(name=tool, arguments={"order": name, **arguments}) if status == allowed else None,
        answer="Done." if status == allowed else "That is not possible.",
        records=records,
    )


def changing(
    verb: str, tool: str, allowed: str, *, wish: str = "", argument: str = "", refused: bool = False
) -> Callable[[Words], Request]:
    """Return a function that makes a request to change an order. With `refused`, the order has a status for
    which the policy does not permit the change."""

    def make(words: Words) -> Request:
        statuses = [status for status in STATUSES if (status == allowed) != refused]
        value = f"{words.random.randint(2, 98)} {words.word()}" if argument == "address" else words.word()
        return change(
            words,
            verb=verb,
            tool=tool,
            allowed=allowed,
            status=words.random.choice(statuses),
            arguments={argument: value} if argument else {},
            wish=wish.format(value),
        )

    return make


def status(words: Words) -> Request:
    value = words.random.choice(STATUSES)
    name, records = order(words, value)
    return Request(
        wordings=[
            [f"What is the status of order {name}?"],
            [f"Where is order {name}?"],
            ["Where is my order?", f"It is order {name}."],
        ],
        question="Which order?",
        instruction=f"You want to know the status of order {name}.",
        lookup=Action(name="get_order", arguments={"order": name}),
        tell=value,
        answer=f"It is {value}.",
        records=records,
    )


def price(words: Words) -> Request:
    name, value = words.word(), words.random.randint(11, 98)
    return Request(
        wordings=[
            [f"What does {name} cost?"],
            [f"How much is {name}?"],
            ["How much is a product?", f"I mean {name}."],
        ],
        question="Which product?",
        instruction=f"You want to know what {name} costs.",
        lookup=Action(name="get_product", arguments={"product": name}),
        tell=str(value),
        answer=f"It costs {value}.",
        records={"orders": {}, "products": {name: {"price": value}}, "customers": {}},
    )


def points(words: Words) -> Request:
    name, value = words.word(), words.random.randint(11, 98)
    return Request(
        wordings=[
            [f"I am {name}. How many points do I have?"],
            [f"How many points does {name} have?"],
            ["How many points do I have?", f"I am {name}."],
        ],
        question="Who are you?",
        instruction=f"You are {name} and want to know how many points you have.",
        lookup=Action(name="get_customer", arguments={"customer": name}),
        tell=str(value),
        answer=f"You have {value} points.",
        records={"orders": {}, "products": {}, "customers": {name: {"points": value}}},
    )


REQUESTS: Mapping[str, Callable[[Words], Request]] = {
    "cancel": changing("cancel", "cancel_order", "pending"),
    "return": changing("return", "return_order", "delivered"),
    "readdress": changing("send", "change_address", "pending", wish=" to {}", argument="address"),
    "exchange": changing("change", "change_product", "pending", wish=" to {}", argument="product"),
    "cancel-refused": changing("cancel", "cancel_order", "pending", refused=True),
    "return-refused": changing("return", "return_order", "delivered", refused=True),
    "status": status,
    "price": price,
    "points": points,
}
PAIRS = {  # task types with two consecutive requests
    "cancel-and-price": ("cancel", "price"),
    "return-and-points": ("return", "points"),
    "status-and-cancel": ("status", "cancel"),
    "price-and-return": ("price", "return"),
}
TASK_TYPES = (*REQUESTS, *PAIRS)


def make_instance(task_type: str, *, seed: str, pool: Pool) -> Instance:
    """Generate an instance. The same arguments give the same instance."""
    rng = random.Random(f"toy_retail {task_type} {seed} {pool}")
    words = Words(random=rng, pool=pool, used=set())
    requests = [REQUESTS[name](words) for name in PAIRS.get(task_type, (task_type,))]
    # In a pair, each request is one message, so only the wordings without a second message are used.
    first_wordings = requests[0].wordings if len(requests) == 1 else requests[0].wordings[:2]
    scripts = [
        [*wording, *(line for request in requests[1:] for line in request.wordings[number % 2])]
        for number, wording in enumerate(first_wordings)
    ]
    return Instance(task_type=task_type, requests=requests, scripts=scripts)


def database(instances: Sequence[Instance]) -> Database:
    """Merge the records of the instances. Two records of one table must have different names."""
    merged: Database = {"orders": {}, "products": {}, "customers": {}}
    for request in (request for instance in instances for request in instance.requests):
        for table, records in request.records.items():
            assert not merged[table].keys() & records.keys(), f"two records of {table} share a name"
            merged[table] |= records
    return merged
