"""Agents can neither forge their grade nor prevent grading. Scripted agents run whole trials in the sandbox
and in Docker.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from src.config import TrainerConfig
from src.core.errors import AgentFault
from src.core.trajectory import StopReason, Trajectory, TrialFailure, ZeroReason
from src.envs.base import DeadlineAware
from src.envs.harbor import carried_files
from src.envs.harbor.carried_files import FileChanges
from src.envs.harbor.environment import open_harbor
from src.envs.harbor.sandbox_files import SandboxFiles
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.docker import why_no_engine
from src.envs.sandbox.environment import SandboxEnvironment
from src.envs.sandbox.sandbox_directory import sandbox_directory
from tests.fakes.scripted_policy import ScriptedPolicy, answer
from tests.fakes.tokenizer import byte_chat


def why_no_container() -> str | None:
    if reason := why_no_engine():
        return reason
    inspection = subprocess.run(["docker", "image", "inspect", BASE_IMAGE], capture_output=True, check=False)
    return None if inspection.returncode == 0 else f"the image {BASE_IMAGE} is missing"


BASE_IMAGE = "debian:bookworm-slim"
REASON = why_no_sandbox()
NO_CONTAINER = why_no_container()
in_sandbox = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")
in_docker = pytest.mark.skipif(NO_CONTAINER is not None, reason=f"no trial on Docker: {NO_CONTAINER}")

TASK = (
    "[agent]\ntimeout_sec = 20\n[verifier]\ntimeout_sec = {timeout_s}\n"
    '[environment]\nnetwork_mode = "no-network"\n'
)
DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\n"
REWARD = "/logs/verifier/reward.txt"
CONTAINERS_AT_ONCE = 3


def graded_if(condition: str) -> str:
    """Return a verifier that gives the reward 1 if the shell condition is true in /app, and 0 otherwise."""
    return f"cd /app; if {condition}; then echo 1; else echo 0; fi > {REWARD}"


BY_CAT = graded_if('[ "$(cat /app/answer.txt)" = right ]')
BY_COMPARISON = graded_if('[ "$(cat /app/answer.txt)" = "$(cat /tests/test.sh)" ]')
BY_TEST = graded_if('env test "$(< /app/answer.txt)" = right')
BY_BASH = graded_if("""env bash -c '[ "$(cat /app/answer.txt)" = right ]'""")
BY_LOGIN_SHELL = graded_if("""bash -lc '[ "$(cat /app/answer.txt)" = right ]'""")
BY_INTERACTIVE_SHELL = graded_if("""bash -ic '[ "$(cat /app/answer.txt)" = right ]' 2>/dev/null""")
BY_SU = graded_if("""su root -c '[ "$(cat /app/answer.txt)" = right ]'""")
BY_PYTHON = graded_if("""python3 -c 'import sys; sys.exit(open("/app/answer.txt").read() != "right")'""")
BY_GIT = graded_if("git config --global --get answer.value")


def graded_if_any_exists(*paths: str) -> str:
    """Return a verifier that gives the reward 1 if any of the files exists."""
    return graded_if(" || ".join(f"[ -e {path} ]" for path in paths))


def task(
    directory: Path,
    test: str,
    *,
    dockerfile: str = DOCKERFILE,
    timeout_s: float = 30,
    files: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write a task with the verifier `test` to a new directory. `timeout_s` limits the verifier."""
    for name in ("environment", "tests", "solution"):
        (directory / name).mkdir(parents=True)
    (directory / "task.toml").write_text(TASK.format(timeout_s=timeout_s))
    (directory / "instruction.md").write_text("Write right into /app/answer.txt.\n")
    (directory / "environment" / "Dockerfile").write_text(dockerfile)
    (directory / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    (directory / "solution" / "solve.sh").write_text("#!/bin/bash\nprintf right > /app/answer.txt\n")
    for name, text in files:
        (directory / name).write_text(text)
    return directory


async def run_trial(
    tmp_path: Path,
    directory: Path,
    *commands: str,
    wait_s: float = 0.3,
    environment_type: str = "sandbox",
    **options: object,
):
    """Run one trial, in which the agent types the commands with `wait_s` seconds for each."""
    settings = {
        "environment_type": environment_type,
        "max_turns": 6,
        "enable_summarize": False,
        "eval_split": 0.0,
        **options,
    }
    tasks = open_harbor(
        TrainerConfig(model_name="org/model", tasks_dir=str(directory), **settings), byte_chat()
    )
    script = [answer(*commands, duration=wait_s), answer(done=True), answer(done=True)]
    policy = ScriptedPolicy(byte_chat(), {"": script})
    outcome = await tasks.trial(tasks.train[0], directory=tmp_path / "jobs", seed=1, temperature=1.0).run(
        policy
    )
    remaining = {path.name for path in sandbox_directory(tasks.run_label).iterdir()}
    assert remaining <= {"lock", "skeleton", "labels.yaml"}, (
        "the trial left an environment in the sandbox directory"
    )
    return outcome


def shim(program: str, script: str = "echo right", directory: str = "/usr/local/bin") -> str:
    """Return a command that installs a shell script under the name of a program."""
    return f"printf '#!/bin/sh\\n{script}\\n' > {directory}/{program}; chmod 755 {directory}/{program}"


USER_SITE = 'site=$(python3 -c "import site; print(site.getusersitepackages())"); mkdir -p $site; '
USER_SITE += 'echo "import os; os._exit(0)" > $site/'
# A command that makes the exec server (pid 1) start a shell of the agent for each later command
REDIRECT_PID_1 = r"""mkdir -p /tmp/bin; cat > /tmp/bin/bash <<'END'
#!/usr/bin/bash
/usr/bin/bash "$@"; status=$?
test ! -d /logs/verifier || echo 1 > /logs/verifier/reward.txt
exit $status
END
cp /tmp/bin/bash /tmp/bin/sh; chmod 755 /tmp/bin/*; python3 - <<'END'
import re
with open('/proc/1/mem', 'r+b', 0) as memory:
    for line in open('/proc/1/maps'):
        span, rights = line.split()[:2]
        if rights.startswith('rw'):
            start, end = (int(part, 16) for part in span.split('-'))
            memory.seek(start)
            for match in re.finditer(rb'/usr/bin/', memory.read(end - start)):
                memory.seek(start + match.start())
                memory.write(b'/tmp/bin/')
END"""

# The verifier and the attack of each trial
FORGERIES = {
    "a shim for cat": (BY_CAT, shim("cat")),
    "a shim for test": (BY_TEST, shim("test", "exit 0")),
    "a shim for bash": (BY_BASH, shim("bash", 'case "$1" in -c) exit 0;; esac; exec /bin/bash "$@"')),
    "a shim for python3": (BY_PYTHON, shim("python3", "exit 0")),
    "a usercustomize module": (BY_PYTHON, f"{USER_SITE}usercustomize.py"),
    "a .pth file of the user": (BY_PYTHON, f"{USER_SITE}evil.pth"),
    "a .pth file of the system": (
        BY_PYTHON,
        'd=/usr/local/lib/python3.$(python3 -c "import sys; print(sys.version_info[1])")/dist-packages; '
        "mkdir -p $d; echo 'import os; os._exit(0)' > $d/evil.pth",
    ),
    "~/.bashrc": (BY_INTERACTIVE_SHELL, "echo 'cat() { echo right; }' >> /root/.bashrc"),
    "~/.profile": (BY_LOGIN_SHELL, "echo 'cat() { echo right; }' >> /root/.profile"),
    "/etc/profile": (BY_LOGIN_SHELL, "echo 'cat() { echo right; }' >> /etc/profile"),
    "the git configuration": (BY_GIT, "printf '[answer]\\nvalue = right\\n' > /root/.gitconfig"),
    "a replaced home directory": (
        BY_LOGIN_SHELL,
        "mkdir /tmp/h; echo 'cat() { echo right; }' > /tmp/h/.profile; mv /root /tmp/old; ln -s /tmp/h /root",
    ),
    "ld.so.preload": (graded_if_any_exists("/etc/ld.so.preload"), "touch /etc/ld.so.preload"),
    "the linker configuration": (
        graded_if("[ -s /etc/ld.so.conf.d/evil.conf ]"),
        "mkdir -p /etc/ld.so.conf.d; echo /e > /etc/ld.so.conf.d/evil.conf",
    ),
    "the settings of gdb": (
        graded_if_any_exists("/etc/gdb/gdbinit"),
        "mkdir -p /etc/gdb; echo 'shell printf right > /app/answer.txt' > /etc/gdb/gdbinit",
    ),
    "the settings of pip": (
        graded_if("python3 -m pip config list | grep file:///app > /dev/null"),
        "mkdir -p /etc/xdg/pip; printf '[global]\\nindex-url = file:///app\\n' > /etc/xdg/pip/pip.conf",
    ),
    "the settings of other programs": (
        graded_if_any_exists("/etc/pylintrc", "/etc/krb5.conf", "/etc/postgresql-common/psqlrc")
        + "; grep -q wrong /etc/magic && echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /etc/postgresql-common; echo '0 string wrong right' > /etc/magic; "
        "touch /etc/pylintrc /etc/krb5.conf /etc/postgresql-common/psqlrc",
    ),
    "caches and libraries of interpreters": (
        graded_if_any_exists("/tmp/node-compile-cache/x", "/tmp/v8-compile-cache-0/x", "/root/R/x"),
        "mkdir -p /tmp/node-compile-cache /tmp/v8-compile-cache-0 /root/R; "
        "touch /tmp/node-compile-cache/x /tmp/v8-compile-cache-0/x /root/R/x",
    ),
    "a repository above the tests": (
        f"cd /tests; git status > /dev/null 2>&1; {BY_CAT}",
        "printf '#!/bin/sh\\nprintf right > /app/answer.txt\\n' > /app/x; chmod 755 /app/x; "
        "git init -q /; git -C / config core.fsmonitor /app/x",
    ),
    "pytest configuration files": (
        graded_if_any_exists("/conftest.py", "/pytest.ini", "/pytest.toml", "/root/conftest.py"),
        "touch /conftest.py /pytest.ini /pytest.toml /root/conftest.py",
    ),
    "a file beside the tests": (
        graded_if_any_exists("/tests/planted"),
        "mkdir -p /tests; touch /tests/planted",
    ),
    "a planted reward": ("true", f"mkdir -p /logs/verifier; echo 1 > {REWARD}"),
    "a symlinked reward": (BY_CAT, f"echo 1 > /app/one; mkdir -p /logs/verifier; ln -sf /app/one {REWARD}"),
    "an answer linked to the tests": (BY_COMPARISON, "ln -sf /tests/test.sh /app/answer.txt"),
    "an answer linked through a directory": (
        BY_COMPARISON,
        "ln -s / /app/top; ln -sf top/tests/test.sh /app/answer.txt",
    ),
    "an answer linked through a directory of the system": (
        BY_COMPARISON,
        "ln -s /usr /app/s; mkdir -p /app/a/b; ln -s ../../s/../tests/test.sh /app/a/b/c; ln -sf a/b/c "
        "/app/answer.txt",
    ),
    "an answer linked through /proc/self/root": (
        BY_COMPARISON,
        "ln -sf /proc/self/root/tests/test.sh /app/answer.txt",
    ),
    "a writer in the background": (
        BY_CAT,
        f"(setsid sh -c 'while :; do echo 1 > {REWARD}; done' &) >/dev/null 2>&1",
    ),
    "the memory of pid 1": (BY_CAT, REDIRECT_PID_1),
}


@in_sandbox
@pytest.mark.parametrize("name", FORGERIES)
async def test_a_forged_grade_stays_0(tmp_path: Path, name: str) -> None:
    test, attack = FORGERIES[name]
    wait_s = 2.0 if "memory" in name else 0.5
    outcome = await run_trial(
        tmp_path, task(tmp_path / "task", test), "printf wrong > /app/answer.txt", attack, wait_s=wait_s
    )
    if name == "a planted reward":  # the verifier of this task never writes a reward
        assert not isinstance(outcome, Trajectory)
        return
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 0.0


@in_sandbox
async def test_the_verifier_does_not_find_programs_of_the_agent(tmp_path: Path) -> None:
    dockerfile = f"{DOCKERFILE}RUN mkdir /opt/tools\nENV PATH=/opt/tools:/usr/bin:/bin\n"
    directory = task(tmp_path / "task", BY_CAT, dockerfile=dockerfile)
    outcome = await run_trial(
        tmp_path, directory, "printf wrong > /app/answer.txt", shim("cat", directory="/opt/tools")
    )
    assert isinstance(outcome, Trajectory) and outcome.reward == 0.0
    directory = task(tmp_path / "verifier", BY_CAT, dockerfile=f"{DOCKERFILE}RUN mkdir /opt/tools\n")
    variables = '[verifier.env]\nPATH = "/opt/tools:/usr/bin:/bin"\n'
    (directory / "task.toml").write_text(f"{TASK.format(timeout_s=30)}{variables}")
    outcome = await run_trial(
        tmp_path, directory, "printf wrong > /app/answer.txt", shim("cat", directory="/opt/tools")
    )
    assert isinstance(outcome, Trajectory) and outcome.reward == 0.0
    directory = task(tmp_path / "linked", BY_CAT, dockerfile=dockerfile)
    attack = (
        f"mkdir /app/bin; {shim('cat', directory='/app/bin')}; rm -rf /opt/tools; ln -s /app/bin /opt/tools"
    )
    outcome = await run_trial(tmp_path, directory, "printf wrong > /app/answer.txt", attack)
    assert isinstance(outcome, Trajectory) and outcome.reward == 0.0


# The instructions of the Dockerfile, the verifier and the attack of each trial
IMAGE_FORGERIES = {
    "a program in a linked directory": (
        "RUN mkdir -p /opt/tool-1/bin && ln -s tool-1 /opt/tool\nENV PATH=/opt/tool/bin:$PATH\n",
        BY_CAT,
        shim("cat", directory="/opt/tool-1/bin"),
    ),
    "a program of a link in PATH": (
        "RUN mkdir -p /opt/tool-1/bin && ln -s tool-1 /opt/tool && touch /opt/tool/bin/run && "
        "ln -s ../../../opt/tool/bin/run /usr/local/bin/run\n",
        graded_if("run"),
        shim("run", "exit 0", directory="/opt/tool/bin"),
    ),
    "a module of the program of a link in PATH": (
        "RUN mkdir -p /opt/tool/lib && echo 'exit 1' > /opt/tool/x.sh && "
        "echo '. /opt/tool/x.sh' > /opt/tool/lib/run && chmod 755 /opt/tool/lib/run && "
        "ln -s /opt/tool/lib/run /usr/local/bin/run\n",
        graded_if("run"),
        "echo 'exit 0' > /opt/tool/x.sh",
    ),
    "a script in /opt of a link in PATH": (
        "RUN echo 'exit 1' > /opt/run.sh && chmod 755 /opt/run.sh && ln -s /opt/run.sh /usr/local/bin/run\n",
        graded_if("run"),
        shim("run.sh", "exit 0", directory="/opt"),
    ),
    "a program to which two links lead": (
        "RUN mkdir -p /opt/tool-1/lib && touch /opt/tool-1/lib/run && "
        "ln -s /opt/tool-1 /usr/local/tool && mkdir -p /srv/tools && ln -s /srv/tools /tools && "
        "ln -s /usr/local/tool/lib/run /srv/tools/run\nENV PATH=/tools:$PATH\n",
        graded_if("run"),
        shim("run", "exit 0", directory="/opt/tool-1/lib"),
    ),
    "a program in RUSTUP_HOME": (
        "ENV RUSTUP_HOME=/opt/rustup\n",
        graded_if_any_exists("/opt/rustup/rustc"),
        "mkdir /opt/rustup; touch /opt/rustup/rustc",
    ),
    "a changed link between two links": (
        "RUN mkdir -p /opt/tool-1/bin && ln -s tool-1 /opt/link && ln -s link /opt/tool\n"
        "ENV PATH=/opt/tool/bin:$PATH\n",
        BY_CAT,
        f"mkdir bin; {shim('cat', directory='/app/bin')}; ln -sfn /app /opt/link",
    ),
    "the activation of a virtual environment": (
        "RUN python3 -m venv --without-pip /opt/venv\nENV PATH=/opt/venv/bin:$PATH\n",
        f". /opt/venv/bin/activate; {BY_CAT}",
        "echo 'cat() { echo right; }' >> /opt/venv/bin/activate",
    ),
    "a Python that is not in PATH": (
        "RUN python3 -m venv --without-pip /opt/venv\n",
        BY_PYTHON.replace("python3", "/opt/venv/bin/python"),
        "cd /opt/venv/bin; rm python; printf '#!/bin/sh\\n' > python; chmod 755 python",
    ),
    "the library beside a program": (
        "RUN mkdir -p /opt/tool/bin /opt/tool/lib\nENV PATH=/opt/tool/bin:$PATH\n",
        graded_if_any_exists("/opt/tool/lib/libc.so.6"),
        "touch /opt/tool/lib/libc.so.6",
    ),
    "a module of a program": (
        "RUN mkdir -p /opt/tool/bin /opt/tool/lib && echo 'exit 1' > /opt/tool/lib/x.sh && "
        "echo '. /opt/tool/lib/x.sh' > /opt/tool/bin/run && chmod 755 /opt/tool/bin/run\n"
        "ENV PATH=/opt/tool/bin:$PATH\n",
        graded_if("run"),
        "echo 'exit 0' > /opt/tool/lib/x.sh",
    ),
    "a module in PYTHONPATH": (
        "RUN mkdir /opt/lib\nENV PYTHONPATH=/opt/lib\n",
        graded_if("python3 -c 'import json, sys; sys.exit(json.loads(\"1\") == 1)'"),
        "echo 'loads = str' > /opt/lib/json.py",
    ),
    "a module in PYTHONUSERBASE": (
        "ENV PYTHONUSERBASE=/opt/user\n",
        graded_if("python3 -c 'raise SystemExit(1)'"),
        "d=$(python3 -m site --user-site); mkdir -p $d; echo 'import os; os._exit(0)' > $d/a.pth",
    ),
    "the file of BASH_ENV": (
        "RUN touch /opt/settings\nENV BASH_ENV=/opt/settings\n",
        BY_BASH,
        "echo 'cat() { echo right; }' >> /opt/settings",
    ),
}


@in_sandbox
@pytest.mark.parametrize("name", IMAGE_FORGERIES)
async def test_programs_of_the_image_load_no_files_of_the_agent(tmp_path: Path, name: str) -> None:
    instructions, test, attack = IMAGE_FORGERIES[name]
    directory = task(tmp_path / "task", test, dockerfile=DOCKERFILE + instructions)
    outcome = await run_trial(tmp_path, directory, "printf wrong > /app/answer.txt", attack)
    assert isinstance(outcome, Trajectory) and outcome.reward == 0.0


# A copy of the standard library that ends Python with the status 0 when it starts
OTHER_PYTHON = r"""cat > /app/attack.sh <<'END'
library=$(/usr/bin/python3 -c 'import os; print(os.path.dirname(os.__file__))')
copy=/app/python/lib/$(basename $library)
mkdir -p $copy /app/python/bin
cp $library/*.py $copy; cp -r $library/collections $library/encodings $library/importlib $copy
rm -r $copy/encodings/__pycache__; echo 'import posix; posix._exit(0)' >> $copy/encodings/utf_8.py
sed -i 's#^home = .*#home = /app/python/bin#' /opt/venv/pyvenv.cfg
END
bash /app/attack.sh"""


@in_sandbox
async def test_the_verifier_runs_the_standard_library_of_the_task(tmp_path: Path) -> None:
    dockerfile = (
        f"{DOCKERFILE}RUN python3 -m venv --without-pip /opt/venv\nENV PATH=/opt/venv/bin:/usr/bin:/bin\n"
    )
    directory = task(tmp_path / "task", BY_PYTHON, dockerfile=dockerfile)
    outcome = await run_trial(tmp_path, directory, "printf wrong > /app/answer.txt", OTHER_PYTHON, wait_s=4)
    assert isinstance(outcome, Trajectory) and outcome.reward == 0.0


# The command of the agent and the verifier of each trial
HONEST_WORK = {
    "a file in the working directory": ("printf right > /app/answer.txt", BY_CAT),
    "files in home directories": (
        "printf right > /root/answer.txt; mkdir -p /home/user/deep; printf right > "
        "/home/user/deep/answer.txt",
        graded_if("[ $(cat /root/answer.txt) = $(cat /home/user/deep/answer.txt) ]"),
    ),
    "a deleted file and a deleted directory": (
        "rm -r /app/old.txt /app/directory",
        graded_if("[ ! -e /app/old.txt ] && [ ! -e /app/directory ]"),
    ),
    "a directory in place of a file": (
        "rm /app/old.txt; mkdir /app/old.txt",
        graded_if("[ -d /app/old.txt ]"),
    ),
    "a file in place of a directory": (
        "rm -r /app/directory; touch /app/directory",
        graded_if("[ -f /app/directory ] && [ ! -s /app/directory ]"),
    ),
    "symbolic links": (
        "ln -s old.txt link; ln -s /nowhere broken",
        graded_if("[ $(readlink link) = old.txt ] && [ $(readlink broken) = /nowhere ]"),
    ),
    "hard links": ("ln old.txt hard", graded_if("[ old.txt -ef hard ]")),
    "modes": (
        "chmod 741 old.txt; touch secret; chmod 000 secret; chmod 2750 directory",
        graded_if('[ "$(stat -c %a old.txt secret directory | tr "\\n" " ")" = "741 0 2750 " ]'),
    ),
    "directories without write permission": (
        "mkdir -p new/sub; touch new/file new/sub/file; chmod 555 new/sub; chmod 500 new; chmod 755 locked; "
        "rm locked/a; touch locked/c; echo new > locked/b; chmod 555 locked; chmod 755 gone; rm -r gone",
        graded_if(
            "[ -e new/file ] && [ -e new/sub/file ] && [ ! -e locked/a ] && [ -e locked/c ] && "
            '[ $(cat locked/b) = new ] && [ ! -e gone ] && [ "$(stat -c %a new new/sub locked | '
            'tr "\\n" " ")" = "500 555 555 " ]'
        ),
    ),
    "a directory without permissions": (
        "mkdir -p new/sub; echo a > new/sub/file; chmod 000 new/sub new",
        graded_if(
            "[ $(stat -c %a new) = 0 ] && chmod 755 new && [ $(stat -c %a new/sub) = 0 ] && "
            "chmod 755 new/sub && [ $(cat new/sub/file) = a ]"
        ),
    ),
    "a changed file in a directory without write permission": (
        "echo new > locked/b",
        graded_if('[ "$(cat locked/b) $(stat -c %a locked)" = "new 555" ]'),
    ),
    "an empty directory": ("mkdir -p a/b/c", graded_if("[ -d a/b/c ]")),
    "modification times": (
        "touch -d 2001-02-03T04:05:06Z old.txt",
        graded_if("[ $(stat -c %Y old.txt) = 981173106 ]"),
    ),
    "unusual file names": (
        "touch 'größe 日本' ' -rf' \"$(printf 'a\\nb')\" \"$(printf 'b\\377')\"",
        graded_if(
            "[ -e 'größe 日本' ] && [ -e ' -rf' ] && [ -e \"$(printf 'a\\nb')\" ] && [ -e \"$(printf "
            "'b\\377')\" ]"
        ),
    ),
    "a program with the name of a system program": (
        "printf '#!/bin/sh\\necho right' > cat; chmod +x cat",
        graded_if('[ "$(./cat)" = right ]'),
    ),
    "system settings": (
        "echo '10.0.0.1 box' >> /etc/motd; echo x:x:7:7::/x:/bin/sh >> /etc/passwd",
        graded_if("grep -q box /etc/motd && id x >/dev/null"),
    ),
    "an old modification time": ("printf right > answer.txt; touch -d 1999-01-01 answer.txt", BY_CAT),
}


@in_sandbox
@pytest.mark.parametrize("name", HONEST_WORK)
async def test_the_verifier_sees_the_honest_changes_of_the_agent(tmp_path: Path, name: str) -> None:
    command, test = HONEST_WORK[name]
    dockerfile = f"{DOCKERFILE}RUN echo old > old.txt && mkdir directory && echo x > directory/x\n"
    dockerfile += "RUN mkdir locked gone && touch locked/a locked/b gone/a && chmod 555 locked gone\n"
    outcome = await run_trial(
        tmp_path, task(tmp_path / "task", test, dockerfile=dockerfile), f"cd /app; {command}"
    )
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.zero_reason) == (1.0, None)


