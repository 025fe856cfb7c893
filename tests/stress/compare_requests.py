"""Compares how two versions of the server handle the same mutated request bodies.

    python -m tests.stress.compare_requests other_tree=DIR [bodies=15000] [seed=0]

`other_tree` is a directory with a checkout or an unpacked `git archive` of another commit. The program passes
every body to the same parser or route of both versions. Both must return the same operation, or an error of
the same class or status. If two errors differ only in their message, they are reported as
reworded, unless `INTENDED_DIFFERENCES` lists the difference. The exit status is 1 if results differ in more
than the message of an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import chz
import httpx

ROOT = Path(__file__).resolve().parents[2]
INTENDED_DIFFERENCES = (("(ask=", "(sampling="),)
"""Pairs (text in the other tree, text in this tree)."""
SPECIAL = (
    None,
    True,
    False,
    -1,
    0,
    1,
    63,
    64,
    2**31,
    2**63,
    2**200,
    0.5,
    -0.5,
    1e400,
    "",
    "s",
    "text",
    [],
    {},
)
RANDOM_IDS = re.compile(r"[0-9a-f]{16,32}")
ROUTES_SHARE = 0.2


@chz.chz
class CompareOptions:
    """Options"""

    other_tree: str = chz.field(doc="Directory of another version of this repository")
    bodies: int = chz.field(default=15_000, doc="Number of request bodies")
    seed: int = chz.field(default=0, doc="Seed of the mutations")

    @chz.validate
    def _other_tree_has_the_repository(self) -> None:
        if not (Path(self.other_tree) / "tests" / "fakes" / "bodies.py").is_file():
            raise ValueError(f"other_tree={self.other_tree} has no tests/fakes/bodies.py; give a checkout")


def mutate(rng: random.Random, value: object) -> object:
    """Return `value` with one element replaced, removed, renamed or duplicated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        choice = rng.random()
        if choice < 0.2:
            return {key: entry for key, entry in value.items() if key != name}
        if choice < 0.3:
            return {f"{key}x" if key == name else key: entry for key, entry in value.items()}
        return value | {name: mutate(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], mutate(rng, value[index]), *value[index + rng.randrange(2) :]]
    return rng.choice(SPECIAL)


def outcomes(number: int, seed: int) -> list[str]:
    """Return the outcomes of `number` bodies in the version that `sys.path` selects."""
    bodies = importlib.import_module("tests.fakes.bodies")
    errors = importlib.import_module("skyrl_tx_server.errors")
    fuzz = importlib.import_module("tests.server.test_fuzz")
    rng, results = random.Random(seed), []
    request = bodies.pb.ForwardBackwardRequest
    valid_messages = [  # deterministic=True fixes the order of map entries
        request.FromString(message).SerializeToString(deterministic=True) for message in bodies.VALID_MESSAGES
    ]
    for _ in range(int(number * (1 - ROUTES_SHARE))):
        name = rng.choice([*sorted(bodies.PARSERS), "protobuf"])
        try:
            if name == "protobuf":
                message = bytearray(rng.choice(valid_messages))
                # Change only one byte. With two invalid loss inputs, the order of the protobuf map, which is
                # not fixed, would decide which of them is reported.
                message[rng.randrange(len(message))] = rng.randrange(256)
                parsed = bodies.parse_training_proto(bytes(message), bodies.LIMITS)
            else:
                body = bodies.VALID[name]
                for _ in range(rng.randint(1, 3)):
                    body = mutate(rng, body)
                parsed = bodies.PARSERS[name](body)
            result = re.sub(r"seed=\d{3,}", "seed=", repr(parsed))
        except errors.UserError as error:
            result = f"{type(error).__name__}: {error}"
            if name == "protobuf":
                # If the datum has no tokens, every loss input is invalid, and the order of the map decides
                # which of them is reported.
                result = re.sub(r": \w+ has (\d+) entries for 0", r": an input has \1 entries for 0", result)
        results.append(f"{name}: {result}")
    return results + asyncio.run(replies(rng, number - len(results), bodies.ROUTES, fuzz.FIELDS))


async def replies(
    rng: random.Random, number: int, routes: tuple[str, ...], fields: dict[str, object]
) -> list[str]:
    """Return the status and the text of the responses to `number` requests."""
    server = importlib.import_module("tests.fakes.server")
    futures = importlib.import_module("skyrl_tx_server.engine.futures")
    app = importlib.import_module("skyrl_tx_server.http.app")
    startup = importlib.import_module("skyrl_tx_server.http.http_handler").StartupState
    first_field = dataclasses.fields(startup)[0].name  # the name of this field depends on the version
    results = []
    with tempfile.TemporaryDirectory() as directory:
        context = server.fake_context(Path(directory), retention=futures.Retention(hold_s=0.001))
        transport = httpx.ASGITransport(app.build_app(startup(**{first_field: context})))
        async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as http:
            for _ in range(number):
                route = rng.choice(routes)
                names = rng.sample(sorted(fields), rng.randint(1, len(fields)))
                body = mutate(rng, {name: fields[name] for name in names})
                content = json.dumps(body, allow_nan=True).encode("utf-8", "surrogatepass")
                reply = await http.post(route, content=content, headers={"content-type": "application/json"})
                text = RANDOM_IDS.sub("ID", reply.text)
                results.append(f"{route}: {reply.status_code} {text}")
        server.fake_engine(context).stop()
    return results


def error_kind(result: str) -> str | None:
    """Return the parser or route and the error class or status, without the message.

    Returns None if the parser or route accepted the body.
    """
    error = re.match(r"[\w/]+: (\w+Error: |[45]\d\d )", result)
    return None if error is None else error[0]


def main(argv: list[str]) -> int:
    # This file also runs as `outcomes` with the modules of the other version, which may lack these functions.
    from src.cli.command_line import help_for, parse_as
    from src.cli.program import run_program

    title = ["python -m tests.stress.compare_requests other_tree=DIR [key=value ...]"]
    return run_program(
        argv,
        lambda arguments: compare(parse_as(CompareOptions, arguments)),
        lambda words: help_for(CompareOptions, title=title, words=words),
        label="compare_requests",
    )


def compare(options: CompareOptions) -> int:
    results = []
    for tree in (Path(options.other_tree).resolve(), ROOT):
        command = [sys.executable, __file__, "outcomes", str(options.bodies), str(options.seed)]
        process = subprocess.run(
            command, cwd=tree, env={"PYTHONPATH": str(tree), "PATH": ""}, stdout=subprocess.PIPE, check=True
        )
        results.append(json.loads(process.stdout))
    different = reworded = 0
    for other_result, result in zip(*results, strict=True):
        expected = other_result
        for old, new in INTENDED_DIFFERENCES:
            expected = expected.replace(old, new)
        if expected != result:
            message_only = (kind := error_kind(result)) is not None and kind == error_kind(expected)
            different, reworded = different + (not message_only), reworded + message_only
            print(f"{'reworded' if message_only else 'DIFFERENT'}\n- {other_result[:400]}\n+ {result[:400]}")
    accepted = sum(error_kind(result) is None for result in results[1])
    print(f"{len(results[1])} bodies, {accepted} accepted, {different} different, {reworded} errors reworded")
    return int(different > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["outcomes"]:
        print(json.dumps(outcomes(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        sys.exit(main(sys.argv[1:]))
