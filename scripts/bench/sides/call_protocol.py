"""The protocol between a benchmark and a program that it compares: the program reads one JSON call per line
of standard input, and answers with the result and the times of the call.

The module uses the standard library of Python 3.11 only, because each compared program imports the module in
its own interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping


def serve(start: Callable[[], Mapping[str, Callable[..., object]]]) -> None:
    """Call `start`, which returns the methods by name. Write a first line, which shows that the program is
    ready, and then answer calls until standard input ends. What libraries print goes to standard error,
    because standard output carries the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    methods = start()
    answers.write(json.dumps({"ready": sorted(methods)}) + "\n")
    answers.flush()
    for line in sys.stdin:
        call = json.loads(line)
        began, cpu = time.perf_counter(), time.process_time()
        result = methods[call["method"]](**call["arguments"])
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        answers.write(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "result": result}) + "\n")
        answers.flush()
