"""A client that takes its stream too slowly is cut: its workers let go at once, and it costs no more than the limit."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.messages import Cancel, Submit, Tokens, TokenUpdate
from core.request import FinishReason, Request
from router import buffer
from router.app import build_app
from tests.router.scripted import Stage, open_stage, settle

BODY = {"prompt": [1] * 40, "stream": True, "max_tokens": 200}


class SlowClient:
    """One streamed request over bare ASGI; takes an event only when told to."""

    def __init__(self, stage: Stage) -> None:
        self.received: list[bytes] = []
        self._inbox = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]
        self.may_read = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("router", 80),
        }
        self.task = asyncio.ensure_future(build_app(stage.service)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._inbox:
            return self._inbox.pop()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def _send(self, message: Any) -> None:
        await self.may_read.wait()
        self.received.append(message.get("body", b""))


def script(request: Request, child: int) -> tuple[Sequence[int], FinishReason]:
    """One token with the first message; the others come by `more_tokens`."""
    return [5] * request.sampling.max_tokens, "length"


def more_tokens(stage: Stage, first_index: int, count: int) -> None:
    decode = stage.workers["decode-0"]
    (submit,) = decode.sent(Submit)
    assert isinstance(submit, Submit) and decode.link is not None
    update = TokenUpdate(child=0, first_index=first_index, token_ids=(5,) * count)
    decode.link.send([Tokens(request_id=submit.request_id, attempt=submit.attempt, updates=(update,))])


async def open_stream(stage: Stage) -> SlowClient:
    """A stream whose first token is there."""
    decode = stage.workers["decode-0"]
    decode.script = script
    decode.replies = lambda m: decode.ordinary(m)[:2] if type(m).__name__ == "Offer" else None
    client = SlowClient(stage)
    await settle()
    return client


def test_stream_ends_with_an_error_event_when_its_reader_is_too_far_behind(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            client = await open_stream(stage)
            for index in range(1, 12):
                more_tokens(stage, index, 1)
            await settle()
            assert stage.service.admission.num_in_flight == 1 and not stage.cancels("decode-0")
            more_tokens(stage, 12, 10)
            await settle()
            assert len(stage.workers["decode-0"].sent(Cancel)) == 1
            client.may_read.set()
            await settle()
            assert client.task.done()
            events = b"".join(client.received).decode().split("\n\n")
            assert json.loads(events[-3].removeprefix("data: "))["error"]["type"] == "SlowReader"
            assert events[-2:] == ["data: [DONE]", ""]
            stage.service.check()
            assert not any(stage.service.books().values())

    monkeypatch.setattr(buffer, "UNREAD_TOKENS_MAX", 16)
    asyncio.run(main())


def test_stream_goes_on_when_its_reader_catches_up(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            client = await open_stream(stage)
            more_tokens(stage, 1, 15)
            await settle()
            client.may_read.set()
            await settle()
            client.may_read.clear()
            more_tokens(stage, 16, 15)
            await settle()
            assert not stage.cancels("decode-0") and b"error" not in b"".join(client.received)
            client.task.cancel()
            await asyncio.gather(client.task, return_exceptions=True)

    monkeypatch.setattr(buffer, "UNREAD_TOKENS_MAX", 16)
    asyncio.run(main())
