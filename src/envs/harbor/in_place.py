"""Preparation of the agent's environment for a verifier that runs in that environment."""

from __future__ import annotations

from harbor.environments.base import BaseEnvironment

from src.envs.harbor.carried_files import STARTUP
from src.envs.harbor.grading_method import GradingMethod
from src.envs.sandbox.environment import SandboxEnvironment

# Removes /etc/ld.so.preload in every case, and these files if they changed after the agent started: start-up
# files; modules and .pth files in /usr/local and /opt that Python loads automatically; programs in /usr/local
# that take precedence over a system program of the same name.
SCRIPT = """
PATH=/usr/sbin:/usr/bin:/sbin:/bin
unset BASH_ENV ENV LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT PYTHONPATH PYTHONSTARTUP PYTHONHOME
[ -e /etc/ld.so.preload ] && : > /etc/ld.so.preload && rm -f /etc/ld.so.preload
find {startup} -xdev -newerct @{since} ! -type d -exec rm -f -- {{}} + 2>/dev/null
find /usr/local /opt -xdev \\( -name 'sitecustomize*' -o -name 'usercustomize*' -o -name '*.pth' \\) \\
    -newerct @{since} -exec rm -rf -- {{}} + 2>/dev/null
programs=$(find /usr/local/sbin /usr/local/bin -newerct @{since} ! -type d -printf '%f\\n' 2>/dev/null)
for program in $programs; do
    for place in /usr/sbin /usr/bin /sbin /bin; do
        if [ -e "$place/$program" ]; then rm -f -- "/usr/local/sbin/$program" "/usr/local/bin/$program"; fi
    done
done
true
"""
TIMEOUT_S = 120


async def clean_in_place(environment: BaseEnvironment, method: GradingMethod, *, since: float) -> None:
    """Kill the processes of a sandbox, unless `method` keeps them, and remove the files of the agent that a
    verifier would load implicitly. Only common locations are searched, so some of these files may remain.

    Changes after the time `since`, in seconds since the epoch, are attributed to the agent.
    """
    if isinstance(environment, SandboxEnvironment) and not method.keep_processes:
        await environment.kill_processes()
    startup = " ".join(path.replace("/.*", "/.[!.]*") for path in STARTUP)
    script = SCRIPT.format(startup=startup, since=f"{since:.3f}")
    await environment.exec(script, user="root", timeout_sec=TIMEOUT_S)