@in_sandbox
async def test_collect_commands_run_before_the_processes_end(tmp_path: Path) -> None:
    directory = task(tmp_path / "task", graded_if('[ "$(cat /app/state)" = running ]'))
    collect = "\n[[verifier.collect]]\ncommand = 'kill -0 $(cat /app/pid) && echo running > /app/state'\n"
    (directory / "task.toml").write_text(f"{TASK.format(timeout_s=30)}{collect}")
    outcome = await run_trial(tmp_path, directory, "sleep 1000 & echo $! > /app/pid")
    assert isinstance(outcome, Trajectory) and outcome.reward == 1.0


# A verifier that runs /app/run.sh, if it exists, and takes the reward from /app/score.txt
RUN_SH_VERIFIER = (
    f"echo 0 > /app/score.txt; [ ! -e /app/run.sh ] || bash /app/run.sh; cat /app/score.txt > {REWARD}"
)


def write_run_sh(text: str) -> str:
    """Return a command that writes `text` to /app/run.sh."""
    return f"printf '%s\\n' '{text}' > /app/run.sh"


# Attacks that could prevent grading: the verifier, the attack and the graded-zero reason of each trial. None:
# the trial is graded and the verifier gives the reward 0. `...`: the test accepts any reason or None.
BROKEN_TRIALS = {
    "all processes killed": (RUN_SH_VERIFIER, "kill -9 -1", None),
    "pid 1 without resources": (RUN_SH_VERIFIER, "prlimit --pid 1 --as=4096 --nofile=0 --nproc=0", ...),
    "signals to pid 1": (RUN_SH_VERIFIER, "kill -9 1; kill -TERM 1; kill -QUIT 1", None),
    "everything deleted": (RUN_SH_VERIFIER, "rm -rf --no-preserve-root / 2>/dev/null", ...),
    "a full disk": (RUN_SH_VERIFIER, "cat /dev/zero > /app/big 2>/dev/null", ...),
    "a file in place of /logs": (RUN_SH_VERIFIER, "rm -rf /logs /tests; touch /logs /tests", ...),
    "a verifier that hangs": (RUN_SH_VERIFIER, write_run_sh("sleep 1000"), ZeroReason.VERIFIER_TIMEOUT),
    "a verifier that is killed": (RUN_SH_VERIFIER, write_run_sh("kill -9 -1"), ZeroReason.NO_REWARD),
    "an empty reward": (RUN_SH_VERIFIER, write_run_sh("> /app/score.txt"), ZeroReason.NO_REWARD),
    "a reward of nan": (
        RUN_SH_VERIFIER,
        write_run_sh("echo nan > /app/score.txt"),
        ZeroReason.UNREADABLE_REWARD,
    ),
    "a reward of text": (
        RUN_SH_VERIFIER,
        write_run_sh("echo good > /app/score.txt"),
        ZeroReason.UNREADABLE_REWARD,
    ),
    "a huge reward": (
        RUN_SH_VERIFIER,
        write_run_sh("head -c 9000000 /dev/zero > /app/score.txt"),
        ZeroReason.UNREADABLE_REWARD,
    ),
    "a directory in place of a reward": (
        RUN_SH_VERIFIER,
        write_run_sh("mkdir -p /logs/verifier/reward.json/x"),
        ZeroReason.UNREADABLE_REWARD,
    ),
    "a pipe in place of a reward": (RUN_SH_VERIFIER, write_run_sh("mkfifo /logs/verifier/reward.json"), None),
    "a list in place of a reward": (
        RUN_SH_VERIFIER,
        write_run_sh("echo [1] > /logs/verifier/reward.json"),
        ZeroReason.UNREADABLE_REWARD,
    ),
    "a reward of 400 digits": (
        RUN_SH_VERIFIER,
        write_run_sh('printf {\\"reward\\":%0400d} 0 | tr 0 9 > /logs/verifier/reward.json'),
        ZeroReason.UNREADABLE_REWARD,
    ),
}


