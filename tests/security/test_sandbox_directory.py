"""All trainers of a user share one root of sandbox directories, to which no other user can write."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from src.envs.sandbox import sandbox_directory as module
from src.envs.sandbox.sandbox_directory import (
    live_run_labels,
    remove_ended_runs,
    remove_tree,
    root_directory,
    sandbox_directory,
    temporary_sandbox_directory,
)
from tests.security.sandboxes import NOBODY, ROOT

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")

HOLD_DIRECTORY = (  # holds the sandbox directory argv[1] until its stdin is closed
    "import sys; from src.envs.sandbox.sandbox_directory import sandbox_directory; "
    "sandbox_directory(sys.argv[1]); "
    "print('held', flush=True); sys.stdin.read()"
)


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="without root, the child process may not be allowed to read the Python packages",
)
@pytest.mark.parametrize("variable", ["TMPDIR", "HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"])
def test_trainers_with_different_environments_share_the_root(variable: str, tmp_path: Path) -> None:
    label = f"alive-{os.getpid()}-{secrets.token_hex(4)}"
    environment = {**os.environ, variable: str(tmp_path)}
    command = [sys.executable, "-c", HOLD_DIRECTORY, label]
    other_trainer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT
    )
    try:
        assert other_trainer.stdout is not None and other_trainer.stdout.readline() == b"held\n"
        assert label in live_run_labels()
        assert label not in remove_ended_runs()
    finally:
        other_trainer.communicate(b"")
    assert label not in live_run_labels()


def test_other_users_cannot_list_or_change_sandbox_directories() -> None:
    for directory in (root_directory(), sandbox_directory(f"modes-{os.getpid()}")):
        status = directory.stat()
        assert status.st_uid == os.geteuid()
        assert stat.S_IMODE(status.st_mode) == (0o711 if os.geteuid() == 0 else 0o700)


def test_another_user_cannot_create_the_root_directory_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "ROOTS_PARENT", tmp_path / "missing")
    monkeypatch.setattr(module, "SHARED_TEMPORARY", tmp_path)
    monkeypatch.setattr(module, "_cache_directory", lambda: None)
    link = tmp_path / f"agent-trainer-{os.geteuid()}-0"  # its name sorts before names with random letters
    link_target = tmp_path / "elsewhere"
    link_target.mkdir()
    link.symlink_to(link_target)
    root = root_directory()
    assert root.parent == tmp_path and root not in (link, link_target) and not root.is_symlink()
    assert root_directory() == root, "another trainer of this user finds the same directory"
    assert list(link_target.iterdir()) == []


@needs_root
def test_a_directory_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "ROOTS_PARENT", tmp_path / "missing")
    monkeypatch.setattr(module, "SHARED_TEMPORARY", tmp_path)
    directory_of_nobody = tmp_path / "agent-trainer-0-0"
    directory_of_nobody.mkdir()
    os.chown(directory_of_nobody, int(NOBODY), int(NOBODY))
    assert root_directory() != directory_of_nobody


@needs_root
def test_a_tree_without_permissions_is_removed() -> None:
    """Root needs no permissions, so another user removes the tree."""
    with tempfile.TemporaryDirectory() as root:
        tree = Path(root) / "tree"
        (tree / "a" / "b").mkdir(parents=True)
        for path in (Path(root), *Path(root).rglob("*")):
            os.chown(path, int(NOBODY), int(NOBODY))
        for path in (tree / "a" / "b", tree / "a"):
            path.chmod(0)
        os.seteuid(int(NOBODY))
        try:
            remove_tree(tree)
        finally:
            os.seteuid(0)
        assert not tree.exists()


def test_a_temporary_sandbox_directory_is_removed() -> None:
    with temporary_sandbox_directory() as directory:
        assert directory.name in live_run_labels()
    assert not directory.exists()
