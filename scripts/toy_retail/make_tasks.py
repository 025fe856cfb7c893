"""Write the toy_retail domain: python -m scripts.toy_retail.make_tasks [DIRECTORY]

The default of DIRECTORY is datasets/toy_retail. The output is deterministic. The orders, products, customers
and streets of test tasks have names that occur in no training task and no demonstration.
"""

from __future__ import annotations

import json
from pathlib import Path

from scripts.quickstart.arguments import directory_and_options
from scripts.quickstart.words import Pool
from scripts.toy_retail.task_types import TASK_TYPES, Instance, database, make_instance

ROOT = Path(__file__).resolve().parents[2] / "datasets" / "toy_retail"
TRAIN_COUNTS = dict.fromkeys(TASK_TYPES, 3) | {"cancel": 4}
TEST_COUNTS = dict.fromkeys(TASK_TYPES, 1) | {
    "cancel": 2,
    "return": 2,
    "readdress": 2,
    "exchange": 2,
    "status": 2,
    "price": 2,
    "points": 2,
}

POLICY = """You serve the customers of a small shop.
Look an order up before you change it.
Cancel an order only while it is pending.
Take an order back only when it is delivered.
Change the address or the product of an order only while it is pending.
What these rules do not allow you decline, and you change nothing.
Ask for what you need to know, and tell customers what they ask for.
Say when it is done.
"""


def instances(split: str) -> dict[str, Instance]:
    """Return the instances of a split by task id."""
    counts, pool = (TRAIN_COUNTS, Pool.TRAIN) if split == "train" else (TEST_COUNTS, Pool.HELD_OUT)
    return {
        f"{task_type}-{split}-{number}": make_instance(task_type, seed=f"task-{number}", pool=pool)
        for task_type, count in counts.items()
        for number in range(1, count + 1)
    }


def row(task_id: str, instance: Instance, *, split: str) -> dict[str, object]:
    return {
        "id": task_id,
        "split": split,
        "instruction": " ".join(request.instruction for request in instance.requests),
        "scripts": [list(script) for script in instance.scripts],
        "actions": [
            {"name": action.name, "arguments": dict(action.arguments)} for action in instance.actions
        ],
        "communicate": instance.communicate,
    }


def main() -> None:
    root, _ = directory_and_options(__doc__, ROOT)
    root.mkdir(parents=True, exist_ok=True)
    by_split = {split: instances(split) for split in ("train", "test")}
    rows = [
        row(task_id, instance, split=split)
        for split, by_id in by_split.items()
        for task_id, instance in by_id.items()
    ]
    records = database([instance for by_id in by_split.values() for instance in by_id.values()])
    (root / "policy.md").write_text(POLICY)
    (root / "db.json").write_text(json.dumps(records, indent=1) + "\n")
    (root / "tasks.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
