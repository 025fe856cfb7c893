"""Weights for use elsewhere: save_weights_external, and files in PEFT's layout under URLs that open for an hour.

The adapter is written in PEFT's layout when its URLs are first asked for, beside the checkpoint, and goes with it; SDKs up to 0.35 ask for
both files in one tar, of any checkpoint. A URL carries its end and a signature by a secret of this process, so it needs no API key and
cannot be made up; after a restart the client asks for new ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import shutil
import tarfile
import uuid
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse

from skyrl_tx_server.errors import NotFoundError, UserError
from skyrl_tx_server.files.checkpoints import CheckpointKind, CheckpointStore, checkpoint_path
from skyrl_tx_server.files.peft_files import CONFIG, WEIGHTS, write_adapter
from skyrl_tx_server.ops import SaveExternal
from skyrl_tx_server.routes.border import Endpoint, Reply, read_json
from skyrl_tx_server.routes.context import Context
from skyrl_tx_server.routes.weights import CHECKPOINT, RUN, named, path_of, save_named
from skyrl_tx_server.wire.fields import Fields
from skyrl_tx_server.wire.requests import check_ttl

FILES = (CONFIG, WEIGHTS)
ARCHIVE = "adapter.tar"
URLS_OPEN_FOR = timedelta(hours=1)
_TIME = re.compile(r"[0-9]{1,12}")  # seconds since 1970
_SECRET = secrets.token_bytes(32)


async def save_weights_external(context: Context, request: Request) -> Reply:
    fields = Fields(await read_json(context, request), "save_weights_external")
    model_id = fields.text("model_id")
    seq_id = fields.optional_integer("seq_id")
    name = fields.text("path")
    ttl_seconds = check_ttl(fields.optional_integer("ttl_seconds"))
    fields.refuse("age_encryption_recipients", "encrypt the files after the download, e.g. with age")
    fields.ignore("type")
    fields.finish()
    model = context.registry.model(model_id)
    path = named(model_id, CheckpointKind.EXTERNAL, name)
    op = SaveExternal(model_id=model_id, name=name)
    return save_named(context, model, op, path, kind="save_weights_external", seq_id=seq_id, ttl_seconds=ttl_seconds)


async def external_weights_urls(context: Context, request: Request) -> Reply:
    path = checkpoint_path(request.path_params["run_id"], CheckpointKind.EXTERNAL, request.path_params["name"])
    await asyncio.to_thread(_adapter, context.checkpoints, path)
    expires = datetime.now(UTC) + URLS_OPEN_FOR
    return {"urls": {file: _url(request, path, file, expires) for file in FILES}, "expires": expires.isoformat()}


async def archive(context: Context, request: Request) -> Reply:
    """A redirect to the tar, whatever the kind of checkpoint."""
    path = path_of(request)
    await asyncio.to_thread(_archive, context.checkpoints, path)
    expires = datetime.now(UTC) + URLS_OPEN_FOR
    return RedirectResponse(_url(request, path, ARCHIVE, expires), 302, {"Expires": format_datetime(expires, usegmt=True)})


async def download(context: Context, request: Request) -> Reply:
    file, ends = request.path_params["file"], request.query_params.get("ends", "")
    path = path_of(request)
    signature = request.query_params.get("signature", "").encode("utf-8", "surrogatepass")
    if not _TIME.fullmatch(ends) or not hmac.compare_digest(signature, _signature(path, file, int(ends)).encode()):
        raise NotFoundError("no such download; ask for new URLs with get_external_weights_urls")
    if int(ends) < datetime.now(UTC).timestamp():
        raise UserError("this download URL has expired; ask for new ones with get_external_weights_urls")
    directory = await asyncio.to_thread(_archive if file == ARCHIVE else _adapter, context.checkpoints, path)
    return FileResponse(directory / file, media_type="application/octet-stream")


def _url(request: Request, path: str, file: str, expires: datetime) -> str:
    ends = int(expires.timestamp())
    address = f"{str(request.base_url).rstrip('/')}/api/v1/downloads/{quote(path.removeprefix('tinker://'))}/{file}"
    return f"{address}?ends={ends}&signature={_signature(path, file, ends)}"


def _signature(path: str, file: str, ends: int) -> str:
    return hmac.new(_SECRET, f"{path}/{file}/{ends}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _adapter(checkpoints: CheckpointStore, path: str) -> Path:
    """The checkpoint's adapter in PEFT's layout; the rename makes it complete or absent, whoever asks at the same time."""
    directory = checkpoints.directory(path)
    target = directory / "peft"
    if not target.exists():
        info, arrays = checkpoints.read(path)
        aside = directory / f"peft.{uuid.uuid4().hex}"
        aside.mkdir()
        try:
            write_adapter(aside, arrays, info.lora, info.base_model, "float32")
            os.replace(aside, target)
        except OSError:
            if not target.exists():  # no other request was faster
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target


def _archive(checkpoints: CheckpointStore, path: str) -> Path:
    """Where the adapter's files lie, and their tar beside them."""
    directory = _adapter(checkpoints, path)
    target = directory / ARCHIVE
    if not target.exists():
        aside = directory / f"{ARCHIVE}.{uuid.uuid4().hex}"
        try:
            with tarfile.open(aside, "w") as tar:
                for file in FILES:
                    tar.add(directory / file, arcname=file)
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)
    return directory


ENDPOINTS = (
    Endpoint(method="POST", path="/api/v1/save_weights_external", handler=save_weights_external),
    Endpoint(method="GET", path=RUN + "/checkpoints/external_weights/{name}/external_weights_urls", handler=external_weights_urls),
    Endpoint(method="GET", path=CHECKPOINT + "/archive", handler=archive),
    Endpoint(method="GET", path="/api/v1/downloads/{run_id}/{checkpoint_id:path}/{file}", handler=download, needs_key=False),
)
