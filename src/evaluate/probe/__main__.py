"""python -m src.evaluate.probe URL: check which options a Tinker-compatible endpoint applies, and write
capabilities.json.

    python -m src.evaluate.probe URL [model_name=NAME] [output=capabilities.json, or empty] [tolerance=0.02]
                            [only=CHECK,CHECK]
                            [request_timeout_s=600]

`model_name` is the model to check, by default the first that the endpoint lists. `tolerance` is the largest
accepted mean absolute difference between the logprobs of a sampler and of the training model, in nats.
`only` selects checks by name. An empty `output` writes no file. `request_timeout_s` limits, in seconds, the
time to list the models, the time of each check and the time to close the session.

The exit status is 0 if every required check that was run holds, 1 if one does not hold, 2 if an argument is
invalid or the endpoint could not be checked, and 130 if the program was interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from src.evaluate.probe.capabilities import CAPABILITIES, Capabilities, Finding
from src.evaluate.probe.checks import OPTIONAL, REQUIRED
from src.evaluate.probe.endpoint_probe import Defect, Probe
from src.policy.backend import DUMMY_KEY, check_alive
from src.policy.sampling_policy import sdk_boundary

OPTIONS = ("model_name", "output", "tolerance", "only", "request_timeout_s")
TOLERANCE = 0.02  # the default of the option `tolerance`; a model in bfloat16 needs this tolerance
ANSWER_TIMEOUT_S = 600.0


def main(argv: Sequence[str]) -> int:
    """Check an endpoint and return the exit status. An error is printed as one line."""
    if any(argument in ("--help", "-h", "help") for argument in argv):
        print_help(str(__doc__).strip())
        return 0
    load_environment(["backend=skyrl-tx"])  # the key may be in .env or .env.skyrl-tx
    logging.getLogger("tinker").setLevel(logging.CRITICAL)  # some checks cause errors on purpose
    console = terminal()
    try:
        with exit_on_signal():
            url, options = arguments(argv)
            results: list[Capabilities] = []

            async def work() -> None:
                results.append(await probe(url, options, on_finding=lambda item: console.print(line(item))))

            status = asyncio.run(run_until_signal(work(), console.print))
    except KeyboardInterrupt:
        return INTERRUPTED
    except TrainerError as error:
        print(f"probe: {error}", file=sys.stderr)
        return 2
    if status != 0:
        return status
    show(results[0], console)
    if options["output"]:
        Path(options["output"]).write_text(results[0].model_dump_json(indent=2) + "\n")
    return 0 if results[0].is_trainable else 1


def arguments(argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the URL and the options by name. Raises ConfigError for an invalid argument."""
    urls = [argument for argument in argv if argument.startswith(("http://", "https://"))]
    pairs = [present_argument(argument).partition("=") for argument in argv if argument not in urls]
    for name, equals, _ in pairs:
        if not equals or name not in OPTIONS:
            raise ConfigError(
                f"unknown argument {name!r}; use python -m src.evaluate.probe URL, then any of "
                f"{', '.join(f'{option}=' for option in OPTIONS)}"
            )
    if len(urls) != 1:
        raise ConfigError(
            "give the address of one endpoint: python -m src.evaluate.probe http://localhost:8000"
        )
    options = {"output": CAPABILITIES} | {name: value for name, _, value in pairs}
    for name in ("tolerance", "request_timeout_s"):
        try:
            value = float(options.get(name, 1.0))
        except ValueError as error:
            raise ConfigError(f"{name}={options[name]} is not a number; give one above 0") from error
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0 and finite, not {options[name]}")
    output = Path(options["output"])
    if options["output"] and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise ConfigError(f"output={output} cannot be written; give a file in an existing directory")
    unknown = set(filter(None, options.get("only", "").split(","))) - {*REQUIRED, *OPTIONAL}
    if unknown:
        raise ConfigError(
            f"unknown check {', '.join(sorted(unknown))}; the checks are: {', '.join([*REQUIRED, *OPTIONAL])}"
        )
    return urls[0].rstrip("/"), options


