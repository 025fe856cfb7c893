"""Requirements are pinned by hash, run directories are private, and scripts use no predictable temporary
path."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from src.cli.command_line import parse
from src.config import TrainerConfig
from src.core.errors import ConfigError
from src.records.private_directory import make_parents, make_private, resolved, write_private
from src.records.run_directory import RunDirectory, find_run_directory, lock_run_dir, run_path

ROOT = Path(__file__).resolve().parents[2]
PINNED_REQUIREMENTS = ("requirements.txt", "scripts/uv.txt", "scripts/smollm2.txt")
URLS = re.compile(r"https?://|--index-url|--extra-index-url|--find-links|@ ")
IN_TEMPORARY_DIRECTORY = re.compile(r"""["'= ]/(?:var/)?tmp/[\w$]""")
SCRIPTS = [
    *(ROOT / "scripts").rglob("*.py"),
    *(ROOT / "scripts").rglob("*.sh"),
    *(ROOT / "scripts").rglob("*.args"),
    *ROOT.glob("*.sh"),
]


def config(path: Path, **changes: object) -> TrainerConfig:
    options = {
        "model_name": "m",
        "tasks_dir": "t",
        "backend": "skyrl-tx",
        "skyrl_tx_url": "http://h:1",
        "log_path": path,
    } | changes
    return parse([f"{name}={value}" for name, value in options.items()])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", PINNED_REQUIREMENTS)
def test_every_requirement_has_a_hash_and_no_url(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not URLS.search(text)
    requirements = text.replace("\\\n", " ").splitlines()
    assert requirements
    for requirement in requirements:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[^\s=]+( +--hash=sha256:[0-9a-f]{64})+ *", requirement), (
            requirement[:80]
        )


def test_setup_requires_hashes_for_all_packages() -> None:
    lines = (ROOT / "scripts" / "setup.sh").read_text().replace("\\\n", " ").splitlines()
    installs = [
        line for line in lines if re.search(r"pip install .* -r ", line) and not line.lstrip().startswith("#")
    ]
    assert len(installs) == len(PINNED_REQUIREMENTS)
    assert all("--require-hashes" in line for line in installs)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_script_writes_to_a_predictable_temporary_path(path: Path) -> None:
    assert not IN_TEMPORARY_DIRECTORY.search(path.read_text())
    assert not re.search(r"""["']/tmp["']|gettempdir|mktemp\(""", path.read_text())


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777], ids=oct)
def test_a_run_directory_is_private_with_any_umask(tmp_path: Path, umask: int) -> None:
    options = config(tmp_path / "run")
    previous_umask = os.umask(umask)
    try:
        RunDirectory(path=tmp_path / "run", checkpoint=None, delete_first=False).create(options)
        RunDirectory(path=tmp_path / "run", checkpoint=None, delete_first=True).create(options)
    finally:
        os.umask(previous_umask)
    assert mode(tmp_path / "run") == 0o700


def test_a_run_directory_that_others_can_read_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(0o755)
    RunDirectory(path=path, checkpoint=None, delete_first=False).create(config(path))
    assert "can be read by other users (mode 755)" in caplog.text
    assert mode(path) == 0o755


@pytest.fixture
def shared_directory(tmp_path: Path) -> Path:
    """A directory in which every user can create files, with the mode of /tmp."""
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


def test_the_default_parent_directory_of_runs_is_private(shared_directory: Path) -> None:
    options = config(Path("unused"), log_path=None, logs_dir=shared_directory / "runs")
    path = run_path(options, name="a")
    with lock_run_dir(path):
        find_run_directory(options, name="a").create(options)
    assert (mode(path.parent), mode(path)) == (0o700, 0o700)


def test_a_link_or_file_in_a_shared_directory_is_refused(shared_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (shared_directory / "linked").symlink_to(tmp_path / "mine")
    (shared_directory / "file").touch()
    for name, reason in (("linked", "is a symbolic link"), ("file", "is not a directory")):
        for path in (shared_directory / name, shared_directory / name / "run"):
            with pytest.raises(ConfigError, match=f"{reason}.*give another log_path or logs_dir"):
                run_path(config(path), name="a")
            with pytest.raises(ConfigError, match=reason):
                make_parents(path)
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a directory of another user")
def test_a_parent_directory_of_another_user_is_refused(shared_directory: Path) -> None:
    (shared_directory / "theirs").mkdir()
    os.chown(shared_directory / "theirs", 65534, 65534)
    with pytest.raises(ConfigError, match="theirs belongs to another user"):
        make_private(shared_directory / "theirs" / "run")


def test_a_link_in_a_private_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    assert resolved(tmp_path / "runs" / "a") == tmp_path.resolve() / "disk" / "a"


def test_a_private_file_is_private_and_replaces_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / "key").symlink_to(tmp_path / "other")
    previous_umask = os.umask(0)
    try:
        write_private(tmp_path / "key", "secret")
    finally:
        os.umask(previous_umask)
    assert (mode(tmp_path / "key"), (tmp_path / "key").read_text()) == (0o600, "secret")
    assert (tmp_path / "other").read_text() == "kept"
    with pytest.raises(UnicodeEncodeError):
        write_private(tmp_path / "key", "\ud800")
    assert (tmp_path / "key").read_text() == "secret"
