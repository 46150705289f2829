"""The HTTP server as the router runs it, and how long a connection may hold anything without getting on.

Bounds connections, the size of a request's head, the wait for one, and the wait for a client to take what was written.
Knows nothing about routes or requests.
"""

import asyncio
from typing import cast

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from core.errors import OverloadedError
from router.protocol.base import ErrorResponse
from router.sse import WRITE_TIMEOUT_S

HEAD_BYTES_MAX = 64 * 1024
"""Of the request line and headers."""
HEAD_TIMEOUT_S = 30.0
"""A connection without a request that is being served is cut after so long; an idle one that was used, after
KEEP_ALIVE_S."""
KEEP_ALIVE_S = 5
REFUSED_CONNECTIONS_MAX = 64
"""Connections over the limit that are told so at the same time; those beyond them are just closed."""
BACKLOG_MAX = 2048
"""Connections that the kernel keeps before they are accepted."""
CLOSE_TIMEOUT_S = 3
"""How long open connections may take to end when the server stops."""


class BoundedConnection(H11Protocol):
    """One client's connection."""

    connections_max = 512
    """Of one server; set by `build_server`."""
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unwritten_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_over = len(self.connections) - self.connections_max
        if num_over > REFUSED_CONNECTIONS_MAX:
            transport.abort()
            return
        if num_over > 0:
            self.app = refuse_connection
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_write()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _stopped(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _stopped(self._head_timer)
        self._write_timer = _stopped(self._write_timer)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the envelope, too, unless an answer is under way."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        text = f"{msg.rstrip('.')}: not HTTP/1.1, or a head of more than {HEAD_BYTES_MAX} bytes."
        body = ErrorResponse.make(message=text, type="BadRequestError", code=400).to_json().encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _watch_write(self) -> None:
        """Time runs while buffers are full. A client that stops reading is cut off, since an orderly close would wait
        for it.
        """
        self._write_timer = _stopped(self._write_timer)
        self._unwritten_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self._check_write)

    def _check_write(self) -> None:
        if self.transport.get_write_buffer_size() < self._unwritten_bytes:
            self._watch_write()
        else:
            self.transport.abort()

    def _watch_head(self) -> None:
        """Time runs while no request is served: before a request's head is whole, and after an answer."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        is_serving = cycle is not None and not cycle.response_complete
        if is_serving or self.transport.is_closing():
            self._head_timer = _stopped(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None


async def refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application for connections over the limit."""
    error = OverloadedError(reason="too many connections are open")
    headers = {"retry-after": str(error.retry_after_s), "connection": "close"}
    body = ErrorResponse.of(error).to_json()
    await Response(body, error.http_status, headers, media_type="application/json")(scope, receive, send)


def build_server(app: ASGIApp, *, max_connections: int) -> uvicorn.Server:
    """A server for one router's application, not yet started; it listens where its starter says."""

    class Connection(BoundedConnection):
        connections_max = max_connections

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG_MAX,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
        )
    )
