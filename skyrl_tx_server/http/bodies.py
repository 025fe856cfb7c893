"""Receive request bodies, with limits on size, time and the bytes in memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass

import zstandard
from starlette.requests import Request

from skyrl_tx_server.errors import CapacityError, UnsupportedMediaTypeError, UserError
from skyrl_tx_server.http.wire.json_body import CHAT_BOUNDS, CONTROL_BOUNDS, DATA_BOUNDS, JsonBounds

JSON_MEDIA_TYPE = "application/json"
PROTOBUF_MEDIA_TYPE = "application/x-protobuf"

SMALL_BYTES = 64 << 10
"""An uncompressed body up to this size is parsed on the event loop. If its content-length is known, the body
reserves no memory. The limit on connections also limits the number of such bodies."""
DISCARD_AT_MOST = 1 << 30
"""A rejected body that is larger than this is not read to its end."""
MIN_BYTES_PER_S = 64 << 10
"""A body is rejected if it arrives more than `stalled_s` seconds later than it would at this rate."""
MAX_COMPRESSION_RATIO = 200
ALWAYS_DECOMPRESSED_BYTES = 1 << 20  # a decompressed body up to this size may have any compression ratio
MAX_ZSTD_WINDOW_BYTES = 8 << 20
BODIES_IN_FLIGHT = 4  # the number of bodies of maximum size that may be in memory at the same time
UNCOMPRESSED = ("", "identity")  # values of content-encoding
_DECOMPRESS_STEP_BYTES = 1 << 20

_PARSERS = ThreadPoolExecutor(2, thread_name_prefix="parse-body")


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """The limits of the request bodies of a route. The option `max_request_mb` is a second limit on their
    size."""

    max_bytes: int = 1 << 20  # after decompression
    json: JsonBounds = CONTROL_BOUNDS
    media_types: tuple[str, ...] = (JSON_MEDIA_TYPE,)


CONTROL_BODY = BodyLimits()
SAMPLE_BODY = BodyLimits(max_bytes=32 << 20, json=DATA_BOUNDS)
"""A context of a million tokens takes 8 MiB as JSON. The remaining bytes are for target_prompt_logprobs."""
TRAINING_JSON_BODY = BodyLimits(max_bytes=32 << 20, json=DATA_BOUNDS)
"""SDKs up to 0.24 send at most 5 MB of tensors in a request, which are up to 25 MB as JSON."""
TRAINING_BODY = BodyLimits(
    max_bytes=1 << 30, json=DATA_BOUNDS, media_types=(JSON_MEDIA_TYPE, PROTOBUF_MEDIA_TYPE)
)
"""The limit for protobuf is `max_request_mb`. The limit for JSON is TRAINING_JSON_BODY."""
CHAT_BODY = BodyLimits(max_bytes=8 << 20, json=CHAT_BOUNDS)
"""The text of a context of a million tokens fits into these limits."""


class BodyReader:
    """Receives and parses request bodies. Limits the bytes of the bodies that are in memory at the same time.
    Large requests are admitted in order."""

    def __init__(self, *, max_bytes: int = 64 << 20, stalled_s: float = 120.0) -> None:
        """`max_bytes` is the option `max_request_mb`. A body is rejected if it pauses, or waits for free
        memory, longer than `stalled_s`."""
        self.used_bytes = 0
        self._max_bytes = max_bytes
        self._capacity = BODIES_IN_FLIGHT * max_bytes
        self._stalled_s = stalled_s
        self._parent: BodyReader | None = None  # its limit applies too
        self._first_in_line = asyncio.Lock()  # serves the waiting requests in order
        self._released = asyncio.Event()

    def share(self, parts: int) -> BodyReader:
        """Return a reader for one of `parts` tenants. Its bodies also count as bodies of this reader."""
        reader = BodyReader(max_bytes=self._max_bytes, stalled_s=self._stalled_s)
        reader._capacity = max(self._max_bytes, self._capacity // parts)
        reader._parent = self
        return reader

    @asynccontextmanager
    async def parsed[T](
        self, request: Request, parse: Callable[[bytes], T], limits: BodyLimits
    ) -> AsyncGenerator[T]:
        """Provide `parse(body)` of the decompressed body. The bytes of a large body stay reserved until the
        block ends. Large and compressed bodies are decompressed and parsed in a thread. Raise UserError for
        an invalid body, and CapacityError if too many bodies are being received."""
        limit = min(limits.max_bytes, self._max_bytes)
        headers: dict[bytes, bytes] = dict(request.scope["headers"])
        encoding = _encoding(headers)
        compressed = encoding not in UNCOMPRESSED
        num_bytes = _reserved_bytes(headers, limit)
        async with nullcontext() if num_bytes <= SMALL_BYTES else self.reserve(num_bytes):
            body = await _receive(request, limit, self._stalled_s)
            _check_media_type(headers, limits, body)
            if compressed and encoding != "zstd":
                raise UserError(f"content-encoding {encoding[:80]!r} is not supported; send zstd or none")
            if not compressed and len(body) <= SMALL_BYTES:
                yield parse(body)
                return
            yield await asyncio.get_running_loop().run_in_executor(
                _PARSERS, lambda: parse(decompress(body, limit) if compressed else body)
            )

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncGenerator[None]:
        """Wait until `num_bytes` are free, and reserve them until the block ends. Raise CapacityError if the
        wait takes too long. A body larger than the capacity reserves the whole capacity."""
        num_bytes = min(num_bytes, self._capacity)
        with ExitStack() as reserved:
            try:
                async with asyncio.timeout(self._stalled_s):
                    for reader in (self,) if self._parent is None else (self, self._parent):
                        await reader._acquire(num_bytes)
                        reserved.callback(reader._release, num_bytes)
            except TimeoutError:
                raise CapacityError("too many large requests are being received; try again later") from None
            yield

    async def _acquire(self, num_bytes: int) -> None:
        async with self._first_in_line:
            while self.used_bytes + num_bytes > self._capacity:
                self._released.clear()
                await self._released.wait()
            self.used_bytes += num_bytes

    def _release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        self._released.set()


def is_large(request: Request, limits: BodyLimits) -> bool:
    """Whether the body may have more than SMALL_BYTES after decompression."""
    return _reserved_bytes(dict(request.scope["headers"]), limits.max_bytes) > SMALL_BYTES


def _encoding(headers: Mapping[bytes, bytes]) -> str:
    return headers.get(b"content-encoding", b"").decode("latin-1").lower()


def _reserved_bytes(headers: Mapping[bytes, bytes], limit: int) -> int:
    """Return the largest size that the decompressed body can have in memory, in bytes. For a compressed body
    and for a body of unknown length, this size is above SMALL_BYTES."""
    length = headers.get(b"content-length", b"")
    if _encoding(headers) not in UNCOMPRESSED or (not length and b"transfer-encoding" in headers):
        return max(limit, SMALL_BYTES + 1)
    return min(int(length), limit) if length.isdigit() and len(length) < 20 else 0


async def _receive(request: Request, limit: int, stalled_s: float) -> bytes:
    """Return the body without decompressing it. A body over the limit is discarded, but read to its end (at
    most DISCARD_AT_MOST bytes), because the client would send it again if the connection were closed."""
    chunks: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(stalled_s) as deadline:
            async for chunk in request.stream():
                size += len(chunk)
                deadline.reschedule(min(loop.time(), started + size / MIN_BYTES_PER_S) + stalled_s)
                if size <= limit:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                    if size > DISCARD_AT_MOST:
                        break
    except TimeoutError:  # the client's machine is down, or the client sends slowly on purpose
        raise UserError(
            f"the body stalled: no byte for {stalled_s:g} s, or less than {MIN_BYTES_PER_S >> 10} KiB/s on "
            f"average; send it again"
        ) from None
    if size > limit:
        raise _too_large(limit)
    return b"".join(chunks)


def _check_media_type(headers: Mapping[bytes, bytes], limits: BodyLimits, body: bytes) -> None:
    """Raise UnsupportedMediaTypeError for a media type that the route does not accept, in particular
    text/plain and forms, which web pages can send without a CORS preflight."""
    if not body:
        return
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if media_type not in limits.media_types:
        accepted = " or ".join(limits.media_types)
        raise UnsupportedMediaTypeError(
            f"content-type {media_type[:80]!r} is not accepted here; send {accepted} "
            f"(curl: -H 'Content-Type: {limits.media_types[0]}')"
        )


def decompress(body: bytes, limit: int) -> bytes:
    """Return the decompressed body. Raise UserError if `body` is not zstd, or if the result is larger than
    `limit` bytes. Also raise UserError if the result is larger than ALWAYS_DECOMPRESSED_BYTES and larger than
    MAX_COMPRESSION_RATIO times the size of `body`."""
    largest = min(limit, max(ALWAYS_DECOMPRESSED_BYTES, MAX_COMPRESSION_RATIO * len(body)))
    parts: list[bytes] = []
    size = 0
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
        with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
            while size <= largest and (part := reader.read(_DECOMPRESS_STEP_BYTES)):
                parts.append(part)
                size += len(part)
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not valid zstd: {error}") from None
    if size > limit:
        raise _too_large(limit)
    if size > largest:
        raise UserError(
            f"the compression ratio of the body is above {MAX_COMPRESSION_RATIO}; send it without "
            "content-encoding"
        )
    return b"".join(parts)


def _too_large(limit: int) -> UserError:
    size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
    return UserError(
        f"the request is larger than this route's limit of {size}; send smaller requests (for training "
        "requests in protobuf, a larger max_request_mb of the server raises the limit)"
    )