@in_sandbox
@pytest.mark.parametrize("name", BROKEN_TRIALS)
async def test_a_trial_that_its_agent_breaks_is_graded_0_with_a_reason(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.envs.harbor.grading.PROBE_TIMEOUT_S", 5)
    test, attack, reason = BROKEN_TRIALS[name]
    outcome = await run_trial(
        tmp_path, task(tmp_path / "task", test, timeout_s=4), attack, environment_kwargs=["storage_mb=64"]
    )
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 0.0
    assert reason is ... or outcome.zero_reason is reason


@in_sandbox
async def test_too_many_or_too_large_files_are_graded_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carried_files, "MAX_MEMBERS", 100)
    outcome = await run_trial(
        tmp_path, task(tmp_path / "task", BY_CAT), "printf right > answer.txt; touch file{1..200}"
    )
    assert isinstance(outcome, Trajectory) and outcome.zero_reason is ZeroReason.FILES_TOO_LARGE
    monkeypatch.setattr(carried_files, "MAX_BYTES", 1000)
    outcome = await run_trial(
        tmp_path,
        task(tmp_path / "large", BY_CAT),
        "printf right > answer.txt; head -c 2000 /dev/zero > large",
    )
    assert isinstance(outcome, Trajectory) and outcome.zero_reason is ZeroReason.FILES_TOO_LARGE


