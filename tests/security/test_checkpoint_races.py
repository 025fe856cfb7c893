"""Concurrent archives, saves, deletions and expiry of one checkpoint leave it complete and consistent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from skyrl_tx_server.errors import NotFoundError
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.http.app import build_app, housekeep
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import StartupState
from tests.fakes.server import fake_context, fake_engine, serving
from tests.fakes.versions import save_version, version_in_archive, version_in_files, version_on_disk

ROOT = Path(__file__).parents[2]
PATH = "tinker://run/external_weights/last"
URL = "/api/v1/training_runs/run/checkpoints/external_weights/last"
ROUNDS = 25


@pytest.fixture
def context(tmp_path: Path) -> AppState:
    return fake_context(tmp_path)


@pytest.fixture
async def http(context: AppState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield http
    fake_engine(context).stop()


async def archived_version(http: httpx.AsyncClient) -> int | None:
    """Return the version in the archive, or None if the server replies 404."""
    redirect = await http.get(f"{URL}/archive")
    if redirect.status_code == 302:
        archive = await http.get(redirect.headers["location"])
        if archive.status_code == 200:
            return version_in_archive(archive.content)
        assert archive.status_code == 404, archive.text
        return None
    assert redirect.status_code == 404, redirect.text
    return None


async def test_an_archive_has_the_last_save_and_blocks_no_save(
    http: httpx.AsyncClient, context: AppState
) -> None:
    for version in (1, 2, 3):
        save_version(context.checkpoints, PATH, version)
        assert [await archived_version(http), await archived_version(http)] == [version, version]


async def test_a_download_url_is_invalid_after_the_next_save(
    http: httpx.AsyncClient, context: AppState
) -> None:
    """A client downloads both files one after the other, and they must belong to the same save."""
    save_version(context.checkpoints, PATH, 1)
    urls = (await http.get(f"{URL}/external_weights_urls")).json()["urls"]
    config = (await http.get(urls["adapter_config.json"])).content
    weights = (await http.get(urls["adapter_model.safetensors"])).content
    assert version_in_files(config, weights) == 1
    save_version(context.checkpoints, PATH, 2)
    reply = await http.get(urls["adapter_model.safetensors"])
    assert reply.status_code == 404 and "saved again" in reply.json()["detail"]
    context.checkpoints.delete(PATH)
    assert (await http.get(urls["adapter_config.json"])).status_code == 404


def test_a_running_download_keeps_its_version(tmp_path: Path) -> None:
    """A save or a deletion changes the checkpoint during the download. The archive is larger than the socket
    buffers, so the server reads most of it after this change.
    """
    context = fake_context(tmp_path)
    with serving(StartupState(state=context)) as url, httpx.Client(base_url=url, timeout=60) as http:
        for change in (
            lambda: save_version(context.checkpoints, PATH, 9),
            lambda: context.checkpoints.delete(PATH),
        ):
            save_version(context.checkpoints, PATH, 8, columns=3 << 20)  # rank 2, 24 MiB
            location = http.get(f"{URL}/archive").headers["location"]
            with http.stream("GET", location) as download:
                parts = download.iter_raw()
                received = [next(parts)]
                change()
                received += parts
            assert version_in_archive(b"".join(received)) == 8
            assert http.get(location).status_code == 404


async def test_concurrent_saves_archives_and_deletions_are_consistent(
    http: httpx.AsyncClient, context: AppState
) -> None:
    acknowledged, writing = 0, True

    async def save() -> None:
        nonlocal acknowledged, writing
        for version in range(acknowledged + 1, acknowledged + 1 + ROUNDS):
            await asyncio.to_thread(save_version, context.checkpoints, PATH, version)
            acknowledged = version
        writing = False

    async def archive() -> None:
        while writing:
            earliest = acknowledged
            version = await archived_version(http)
            assert version is None or version >= earliest, f"version {version} after {earliest} was saved"

    async def read() -> None:
        while writing:
            earliest = acknowledged
            try:
                assert await asyncio.to_thread(version_on_disk, context.checkpoints, PATH) >= earliest
            except NotFoundError:
                await asyncio.sleep(0)

    async def delete() -> None:
        while writing:
            reply = await http.delete(URL)
            assert reply.status_code in (204, 404), reply.text

    async with asyncio.TaskGroup() as tasks:
        for run in (save, *[archive] * 4, *[read] * 2):
            tasks.create_task(run())
    # Without a deletion, the last version remains.
    assert (await archived_version(http), version_on_disk(context.checkpoints, PATH)) == (
        ROUNDS,
        ROUNDS,
    )
    writing = True
    async with asyncio.TaskGroup() as tasks:
        for run in (save, *[archive] * 3, delete, delete, read):
            tasks.create_task(run())
    save_version(context.checkpoints, PATH, 777)
    assert await archived_version(http) == 777


def test_concurrent_saves_of_a_name_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    """A save removes the files of earlier saves, but not the files of a concurrent save."""
    store, errors = CheckpointStore(tmp_path, "m"), []

    def save(first: int) -> None:
        try:
            for version in range(first, first + ROUNDS):
                save_version(store, PATH, version)
                version_on_disk(store, PATH)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(100 * number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(list((tmp_path / "run" / "external_weights" / "last").iterdir())) == 2


async def test_the_expiry_of_a_save_does_not_delete_a_later_save(
    http: httpx.AsyncClient, context: AppState
) -> None:
    """`housekeep` runs after the later save is written and before the expiry of that save is recorded."""
    save_version(context.checkpoints, PATH, 1)
    assert (await http.put(f"{URL}/ttl", json={"ttl_seconds": 5000})).status_code == 204
    (listed,) = (await http.get("/api/v1/checkpoints")).json()["checkpoints"]
    assert listed["expires_at"] is not None
    generation = context.checkpoints.info(PATH).generation
    context.run_index.set_expiry(PATH, datetime.now(UTC) - timedelta(seconds=1), generation)
    save_version(context.checkpoints, PATH, 2)
    await housekeep(context)
    assert version_on_disk(context.checkpoints, PATH) == 2
    (listed,) = (await http.get("/api/v1/checkpoints")).json()["checkpoints"]
    assert listed["expires_at"] is None
    context.run_index.forget(PATH, generation)
    assert context.run_index.expiries == {}


async def test_a_removed_ttl_is_observed_while_others_expire(
    http: httpx.AsyncClient, context: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "tinker://run/external_weights/other"
    for path in (other, PATH):
        generation = save_version(context.checkpoints, path, 1).generation
        context.run_index.set_expiry(path, datetime.now(UTC) - timedelta(seconds=1), generation)
    delete, loop = context.checkpoints.delete, asyncio.get_running_loop()

    def delete_slowly(path: str, *, only: str | None = None) -> str | None:
        """Delete a checkpoint while a client removes the TTL of `PATH`."""
        if path == other:
            request = asyncio.run_coroutine_threadsafe(http.put(f"{URL}/ttl", json={}), loop)
            assert request.result(60).status_code == 204
        return delete(path, only=only)

    monkeypatch.setattr(context.checkpoints, "delete", delete_slowly)
    await housekeep(context)
    assert not context.checkpoints.exists(other)
    assert version_on_disk(context.checkpoints, PATH) == 1


async def test_deleting_a_checkpoint_keeps_the_expiry_of_a_later_save(context: AppState) -> None:
    old_generation = save_version(context.checkpoints, PATH, 1).generation
    new_generation = save_version(context.checkpoints, PATH, 2).generation
    expires_at = datetime.now(UTC) + timedelta(hours=1)
    context.run_index.set_expiry(PATH, expires_at, new_generation)
    context.run_index.forget(PATH, old_generation)
    assert context.run_index.expiry(PATH, new_generation) == expires_at
    fake_engine(context).stop()


async def test_derived_files_are_removed_with_their_checkpoint(
    http: httpx.AsyncClient, context: AppState, tmp_path: Path
):
    derived = tmp_path / ".derived"
    for version in (1, 2):
        save_version(context.checkpoints, PATH, version)
        assert await archived_version(http) == version
        assert (await http.get(f"{URL}/external_weights_urls")).status_code == 200
        (directory,) = derived.iterdir()
        assert directory.name == context.checkpoints.info(PATH).generation
    await housekeep(context)
    assert len(list(derived.iterdir())) == 1
    (derived / ".new-of-a-killed-server").mkdir()
    context.checkpoints.derived_files.sweep(-60.0)
    assert list(derived.iterdir()) == []
    assert await archived_version(http) == 2
    assert (await http.delete(URL)).status_code == 204
    assert list(derived.iterdir()) == []


async def test_a_save_removes_an_unknown_directory_of_a_checkpoint(
    http: httpx.AsyncClient, context: AppState, tmp_path: Path
) -> None:
    save_version(context.checkpoints, PATH, 1)
    directory = tmp_path / "run" / "external_weights" / "last" / "peft"
    directory.mkdir()
    (directory / "adapter.tar").write_bytes(b"stale")
    assert await archived_version(http) == 1
    save_version(context.checkpoints, PATH, 2)
    assert not directory.exists() and await archived_version(http) == 2


def test_a_kill_at_any_point_keeps_checkpoints_consistent(tmp_path: Path) -> None:
    """`checkpoint_kills` kills one child at its 1st call that changes the disk, another at its 8th, etc."""
    command = [sys.executable, "-m", "tests.stress.checkpoint_kills", str(tmp_path), "7"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "no version was lost or mixed with another" in process.stdout
