"""Server-sent events: how a stream of answers is written to a client, and how long anyone works for a client that left.

Knows nothing about what the events say.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
WRITE_TIMEOUT_S = 60.0
"""A client that does not take an event for so long, its connection's buffers being full, counts as gone."""

Result = TypeVar("Result")


def encode_event(json_text: str) -> bytes:
    """One event. `json_text` has no line breaks."""
    return b"data: " + json_text.encode() + b"\n\n"


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. Cancels it and raises ClientDisconnect when the client hangs up first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response whose body is `events`. The generator is closed whatever ends the response, a hang-up included."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._write(send))
        except (ClientDisconnect, OSError):  # a TimeoutError is an OSError
            return
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        """Raises TimeoutError when the client stops reading."""
        await self._send(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await self._send(send, {"type": "http.response.body", "body": event, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await send(message)
