"""`python -m src.envs.data.grading_worker math|regex`: compares answers with references. The worker reads
requests (<-) and writes replies (->) as lines of JSON.

    -> {"id": 0}                     the worker is ready
    <- {"id": 1, "timeout_s": 10, "reference": "1/2", "answer": "It is 0.5."}
    -> {"id": 1, "equal": true}

The comparison of an answer such as 9^9^9^9 may run forever, and Python cannot interrupt it. SIGALRM therefore
ends the process at the deadline of a request. The memory of the process is limited.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable

MAX_MEMORY_BYTES = 2 << 30


def open_comparison(name: str) -> Callable[[str, str], bool]:
    """Return a function that takes reference and answer and returns whether the answer is correct.

    `regex`: the reference is a regular expression that matches a part of the answer. `math`: reference and
    answer have the same value, according to the package math-verify.
    """
    if name == "regex":
        return lambda reference, answer: re.search(reference, answer) is not None
    from math_verify import parse, verify  # imports sympy, which takes a second

    def has_same_value(reference: str, answer: str) -> bool:
        # The timeouts of math-verify are off, because they would install a handler for SIGALRM.
        gold = parse(f"${reference}$", parsing_timeout=0) or parse(reference, parsing_timeout=0)
        return verify(gold, parse(answer, parsing_timeout=0), timeout_seconds=0)

    has_same_value("1", "$1$")  # builds the parser, which takes another second
    return has_same_value


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    is_equal = open_comparison(sys.argv[1])
    print(json.dumps({"id": 0}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            equal = is_equal(request["reference"], request["answer"])
        except Exception:  # an answer that cannot be evaluated is not equal to the reference
            equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"id": request["id"], "equal": equal}), file=replies, flush=True)


if __name__ == "__main__":
    main()