@in_sandbox
async def test_a_broken_verifier_gives_a_failure_and_no_reward(tmp_path: Path) -> None:
    for number, test in enumerate(("true", "sleep 100", f"echo nan > {REWARD}")):
        outcome = await run_trial(
            tmp_path, task(tmp_path / f"task-{number}", test, timeout_s=2), "printf right > answer.txt"
        )
        assert not isinstance(outcome, Trajectory), outcome
        assert outcome.kind == "verifier"


@in_sandbox
async def test_an_agent_that_uses_up_its_trial_time_is_graded_0(tmp_path: Path) -> None:
    """A trial that reaches its deadline is graded 0 if the agent used most of the trial's time."""
    tasks = open_harbor(
        TrainerConfig(
            model_name="org/model",
            tasks_dir=str(task(tmp_path / "task", BY_CAT)),
            environment_type="sandbox",
            enable_summarize=False,
        ),
        byte_chat(),
    )
    policy = ScriptedPolicy(
        byte_chat(), {"": [answer("sleep 1000", duration=0.1)] + [answer("", duration=60)] * 9}
    )
    trial = tasks.trial(tasks.train[0], directory=tmp_path / "jobs", seed=1, temperature=1.0)
    assert isinstance(trial, DeadlineAware)
    trial_task = asyncio.ensure_future(trial.run(policy))
    outcome = None
    async with asyncio.timeout(60):
        while outcome is None:  # None until the agent has worked longer than the sandbox took to start
            await asyncio.wait({trial_task}, timeout=0.5)
            outcome = trial.timeout_result()
    trial_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial_task
    assert (outcome.reward, outcome.zero_reason, len(outcome.turns) > 0) == (0.0, ZeroReason.TIMEOUT, True)
    assert outcome.stop_reason is StopReason.AGENT_TIMEOUT


