"""Coverage-guided fuzzing of the request parsers with atheris, which needs an environment of its own:

    uv venv --python 3.12 VENV && uv pip install --python VENV/bin/python atheris hypothesis ml-dtypes numpy protobuf
    VENV/bin/python -m tests.stress.fuzz TARGET [libFuzzer options, for example -max_total_time=300]

TARGET: `bytes` (a protobuf body as it comes), `text` (a JSON body as it comes, to every parser), `messages` and `json` (bodies that begin
valid, drawn by the strategies of tests/server/test_fuzz.py). Ends with libFuzzer's figures; a finding ends it at once with its traceback.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

with atheris.instrument_imports(include=["skyrl_tx_server"]):  # pyright: ignore[reportAttributeAccessIssue]
    from tests.fakes.bodies import PARSERS, VALID, VALID_MESSAGES, json_holds, messages, mutated, protobuf_holds, values

from hypothesis import given, settings
from hypothesis import strategies as st


def text(data: bytes) -> None:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    for name in PARSERS:
        json_holds(name, body)


@settings(deadline=None)
@given(body=messages())
def drawn_messages(body: bytes) -> None:
    protobuf_holds(body)


@settings(deadline=None)
@given(name=st.sampled_from(sorted(PARSERS)), data=st.data())
def drawn_json(name: str, data: st.DataObject) -> None:
    json_holds(name, data.draw(st.one_of(mutated(VALID[name], changes=4), values)))


TARGETS = {
    "bytes": protobuf_holds,
    "text": text,
    "messages": lambda data: drawn_messages.hypothesis.fuzz_one_input(data),  # pyright: ignore[reportFunctionMemberAccess]
    "json": lambda data: drawn_json.hypothesis.fuzz_one_input(data),  # pyright: ignore[reportFunctionMemberAccess]
}
SEEDS = {"bytes": VALID_MESSAGES, "text": [json.dumps(body).encode() for body in VALID.values()]}

if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]

    def one_input(data: bytes) -> None:
        target(data)

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS.get(sys.argv[1], ())):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], corpus, "-print_final_stats=1", *sys.argv[2:]], one_input)
        atheris.Fuzz()
