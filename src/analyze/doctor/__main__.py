"""`agent-trainer doctor [RUN]`: check this machine or a run, and print the next command for each problem.

doctor                     check Python, JAX devices, sandbox, disk, keys and, with skyrl_tx_url=, the server
doctor RUN                 look for the problems of docs/how-to/troubleshooting.md in an ended or running run
skyrl_tx_url=URL           address of your server; the default is SKYRL_TX_URL
server_log=FILE            log of the server of RUN; the default is RUN.server/server.log

Exit status: 0 (no problem), 1 (a problem), 2 (wrong arguments).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import chz

from src.analyze.doctor.machine_checks import machine_findings
from src.analyze.doctor.problems import Finding
from src.analyze.doctor.run_checks import CheckedRun, run_findings
from src.cli.command_line import parse_as
from src.cli.environment_variables import load_environment
from src.cli.program import run_program
from src.core.options import Options, is_http_address, require
from src.core.printable import printable


@chz.chz
class DoctorConfig(Options):
    """What is checked"""

    run: str | None = chz.field(default=None, doc="Run directory; None: this machine")
    skyrl_tx_url: str | None = chz.field(default=None, doc="Address of your server; None: SKYRL_TX_URL")
    server_log: str | None = chz.field(
        default=None, doc="Log of the server of the run; None: RUN.server/server.log"
    )

    @chz.validate
    def _options_fit(self) -> None:
        require(
            self.server_log is None or self.run is not None,
            "server_log needs the directory of a run; write doctor RUN server_log=FILE",
        )
        require(
            self.skyrl_tx_url is None or self.run is None,
            "doctor checks a run or a server, not both; write doctor RUN or doctor skyrl_tx_url=URL",
        )
        require(
            self.skyrl_tx_url is None or is_http_address(self.skyrl_tx_url),
            f"skyrl_tx_url={self.skyrl_tx_url} is not an HTTP address; write skyrl_tx_url=http://host:port",
        )


def findings_of(config: DoctorConfig) -> list[Finding]:
    """Return the findings about the run or the machine. Raises ConfigError if the run or the file
    `server_log` does not exist."""
    if config.run is not None:
        return run_findings(CheckedRun(config.run, server_log=config.server_log))
    return machine_findings(config.skyrl_tx_url or os.environ.get("SKYRL_TX_URL"))


def main(argv: Sequence[str]) -> int:
    return run_program(argv, _run, lambda words: str(__doc__))


def _run(argv: Sequence[str]) -> int:
    load_environment(["backend=skyrl-tx"])
    is_run = argv and "=" not in argv[0] and not argv[0].startswith("-")
    arguments = [f"run={argv[0]}", *argv[1:]] if is_run else argv
    findings = findings_of(parse_as(DoctorConfig, arguments))
    print(printable("\n".join(line for finding in findings for line in finding.lines())))
    return 1 if any(finding.is_problem for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