@in_sandbox
async def test_the_log_reports_the_tasks_per_grading_method(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await run_trial(tmp_path, task(tmp_path / "task", BY_CAT), "printf right > answer.txt")
    assert (
        "grading: 1 tasks in a fresh environment, 0 in place "
        "(records of src.envs.validate; tasks without a record: fresh)" in caplog.messages
    )


# The image contains tmux, so that Terminus-2 does not download it.
TMUX_DOCKERFILE = (
    f"FROM {BASE_IMAGE}\nRUN apt-get update && apt-get install -y tmux && rm -rf /var/lib/apt/lists/*\n"
)
TMUX_DOCKERFILE += "WORKDIR /app\n"
TMUX_DOCKERFILE += "RUN echo old > old.txt && mkdir directory && echo x > directory/x\n"
TMUX_DOCKERFILE += "RUN mkdir -p /opt/tools-1 /opt/venv/bin && ln -s tools-1 /opt/tools\n"
TMUX_DOCKERFILE += "RUN mkdir /opt/lib && echo /opt/lib > /etc/ld.so.conf.d/opt.conf\n"
TMUX_DOCKERFILE += "RUN mkdir /volume && touch /volume/old\nVOLUME /volume\n"
TMUX_DOCKERFILE += "RUN touch /opt/venv/bin/python3 /opt/venv/bin/activate\nENV PATH=/opt/tools:$PATH\n"
DOCKER_TASK = "[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = {timeout_s}\n"


def docker_task(directory: Path, test: str, *, timeout_s: float = 30) -> Path:
    directory = task(directory, test, dockerfile=TMUX_DOCKERFILE)
    # DOCKER_TASK omits the no-network mode, because Harbor needs an image from a registry for that mode.
    (directory / "task.toml").write_text(DOCKER_TASK.format(timeout_s=timeout_s))
    return directory


def containers(name: str = "") -> set[str]:
    """Return the ids of all containers whose name contains `name`."""
    listing = ["docker", "ps", "--all", "--quiet", "--filter", f"name={name}"]
    return set(subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split())


# The verifier and the attack of each trial
DOCKER_FORGERIES = {
    "shims and replaced programs": (
        BY_CAT,
        f"{shim('cat')}; {shim('cat', directory='/opt/tools-1')}; "
        "cp /usr/local/bin/cat /usr/bin/cat; echo 'cat() { echo right; }' > /root/.bashrc",
    ),
    "the linker and a symlinked reward": (
        graded_if_any_exists("/etc/ld.so.preload", "/opt/lib/libc.so.6"),
        f"touch /etc/ld.so.preload /opt/lib/libc.so.6; echo 1 > /app/one; ln -sf /app/one {REWARD}; "
        "ln -sf /etc/hostname /logs/verifier/reward.json",
    ),
    "a writer in the background": (
        BY_CAT,
        f"(setsid sh -c 'while :; do echo 1 > {REWARD}; done' &) >/dev/null 2>&1",
    ),
    "another home directory of root": (
        BY_INTERACTIVE_SHELL,
        "mkdir h; echo 'cat() { echo right; }' > h/.bashrc; sed -i '1i r:x:0:0::/app/h:' /etc/passwd",
    ),
    "the shell of root": (
        BY_SU,
        "printf '#!/bin/sh\\n' > s; chmod 755 s; sed -i 's#root:/bin/bash#root:/app/s#' /etc/passwd",
    ),
    "the profile of a system account": (
        BY_SU.replace("su root", "su - backup -s /bin/bash"),
        "mkdir -p /var/backups; echo 'cat() { echo right; }' > /var/backups/.bash_profile",
    ),
    "the variables of su": (
        BY_SU.replace("su root", "su root -s /bin/bash"),
        "echo 'cat() { echo right; }' > e; echo BASH_ENV=/app/e > /etc/default/locale",
    ),
    "the activation of a virtual environment": (
        f". /opt/venv/bin/activate; {BY_CAT}",
        "echo 'cat() { echo right; }' >> /opt/venv/bin/activate",
    ),
    "a hook of apt-get": (
        graded_if('apt-get update >/dev/null 2>&1; [ "$(cat /app/answer.txt)" = right ]'),
        "echo 'APT::Update::Pre-Invoke {\"printf right > /app/answer.txt\";};' > /etc/apt/apt.conf.d/99hook",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerTrial:
    """A trial in a container: its verifier, the time limit of the verifier and the agent's commands."""

    test: str
    commands: Sequence[str]
    timeout_s: float = 30


def honest_trial() -> ContainerTrial:
    commands = (
        "printf right > answer.txt; chmod 741 answer.txt; printf right > /root/answer.txt; rm -r old.txt "
        "directory; mkdir -p a/b/c",
        "ln -s answer.txt link; touch 'größe 日本' ' -rf'; ln answer.txt hard; printf right > "
        "/home/answer.txt; chmod 700 /srv",
        "printf right > /volume/new; rm /volume/old; useradd -m user",
    )
    test = graded_if(
        '[ "$(cat answer.txt /root/answer.txt /home/answer.txt)" = rightrightright ] && '
        '[ "$(stat -c %a answer.txt)" = 741 ] && '
        "[ ! -e old.txt ] && [ ! -e directory ] && [ -d a/b/c ] && [ $(readlink link) = answer.txt ] && [ -e "
        "'größe 日本' ] && "
        "[ -e ' -rf' ] && [ -e hard ] && [ $(stat -c %a /srv) = 700 ] && "
        "[ -e /volume/new ] && [ ! -e /volume/old ] && su - user -c true"
    )
    return ContainerTrial(test=test, commands=commands)


# Attacks that could prevent grading: the attack and the graded-zero reason of each trial, as in
# BROKEN_TRIALS. A special file in place of reward.json is not downloaded, so the reward is the number in the
# file REWARD.
BROKEN_CONTAINER_TRIALS = {
    "everything deleted": ("rm -rf --no-preserve-root / 2>/dev/null", ...),
    "all processes killed": ("kill -9 -1", ...),
    "a verifier that hangs": (write_run_sh("sleep 1000"), ZeroReason.VERIFIER_TIMEOUT),
    "a pipe in place of a reward": (
        write_run_sh("rm -f /logs/verifier/reward.json; mkfifo /logs/verifier/reward.json"),
        None,
    ),
    "a link to a device in place of a reward": (
        write_run_sh("ln -s /dev/zero /logs/verifier/reward.json"),
        None,
    ),
}


@pytest.fixture(scope="module")
def container_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trajectory | TrialFailure]:
    """The outcomes of all trials in containers, by name. The trials run concurrently, because each of them
    mostly waits for Docker and for time limits.
    """
    trials = {"honest": honest_trial()}
    for name, (test, attack) in DOCKER_FORGERIES.items():
        trials[name] = ContainerTrial(test=test, commands=("printf wrong > /app/answer.txt", attack))
    for name, (attack, _) in BROKEN_CONTAINER_TRIALS.items():
        trials[name] = ContainerTrial(test=RUN_SH_VERIFIER, commands=(attack,), timeout_s=20)

    async def run_all() -> dict[str, Trajectory | TrialFailure]:
        container_slots = asyncio.Semaphore(CONTAINERS_AT_ONCE)

        async def run_one(trial: ContainerTrial) -> Trajectory | TrialFailure:
            directory = tmp_path_factory.mktemp("container")
            task_directory = docker_task(directory / "task", trial.test, timeout_s=trial.timeout_s)
            async with container_slots:
                return await run_trial(
                    directory, task_directory, *trial.commands, wait_s=1.0, environment_type="docker"
                )

        outcomes = await asyncio.gather(*map(run_one, trials.values()))
        return dict(zip(trials, outcomes, strict=True))

    return asyncio.run(run_all())


@in_docker
@pytest.mark.parametrize("name", DOCKER_FORGERIES)
def test_a_forged_grade_stays_0_in_a_container(
    container_outcomes: dict[str, Trajectory | TrialFailure], name: str
) -> None:
    outcome = container_outcomes[name]
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 0.0


@in_docker
def test_the_verifier_sees_the_honest_changes_in_a_container(
    container_outcomes: dict[str, Trajectory | TrialFailure],
) -> None:
    outcome = container_outcomes["honest"]
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.zero_reason) == (1.0, None)


@in_docker
@pytest.mark.parametrize("name", BROKEN_CONTAINER_TRIALS)
def test_a_container_trial_that_its_agent_breaks_is_graded_0(
    container_outcomes: dict[str, Trajectory | TrialFailure], name: str
) -> None:
    outcome = container_outcomes[name]
    reason = BROKEN_CONTAINER_TRIALS[name][1]
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 0.0
    assert reason is ... or outcome.zero_reason is reason


@in_docker
async def test_too_large_files_in_a_container_are_graded_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.envs.harbor.docker_files.MAX_BYTES", 2**20)
    directory = docker_task(tmp_path / "task", BY_CAT)
    attack = "mkdir large; truncate -s 300M large/file"
    async with asyncio.timeout(150):  # Docker removes the container only after it has written the archive
        outcome = await run_trial(tmp_path, directory, attack, wait_s=1.0, environment_type="docker")
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.zero_reason) == (0.0, ZeroReason.FILES_TOO_LARGE)
    assert containers(outcome.trial_name.lower()) == set()


