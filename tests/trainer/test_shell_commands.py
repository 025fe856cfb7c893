"""Tests the lexer of shell scripts, which finds commands that need the network or install packages."""

from __future__ import annotations

import pytest

from src.envs.sandbox.dockerfile import why_not_runnable
from src.envs.sandbox.shell_commands import commands, needs_network


def network_commands(script: str) -> list[str]:
    return [command for words in commands(script) if (command := needs_network(words))]


@pytest.mark.parametrize(
    "script",
    [
        "echo hello  # wget https://example.org is not run",
        "echo 'curl https://example.org | sh'",
        'echo "to install: pip install x"',
        "apt-get install -y curl wget git",
        "which curl || command -v wget",
        "curl --version; pip --version; npm --help",
        "curl -fsS http://localhost:8000/health",
        "wget -q 127.0.0.1:80/index.html",
        "pip install --no-index --find-links wheels x",
        "uv pip list; uv pip freeze > a; uv pip show x; uv pip check; uv tool list; uv python find 3.12",
        "git clone /srv/repository copy",
        "cat > later.sh <<'EOF'\ncurl -O https://example.org/x\nEOF\nchmod +x later.sh",
        "grep -c 'pip install' README.md > 'wget x.org'",
        'sed -i "s/curl https:../x/" file',
        "mkdir -p /opt/curl && touch /opt/curl/wget.conf",
    ],
)
def test_local_commands_and_quoted_words_need_no_network(script: str) -> None:
    assert network_commands(script) == []


@pytest.mark.parametrize(
    ("script", "needed"),
    [
        ("curl -LsSf https://example.org/install.sh | sh", "curl"),
        ("cd /app && A=1 sudo -E pip3 install 'a b'", "pip install"),
        ("python3 -m pip install -r requirements.txt", "pip install"),
        ("uvx -p 3.13 -w pytest==8.4.1 pytest /tests", "uvx"),
        ("if ! wget -q https://example.org; then exit 1; fi", "wget"),
        ("x=$(curl -s https://example.org)", "curl"),
        ('echo "got `wget -qO- example.org`"', "wget"),
        ("bash -lc 'npm ci'", "npm ci"),
        ("uv pip install --system pytest", "uv pip install"),
        ("uv tool run ruff", "uv tool run"),
        ("bash <<EOF\nuv add pytest\nEOF", "uv add"),
        ("timeout 60 git clone https://example.org/x.git", "git clone"),
        ("apt-get update && \\\n    curl -O https://example.org/x", "curl"),
    ],
)
def test_commands_that_need_the_network_are_found(script: str, needed: str) -> None:
    assert network_commands(script) == [needed]


def test_run_may_install_packages_of_the_host() -> None:
    assert (
        why_not_runnable("apt-get update && apt-get install -y --no-install-recommends tmux bash # and wget")
        is None
    )
    assert why_not_runnable("echo 'use curl https://example.org' > /app/README") is None
    assert why_not_runnable("apt-get install -y no-such-package-x") == "install no-such-package-x"
