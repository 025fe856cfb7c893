"""Replies with large results. Their encoding would block the event loop, and a reply that the client does not
read occupies memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

CHUNK_BYTES = 1 << 18


class LargeReply(Response):
    """Encodes its body in a thread and sends it in chunks as the client reads them. `threads` is held until
    the client has read the last chunk but one, so it limits the number of encoded bodies in memory."""

    def __init__(self, encode: Callable[[], bytes], threads: asyncio.Semaphore, *, media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._encode = encode
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._threads:
            body = await asyncio.to_thread(self._encode)
            self.headers["content-length"] = str(len(body))
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            for start in range(0, len(body), CHUNK_BYTES):
                end = start + CHUNK_BYTES
                await send(
                    {
                        "type": "http.response.body",
                        "body": body[start:end],
                        "more_body": end < len(body),
                    }
                )