@in_sandbox
async def test_a_failure_to_unpack_files_gives_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacking can fail for reasons that the agent does not cause, so this is an infrastructure failure."""

    async def fail_to_unpack(*_: object) -> None:
        raise FileExistsError("handed-in")

    monkeypatch.setattr(SandboxFiles, "unpack", fail_to_unpack)
    outcome = await run_trial(tmp_path, task(tmp_path / "task", BY_CAT), "printf right > answer.txt")
    assert isinstance(outcome, TrialFailure), outcome


@in_sandbox
async def test_a_failure_to_remove_files_gives_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If files cannot be removed from the fresh environment, for example because its image lacks `rm`, the
    trial has an infrastructure failure."""
    unpack = SandboxFiles.unpack

    async def unpack_without_rm(
        files: SandboxFiles, fresh: SandboxEnvironment, archive: IO[bytes], changes: FileChanges
    ) -> None:
        if changes.removed:
            raise AgentFault(ZeroReason.FILES_UNREADABLE, "rm: not found")
        await unpack(files, fresh, archive, changes)

    monkeypatch.setattr(SandboxFiles, "unpack", unpack_without_rm)
    directory = task(tmp_path / "task", BY_CAT, dockerfile=f"{DOCKERFILE}RUN touch old.txt\n")
    outcome = await run_trial(tmp_path, directory, "rm old.txt; printf right > answer.txt")
    assert isinstance(outcome, TrialFailure), outcome
