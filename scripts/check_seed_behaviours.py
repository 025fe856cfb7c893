"""Break the behaviour of each row of docs/seed-behaviours.md that names tests, and report which test fails.

    python -m scripts.check_seed_behaviours [ROW ...]

The program changes one expression at a time (a comparison, a condition, a number, a string or a boolean). It
changes lines that the tests of the row execute in the pytest process, and starts with the files that the row
names. A row is confirmed if an assertion of one of its tests fails after one of at most MAX_CHANGES changes.
After ROW_TIMEOUT_S seconds, no further change of a row is tried. A row that is not confirmed is open. The
program lists the open rows at the end, and the exit status is 1 if there are any. Rows whose tests start
other processes often stay open, because these tests execute few lines in the pytest process. The program
changes only copies of HEAD and not the working tree; commit your edits first.

The module is also the pytest plugin that records the lines that tests execute and the type of each failure.
"""

from __future__ import annotations

import ast
import json
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs", "seed-behaviours.md")
CODE = ("src", "skyrl_tx_server", "scripts")
MAX_CHANGES = 16
TIMEOUT_S = 180
ROW_TIMEOUT_S = 120  # after this time, no further change of a row is tried
WORKERS = 2
REPORT_VARIABLE = "SEED_BEHAVIOURS_REPORT"
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
}
EMPTY_REPORT: dict[str, Any] = {"imported": {}, "lines": {}, "failures": {}}  # used if pytest wrote no report
OPPOSITES |= {opposite: operator for operator, opposite in OPPOSITES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    number: int
    places: list[str]  # the files and directories that the row names
    tests: list[str]  # node ids without parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One expression to change: the one with the number `index` among those that `candidates` yields for
    `file`."""

    file: str
    line: int
    index: int


def rows() -> list[Row]:
    """Return the rows of the page that name tests."""
    files = {
        f"server/{path.stem}" if path.parent.name == "server" else path.stem: path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    testable = []
    for line in (ROOT / PAGE).read_text().splitlines():
        if re.match(r"\| \d+ \|", line):
            number, _, _, _, places, _, test_cell = [cell.strip() for cell in line.split("|")[1:-1]]
            tests, file = [], ""
            for prefix, test in re.findall(r"`([\w/]*)::(test_\w+)`", test_cell):
                file = prefix or file
                tests.append(f"{files[file]}::{test}")
            if tests:
                testable.append(Row(number=int(number), places=re.findall(r"`([^`]+)`", places), tests=tests))
    return testable


def candidates(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the expressions that can be changed, in a fixed order."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in OPPOSITES:
                yield node
            case ast.Constant(value=bool() | int() | float() | str()) if id(node) not in docstrings:
                yield node
            case ast.If() | ast.IfExp() | ast.While():
                yield node.test
            case _:
                pass


def changed(source: str, index: int) -> str:
    """Return the source with one candidate changed. A comparison or condition is negated, and a constant gets
    another value."""
    tree = ast.parse(source)
    target = list(candidates(tree))[index]
    if isinstance(target, ast.Compare):
        target.ops = [OPPOSITES[type(target.ops[0])]()]
    elif isinstance(target, ast.Constant):
        value = target.value
        if isinstance(value, bool):
            target.value = not value
        elif isinstance(value, str):
            target.value = value + "x"
        else:
            assert isinstance(value, int | float)
            target.value = value + 1
    else:
        for node in ast.walk(tree):
            if isinstance(node, ast.If | ast.IfExp | ast.While) and node.test is target:
                node.test = ast.UnaryOp(op=ast.Not(), operand=target)
    return ast.unparse(ast.fix_missing_locations(tree))


def changes(row: Row, report: dict[str, Any]) -> list[Change]:
    """Return up to MAX_CHANGES changes on executed lines.

    The order is: lines in the places of the row that run in the tests, lines in these places that run at
    import, lines in other files that run in the tests.
    """
    groups: list[list[Change]] = [[], [], []]
    for stage, files in enumerate((report["lines"], report["imported"])):
        for file, lines in files.items():
            is_named = any(Path(file).is_relative_to(place) for place in row.places)
            for index, node in enumerate(candidates(ast.parse((ROOT / file).read_text()))):
                if node.lineno in lines and (is_named or stage == 0):
                    groups[stage if is_named else 2].append(Change(file=file, line=node.lineno, index=index))
    for group in groups:
        random.Random(row.number).shuffle(group)
    return [change for group in groups for change in group][:MAX_CHANGES]


def run_tests(tree: Path, tests: list[str]) -> dict[str, Any]:
    """Run tests in `tree`, a copy of the repository. Return a report: for each file, the lines that ran in
    the tests and the lines that ran at import; for each failed test, the type of its exception. The report is
    empty if the tests exceed TIMEOUT_S or pytest ends without a report."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        environment = os.environ | {"PYTHONPATH": str(tree), REPORT_VARIABLE: report.name}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["-p", "scripts.check_seed_behaviours", *tests]
        try:
            subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return EMPTY_REPORT
        text = Path(report.name).read_text()
        return json.loads(text) if text else EMPTY_REPORT


def confirm(row: Row, tree: Path) -> tuple[bool, str]:
    """Return (whether the row is confirmed, a line of text). The text names the change and the failed test,
    or the reason why the row is open."""
    baseline = run_tests(tree, row.tests)
    if baseline["failures"]:
        return False, f"fails without a change: {baseline['failures']}"
    num_tried, deadline = 0, time.monotonic() + ROW_TIMEOUT_S
    for change in changes(row, baseline):
        if time.monotonic() > deadline:
            break
        num_tried += 1
        source = (ROOT / change.file).read_text()
        try:
            (tree / change.file).write_text(changed(source, change.index))
            failures = run_tests(tree, row.tests)["failures"]
        finally:
            (tree / change.file).write_text(source)
        for test, error in failures.items():
            if error in ("AssertionError", "Failed"):
                text = source.splitlines()[change.line - 1].strip()[:60]
                return True, f"{change.file}:{change.line} ({text}) -> {test.rpartition('/')[2]}"
    return False, f"no assertion failed after {num_tried} changes"


def main(numbers: set[int]) -> int:
    chosen = [row for row in rows() if not numbers or row.number in numbers]
    unconfirmed = []
    with tempfile.TemporaryDirectory(prefix="seed-behaviours-") as directory:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for worker in range(WORKERS):
            tree = Path(directory, str(worker))
            tree.mkdir()
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x"], cwd=tree, input=archive.stdout, check=True)
            trees.put(tree)

        def confirm_in_a_tree(row: Row) -> tuple[Row, bool, str]:
            tree = trees.get()
            try:
                return row, *confirm(row, tree)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(WORKERS) as pool:
            for row, is_confirmed, text in pool.map(confirm_in_a_tree, chosen):
                print(f"{row.number:>3} {'confirmed' if is_confirmed else 'OPEN':9} {text}", flush=True)
                if not is_confirmed:
                    unconfirmed.append(row.number)
    print(f"{len(chosen) - len(unconfirmed)} of {len(chosen)} rows confirmed; open: {unconfirmed}")
    return 1 if unconfirmed else 0


# The pytest plugin


class _Recorder:
    """Records the lines of this project that tests execute, and the type of each failure."""

    def __init__(self) -> None:
        self.imported: dict[str, set[int]] = {}  # file -> lines that ran before the first test
        self.lines: dict[str, set[int]] = {}  # file -> lines of the collection; after it, of the tests
        self.failures: dict[str, str] = {}  # test -> type of its exception

    def on_line(self, code: Any, line: int) -> Any:
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            relative = path.relative_to(ROOT)
            if relative.parts[0] in CODE and relative != Path("scripts", Path(__file__).name):
                self.lines.setdefault(str(relative), set()).add(line)
        return sys.monitoring.DISABLE


_recorder = _Recorder()


def pytest_configure() -> None:
    if REPORT_VARIABLE in os.environ:
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "seed behaviours")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, _recorder.on_line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)


def pytest_collection_finish() -> None:
    if REPORT_VARIABLE in os.environ:
        _recorder.imported, _recorder.lines = _recorder.lines, {}
        sys.monitoring.restart_events()


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    if call.when == "call" and call.excinfo is not None:
        _recorder.failures[item.nodeid] = call.excinfo.type.__name__


def pytest_sessionfinish() -> None:
    if report := os.environ.get(REPORT_VARIABLE):
        imported, lines = (
            {file: sorted(numbers) for file, numbers in recorded.items()}
            for recorded in (_recorder.imported, _recorder.lines)
        )
        report_data = {"imported": imported, "lines": lines, "failures": _recorder.failures}
        Path(report).write_text(json.dumps(report_data))


if __name__ == "__main__":
    sys.exit(main({int(number) for number in sys.argv[1:]}))