async def probe(
    url: str, options: Mapping[str, str], *, on_finding: Callable[[Finding], None] = lambda finding: None
) -> Capabilities:
    """Run all checks, or the checks in the option `only`, and return their results.

    Raises ConfigError if the endpoint does not serve the model. Raises BackendError if the endpoint is not
    ready, if the models cannot be listed, or if listing them or a check takes longer than
    `request_timeout_s`.

    The calls of the SDK block, so each check runs in a thread. A thread is abandoned at its deadline.
    """
    await check_alive(url)
    limit_s = float(options.get("request_timeout_s", ANSWER_TIMEOUT_S))

    async def bounded[T](action: str, function: Callable[[], T]) -> T:
        async with deadline(
            limit_s, BackendError, f"{action}: no answer within request_timeout_s={limit_s:g}"
        ):
            return await in_thread(function)

    key = os.environ.get("TINKER_API_KEY") or DUMMY_KEY
    action = f"listing the models of the server at {url}"
    with sdk_boundary(action):
        list_models = lambda: tinker.RestClient(base_url=url, api_key=key).get_server_capabilities().result()  # noqa: E731
        served = (await bounded(action, list_models)).supported_models
    models = {model.model_name: model for model in served if model.model_name}
    name = options.get("model_name") or next(iter(models), "")
    if name not in models:
        raise ConfigError(
            f"model_name={name} is not served at {url}; it serves: {', '.join(models) or 'none'}"
        )
    only = set(filter(None, options.get("only", "").split(",")))
    checks = {
        check: function for check, function in {**REQUIRED, **OPTIONAL}.items() if not only or check in only
    }
    limit = models[name].max_context_length
    findings = []
    service = tinker.ServiceClient(base_url=url, api_key=key)
    endpoint = Probe(
        service=service,
        model_name=name,
        max_context_length=limit,
        tolerance=float(options.get("tolerance", TOLERANCE)),
    )
    for check, function in checks.items():
        findings.append(await bounded(f"check {check!r}", partial(finding_of, check, function, endpoint)))
        on_finding(findings[-1])
    with suppress(BackendError):  # if this fails, the server ends the session when its heartbeats stop
        await bounded("ending the session", partial(close_session, service))
    return Capabilities(url=url, model_name=name, max_context_length=limit, findings=findings)


def close_session(service: tinker.ServiceClient) -> None:
    """End the session. Raises BackendError if the endpoint refuses."""
    with sdk_boundary("ending the session"):
        service.close("success").result()


def finding_of(name: str, check: Callable[[Probe], str], endpoint: Probe) -> Finding:
    """Run one check and return its result. An error of the endpoint means that the check does not hold."""
    started = time.monotonic()
    try:
        holds, observation = True, check(endpoint)
    except Defect as defect:
        holds, observation = False, str(defect)
    except Exception as error:  # any error of the endpoint is a finding
        holds, observation = False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return Finding(
        name=name,
        holds=holds,
        is_needed=name in REQUIRED,
        seen=observation,
        seconds=round(time.monotonic() - started, 2),
    )


def line(finding: Finding) -> str:
    verdict = "ok" if finding.holds else "FAILED" if finding.is_needed else "no"
    return f"{verdict:8}{finding.name}: {finding.seen}"


def show(result: Capabilities, console: Console) -> None:
    """Print the checks that do not hold, and the result."""
    failed = [finding for finding in result.findings if not finding.holds]
    if failed:
        table = Table("does not hold", "required", "observed", box=None, padding=(0, 1))
        for finding in failed:
            table.add_row(finding.name, "always" if finding.is_needed else "if used", finding.seen)
        console.print(table)
    seconds = sum(finding.seconds for finding in result.findings)
    if not result.is_trainable:
        verdict = "do not train with this endpoint"
    elif REQUIRED.keys() <= {finding.name for finding in result.findings}:
        verdict = "the endpoint can be used for training"
    else:
        verdict = "not all required checks were run"
    num_held = len(result.findings) - len(failed)
    console.print(
        f"{result.model_name} at {result.url}: {num_held} of {len(result.findings)} checks hold, "
        f"{seconds:.0f} s; {verdict}",
        highlight=False,
    )


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
