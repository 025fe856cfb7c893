"""python -m src.probe URL: what a Tinker-compatible endpoint honours, as a table and as capabilities.json.

    python -m src.probe URL [model_name=NAME] [output=capabilities.json, or nothing] [tolerance=0.02] [only=CHECK,CHECK]
                            [request_timeout_s=600]

`request_timeout_s` bounds the wait for the list of models, for each check and for the end of the session.

Exit status 0 when all holds that every run needs, 1 when something does not, 2 when the endpoint could not be asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import tinker
from rich.console import Console
from rich.table import Table

from src.cli.command_line import print_help
from src.cli.console import terminal
from src.cli.environment_variables import load_environment
from src.core.errors import INTERRUPTED, BackendError, ConfigError, TrainerError
from src.core.option_aliases import present_argument
from src.core.process import deadline, exit_on_signal, exit_process, in_thread, run_until_signal
from src.loop.capabilities import CAPABILITIES, Capabilities, Finding
from src.policy.backend import DUMMY_KEY, check_alive
from src.policy.sampling_policy import sdk_boundary
from src.probe.checks import NEEDED, WHERE_ASKED_FOR, Defect, Probe

OPTIONS = ("model_name", "output", "tolerance", "only", "request_timeout_s")
TOLERANCE = 0.02  # of a log-probability, on average: what bfloat16 takes
ANSWER_TIMEOUT_S = 600.0


def main(argv: Sequence[str]) -> int:
    if any(argument in ("--help", "-h", "help") for argument in argv):
        print_help(str(__doc__).strip())
        return 0
    load_environment(["backend=skyrl-tx"])  # whose an endpoint is nobody says: both files may hold its key
    logging.getLogger("tinker").setLevel(logging.CRITICAL)  # refusals are what some checks look for
    console = terminal()
    try:
        with exit_on_signal():
            url, options = arguments(argv)
            found: list[Capabilities] = []
            probing = _probe(
                url,
                options,
                found,
                on_finding=lambda finding: console.print(line(finding), highlight=False, markup=False),
            )
            status = asyncio.run(run_until_signal(probing, console.print))
    except KeyboardInterrupt:
        return INTERRUPTED
    except TrainerError as error:
        print(f"probe: {error}", file=sys.stderr)
        return 2
    if status != 0:
        return status
    show(found[0], console)
    if options["output"]:
        Path(options["output"]).write_text(found[0].model_dump_json(indent=2) + "\n")
    return 0 if found[0].is_trainable else 1


def arguments(argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    urls = [argument for argument in argv if argument.startswith(("http://", "https://"))]
    pairs = [present_argument(argument).partition("=") for argument in argv if argument not in urls]
    for name, equals, _ in pairs:
        if not equals or name not in OPTIONS:
            raise ConfigError(
                f"unknown argument {name!r}; write python -m src.probe URL, then any of {', '.join(f'{o}=' for o in OPTIONS)}"
            )
    if len(urls) != 1:
        raise ConfigError("give the address of one endpoint: python -m src.probe http://localhost:8000")
    options = {"output": CAPABILITIES} | {name: value for name, _, value in pairs}
    for name in ("tolerance", "request_timeout_s"):
        try:
            value = float(options.get(name, 1.0))
        except ValueError as error:
            raise ConfigError(f"{name}={options[name]} is not a number") from error
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0, not {options[name]}")
    if options["output"] and not Path(options["output"]).parent.is_dir():
        raise ConfigError(f"output={options['output']}: there is no such folder")
    unknown = set(filter(None, options.get("only", "").split(","))) - {*NEEDED, *WHERE_ASKED_FOR}
    if unknown:
        raise ConfigError(
            f"no check is called {', '.join(sorted(unknown))}; there are: {', '.join([*NEEDED, *WHERE_ASKED_FOR])}"
        )
    return urls[0].rstrip("/"), options


async def _probe(
    url: str,
    options: Mapping[str, str],
    found: list[Capabilities],
    *,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> None:
    await check_alive(url)
    found.append(await probe(url, options, on_finding=on_finding))


async def probe(
    url: str, options: Mapping[str, str], *, on_finding: Callable[[Finding], None] = lambda finding: None
) -> Capabilities:
    """Every check, or those in `only`. ConfigError when the endpoint does not serve the model. The SDK's calls block: each runs in a
    thread that is abandoned at its deadline."""
    limit_s = float(options.get("request_timeout_s", ANSWER_TIMEOUT_S))

    async def answered[T](what: str, function: Callable[[], T]) -> T:
        async with deadline(limit_s, BackendError, f"{what}: no answer within request_timeout_s={limit_s:g}"):
            return await in_thread(function)

    key = os.environ.get("TINKER_API_KEY") or DUMMY_KEY
    what = f"asking the server at {url} for its models"
    with sdk_boundary(what):
        rest = lambda: tinker.RestClient(base_url=url, api_key=key).get_server_capabilities().result()  # noqa: E731
        served = (await answered(what, rest)).supported_models
    models = {model.model_name: model for model in served if model.model_name}
    name = options.get("model_name") or next(iter(models), "")
    if name not in models:
        raise ConfigError(
            f"model_name={name} is not served at {url}; it serves: {', '.join(models) or 'none'}"
        )
    only = set(filter(None, options.get("only", "").split(",")))
    checks = {
        check: function
        for check, function in {**NEEDED, **WHERE_ASKED_FOR}.items()
        if not only or check in only
    }
    limit = models[name].max_context_length
    findings = []
    service = tinker.ServiceClient(base_url=url, api_key=key)
    tools = Probe(
        service=service,
        model_name=name,
        max_context_length=limit,
        tolerance=float(options.get("tolerance", TOLERANCE)),
    )
    for check, function in checks.items():
        findings.append(await answered(f"check {check!r}", partial(finding_of, check, function, tools)))
        on_finding(findings[-1])
    await answered("ending the session", lambda: service.close("success").result())
    return Capabilities(url=url, model_name=name, max_context_length=limit, findings=findings)


def finding_of(name: str, check: Callable[[Probe], str], tools: Probe) -> Finding:
    started = time.monotonic()
    try:
        holds, seen = True, check(tools)
    except Defect as defect:
        holds, seen = False, str(defect)
    except Exception as error:  # whatever an endpoint answers instead is the finding
        holds, seen = False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return Finding(
        name=name,
        holds=holds,
        is_needed=name in NEEDED,
        seen=seen,
        seconds=round(time.monotonic() - started, 2),
    )


def line(finding: Finding) -> str:
    verdict = "ok" if finding.holds else "FAILED" if finding.is_needed else "no"
    return f"{verdict:8}{finding.name}: {finding.seen}"


def show(found: Capabilities, console: Console) -> None:
    """What did not hold, and the verdict."""
    failed = [finding for finding in found.findings if not finding.holds]
    if failed:
        table = Table("does not hold", "needed", "seen", box=None, padding=(0, 1))
        for finding in failed:
            table.add_row(finding.name, "always" if finding.is_needed else "where asked for", finding.seen)
        console.print(table)
    seconds = sum(finding.seconds for finding in found.findings)
    verdict = "training may rely on it" if found.is_trainable else "do not train on it"
    held = len(found.findings) - len(failed)
    console.print(
        f"{found.model_name} at {found.url}: {held} of {len(found.findings)} checks hold, {seconds:.0f} s; {verdict}",
        highlight=False,
    )


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
