"""Weights for use elsewhere: save_weights_external, and its files in PEFT's layout under URLs that open for an hour.

The adapter is written in PEFT's layout when its URLs are first asked for, beside the checkpoint, and goes with it. A URL carries its end
and a signature by a secret of this process, so it needs no API key and cannot be made up; after a restart the client asks for new ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import shutil
import uuid
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse

from skyrl_tx_server.checkpoints import CheckpointKind, CheckpointStore
from skyrl_tx_server.errors import NotFoundError, UserError
from skyrl_tx_server.ops import OpResult, SaveExternal
from skyrl_tx_server.peft_files import CONFIG, WEIGHTS, write_adapter
from skyrl_tx_server.routes.border import Endpoint, Reply, read_json
from skyrl_tx_server.routes.context import Context
from skyrl_tx_server.routes.training import model_key
from skyrl_tx_server.routes.weights import RUN, check_free, named, note_expiry
from skyrl_tx_server.wire import Fields, check_ttl

FILES = (CONFIG, WEIGHTS)
URLS_OPEN_FOR = timedelta(hours=1)
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

    def start() -> Future[OpResult]:
        check_free(context, path)
        return context.engine.submit(SaveExternal(model_id=model_id, name=name))

    request_id = context.futures.submit(
        start,
        kind="save_weights_external",
        key=model_key(model_id, seq_id),
        session_id=model.session_id,
        when_done=lambda outcome: note_expiry(context, path, ttl_seconds, outcome),
    )
    return {"request_id": request_id, "model_id": model_id}


async def external_weights_urls(context: Context, request: Request) -> Reply:
    run_id, name = request.path_params["run_id"], request.path_params["name"]
    await asyncio.to_thread(_written, context.checkpoints, _path(run_id, name))
    expires = datetime.now(UTC) + URLS_OPEN_FOR
    ends = int(expires.timestamp())
    base = str(request.base_url).rstrip("/")
    urls = {
        file: f"{base}/api/v1/downloads/{quote(run_id)}/{quote(name)}/{file}?ends={ends}&signature={_signature(run_id, name, file, ends)}"
        for file in FILES
    }
    return {"urls": urls, "expires": expires.isoformat()}


async def download(context: Context, request: Request) -> Reply:
    run_id, name, file = (request.path_params[key] for key in ("run_id", "name", "file"))
    ends = request.query_params.get("ends", "")
    if not ends.isdecimal() or not hmac.compare_digest(
        request.query_params.get("signature", ""), _signature(run_id, name, file, int(ends))
    ):
        raise NotFoundError("no such download; ask for new URLs with get_external_weights_urls")
    if int(ends) < datetime.now(UTC).timestamp():
        raise UserError("this download URL has expired; ask for new ones with get_external_weights_urls")
    directory = await asyncio.to_thread(_written, context.checkpoints, _path(run_id, name))
    return FileResponse(directory / file, media_type="application/octet-stream")


def _path(run_id: str, name: str) -> str:
    return f"tinker://{run_id}/{CheckpointKind.EXTERNAL}/{name}"


def _signature(run_id: str, name: str, file: str, ends: int) -> str:
    return hmac.new(_SECRET, f"{run_id}/{name}/{file}/{ends}".encode(), hashlib.sha256).hexdigest()


def _written(checkpoints: CheckpointStore, path: str) -> Path:
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


ENDPOINTS = (
    Endpoint(method="POST", path="/api/v1/save_weights_external", handler=save_weights_external),
    Endpoint(method="GET", path=RUN + "/checkpoints/external_weights/{name}/external_weights_urls", handler=external_weights_urls),
    Endpoint(method="GET", path="/api/v1/downloads/{run_id}/{name}/{file}", handler=download, needs_key=False),
)
