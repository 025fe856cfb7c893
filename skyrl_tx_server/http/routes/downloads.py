"""Downloads of adapters in PEFT format, from URLs that are valid for an hour.

The adapter is written in PEFT format when its URLs are first requested (`files/derived.py`). It consists of a
configuration file and a weights file. SDKs up to 0.35 request both files in one tar.

A URL contains its expiry time, the generation of the checkpoint and a signature. Every save of a checkpoint
creates a new generation, which identifies the saved arrays. The signature proves that this server issued the
URL, so a download needs no API key. It is made with a secret that the process creates at its start, so the
client must request new URLs after a restart of the server. The URLs of a checkpoint reply 404 after the
checkpoint is saved again or deleted. All files that a client downloads with the URLs of one reply therefore
belong to the same generation. If a file is removed during its download, the download still completes, because
the reply keeps the file open.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import tarfile
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import numpy as np
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse
from starlette.types import Receive, Scope, Send

from skyrl_tx_server.engine.operations import SaveExternal
from skyrl_tx_server.errors import NotFoundError, UserError
from skyrl_tx_server.files.checkpoint_record import CheckpointInfo, CheckpointKind, checkpoint_path
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.peft_files import CONFIG, WEIGHTS, write_adapter
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Reply, read_fields
from skyrl_tx_server.http.routes.weights import CHECKPOINT, RUN, checkpoint_path_of, path_of, save_named
from skyrl_tx_server.http.wire.limits import check_ttl

FILES = (CONFIG, WEIGHTS)
ARCHIVE = "adapter.tar"
URLS_OPEN_FOR = timedelta(hours=1)
KEEP_UNUSED_FOR = URLS_OPEN_FOR + timedelta(minutes=10)
"""The PEFT files and the tar of a generation are removed after this period without a request for them."""
_SECRET = secrets.token_bytes(32)
_NEW_URL = "request a new URL with get_external_weights_urls (SDK 0.35 and older: get_checkpoint_archive_url)"
_ANY_TEXT = ("utf-8", "surrogatepass")
"""Arguments of `str.encode` for text of a URL, which may contain lone surrogates."""


async def save_weights_external(state: AppState, request: Request) -> Reply:
    fields = await read_fields(state, request, "save_weights_external")
    model_id = fields.text("model_id")
    seq_id = fields.optional_integer("seq_id")
    name = fields.text("path")
    ttl_seconds = check_ttl(fields.optional_integer("ttl_seconds"))
    fields.refuse(
        "age_encryption_recipients",
        "encrypt the files after the download, e.g. with age; tinker_cookbook.weights.download always sends "
        "this field for the path of save_state, so call that function with the path of "
        "save_weights_external, or run tinker checkpoint download",
    )
    fields.finish(ignored=("type",))
    model = state.registry.model(model_id)
    path = checkpoint_path_of(model_id, CheckpointKind.EXTERNAL, name)
    op = SaveExternal(model_id=model_id, name=name)
    return save_named(
        state, model, op, path, kind="save_weights_external", seq_id=seq_id, ttl_seconds=ttl_seconds
    )


async def external_weights_urls(state: AppState, request: Request) -> Reply:
    path = checkpoint_path(
        request.path_params["run_id"], CheckpointKind.EXTERNAL, request.path_params["name"]
    )
    info, _ = await asyncio.to_thread(file_of, state.checkpoints, path, CONFIG)
    expires = datetime.now(UTC) + URLS_OPEN_FOR
    return {
        "urls": {file: _url(request, info, file, expires) for file in FILES},
        "expires": expires.isoformat(),
    }


async def archive(state: AppState, request: Request) -> Reply:
    """Redirect to the tar of the adapter of a checkpoint."""
    info, _ = await asyncio.to_thread(file_of, state.checkpoints, path_of(request), ARCHIVE)
    expires = datetime.now(UTC) + URLS_OPEN_FOR
    return RedirectResponse(
        _url(request, info, ARCHIVE, expires), 302, {"Expires": format_datetime(expires, usegmt=True)}
    )


async def download(state: AppState, request: Request) -> Reply:
    path, file = path_of(request), request.path_params["file"]
    ends, generation, signature = (
        request.query_params.get(name, "") for name in ("ends", "generation", "signature")
    )
    is_time = re.fullmatch("[0-9]{1,12}", ends) is not None
    if not is_time or not hmac.compare_digest(
        signature.encode(*_ANY_TEXT), _signature(path, file, generation, int(ends)).encode()
    ):
        raise NotFoundError(f"no such download; {_NEW_URL}")
    if int(ends) < datetime.now(UTC).timestamp():
        raise UserError(f"this download URL has expired; {_NEW_URL}")
    return OpenFileResponse(await asyncio.to_thread(_open, state.checkpoints, path, file, generation))


class OpenFileResponse(FileResponse):
    """Sends an open file, so that removing the file has no effect on the reply."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(f"/proc/self/fd/{file.fileno()}", media_type="application/octet-stream")
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def _open(checkpoints: CheckpointStore, path: str, file: str, generation: str) -> BinaryIO:
    """Open the archive or a file of a checkpoint's adapter. Raise NotFoundError if `generation` is not the
    generation of the checkpoint."""
    while True:
        info, target = file_of(checkpoints, path, file)
        if info.generation != generation:
            raise NotFoundError(f"checkpoint {path} was saved again after this URL was created; {_NEW_URL}")
        try:
            return target.open("rb")
        except FileNotFoundError:
            continue  # the file was removed before it was opened; write it again


