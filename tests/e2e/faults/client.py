"""A client of the HTTP API without sockets: one streamed completion, read to its end or hung up on, and its outcome.

Knows nothing about the cluster behind the application.
"""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp

DONE = "[DONE]"


class Call:
    """One POST to /v1/completions, token ids in and out. `task` is the server's side of it."""

    def __init__(
        self, app: ASGIApp, prompt: list[int], *, max_tokens: int, request_id: str, is_streamed: bool = True
    ) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False
        """The server ended the body in order."""
        self.reads = asyncio.Event()
        """The client takes what it is sent."""
        self.reads.set()
        self._hung_up = asyncio.Event()
        self._is_sent = False
        fields = {"model": "standin", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self._request = json.dumps({**fields, "stream": is_streamed, "return_token_ids": True}).encode()
        headers = {"content-type": "application/json", "x-request-id": request_id}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task: asyncio.Future[None] = asyncio.ensure_future(app(scope, self._receive, self._send))

    def hang_up(self) -> None:
        """Close the connection."""
        self._hung_up.set()

    @property
    def has_hung_up(self) -> bool:
        return self._hung_up.is_set()

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._request, "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if self._hung_up.is_set():
            return
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)

    @property
    def events(self) -> list[Any]:
        """Events of the stream so far, [DONE] as that string."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == DONE else json.loads(line) for line in lines]

    @property
    def tokens(self) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, dict)
            for choice in event.get("choices", [])
            for token in choice.get("token_ids", [])
        ]

    def failure(self) -> str | None:
        """As `docs/faults.md` names it: `refused STATUS…`, `error event`; None for an answer that ended well.

        What is none of these, such as a stream without an end, is an AssertionError.
        """
        assert self.task.done() and not self.has_hung_up
        self.task.result()
        assert self.is_complete and self.status is not None, "the response was not ended"
        if self.status != 200:
            assert json.loads(self.body)["error"]["code"] == self.status
            return f"refused {self.status}" + (" + Retry-After" if "retry-after" in self.headers else "")
        events = self.events
        assert events[-1] == DONE and DONE not in events[:-1], "the stream did not end with one [DONE]"
        errors = [event for event in events[:-1] if "error" in event]
        if errors:
            assert errors == events[-2:-1], "something came after the error event"
            return "error event"
        finished = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
        assert finished[-1:] == ["length"], "the stream ended without a finish reason"
        return None
