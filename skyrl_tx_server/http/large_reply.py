"""Replies with large results. A reply that the client does not read occupies memory."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl_tx_server.http.bodies import MIN_BYTES_PER_S
from skyrl_tx_server.http.listening import WRITE_TIMEOUT_S

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18


class LargeReply(Response):
    """Sends its body in chunks as the client reads them, so the reply ends after the client has read the last
    chunk but one. Ends without the rest of the body, which closes the connection, if sending takes
    WRITE_TIMEOUT_S more than the body takes at MIN_BYTES_PER_S."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S + len(self.body) / MIN_BYTES_PER_S):
                await send(
                    {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                )
                for start in range(0, len(self.body), CHUNK_BYTES):
                    end = start + CHUNK_BYTES
                    await send(
                        {
                            "type": "http.response.body",
                            "body": self.body[start:end],
                            "more_body": end < len(self.body),
                        }
                    )
        except TimeoutError:
            logger.warning(
                "closing the connection of a client that reads a reply at less than %d KiB/s",
                MIN_BYTES_PER_S >> 10,
            )