def _url(request: Request, info: CheckpointInfo, file: str, expires: datetime) -> str:
    ends = int(expires.timestamp())
    path = quote(info.path.removeprefix("tinker://"))
    address = f"{str(request.base_url).rstrip('/')}/api/v1/downloads/{path}/{file}"
    signature = _signature(info.path, file, info.generation, ends)
    return f"{address}?ends={ends}&generation={info.generation}&signature={signature}"


def _signature(path: str, file: str, generation: str, ends: int) -> str:
    return hmac.new(
        _SECRET, f"{path}/{file}/{generation}/{ends}".encode(*_ANY_TEXT), hashlib.sha256
    ).hexdigest()


def file_of(checkpoints: CheckpointStore, path: str, file: str) -> tuple[CheckpointInfo, Path]:
    """Return the record of a checkpoint and the path of a file of its adapter, or of the tar of these files.
    Write them if necessary."""
    if file == ARCHIVE:
        return checkpoints.derived(path, ARCHIVE, _write_archive)
    info, directory = checkpoints.derived(path, "peft", _write_peft)
    return info, directory / file


def _write_peft(target: Path, *, info: CheckpointInfo, arrays: Mapping[str, np.ndarray]) -> None:
    write_adapter(target, arrays, info.lora, info.base_model, "float32")


def _write_archive(target: Path, *, info: CheckpointInfo, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the tar with mode 600. Its bytes are reproducible, so that the parts of a download belong
    together even if the tar is removed and written again between two range requests."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with (
        os.fdopen(descriptor, "wb") as stream,
        tempfile.TemporaryDirectory(dir=target.parent) as directory,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        write_adapter(Path(directory), arrays, info.lora, info.base_model, "float32")
        normalize = partial(_reproducible, created_at=info.created_at)
        for name in FILES:
            tar.add(Path(directory) / name, arcname=name, filter=normalize)


def _reproducible(member: tarfile.TarInfo, *, created_at: datetime) -> tarfile.TarInfo:
    mtime = int(created_at.timestamp())
    return member.replace(mtime=mtime, uid=0, gid=0, uname="", gname="", mode=0o644, deep=False)


ENDPOINTS = (
    Endpoint(method="POST", path="/api/v1/save_weights_external", handler=save_weights_external),
    Endpoint(
        method="GET",
        path=RUN + "/checkpoints/external_weights/{name}/external_weights_urls",
        handler=external_weights_urls,
    ),
    Endpoint(method="GET", path=CHECKPOINT + "/archive", handler=archive),
    Endpoint(
        method="GET",
        path="/api/v1/downloads/{run_id}/{checkpoint_id:path}/{file}",
        handler=download,
        needs_key=False,
    ),
)
