"""An OpenAI-compatible server on a real socket that answers as a test says: bytes, pauses, and how it ends."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

START_TIMEOUT_S = 10.0
MODELS = {"data": [{"id": "fake"}]}

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeAnswer:
    """What one request gets."""

    pieces: Sequence[tuple[float, bytes]]
    """(seconds to wait before, bytes of the body)."""
    status: int = 200
    ending: Literal["end", "cut", "hang"] = "end"
    """After the pieces: the body ends in order, the connection is cut, or nothing more comes until it closes."""


Script = Callable[[Body], FakeAnswer]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token_event(text: str, finish_reason: str | None = None, **extras: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **extras}], "usage": None})


def usage_event(num_prompt: int, num_output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output}})


DONE = b"data: [DONE]\n\n"


def plain_answer(body: Body, first_s: float = 0.0, gap_s: float = 0.0) -> FakeAnswer:
    """A proper stream of as many tokens as were asked for, one per piece."""
    count = body["max_tokens"]
    pieces = [
        (gap_s if index else first_s, token_event(" a", "length" if index == count - 1 else None))
        for index in range(count)
    ]
    return FakeAnswer(pieces=[*pieces, (0.0, usage_event(len(body["prompt"]), count) + DONE)])


class FakeServer:
    """Runs in a thread. `bodies` are the requests in order of arrival."""

    def __init__(self, script: Script, on_request: Callable[[], None] = lambda: None) -> None:
        self.bodies: list[Body] = []
        self.heads: list[str] = []
        self.num_open_max = 0
        self._num_open = 0
        self._script = script
        self._on_request = on_request
        self.url = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client is gone
        finally:
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False when the connection is to be closed."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((line for line in head.splitlines() if line.lower().startswith("content-length:")), "x: 0")
        raw = await reader.readexactly(int(length.partition(":")[2]))
        path = head.split(" ")[1]
        if not path.endswith("/completions"):
            status, body = (200, json.dumps(MODELS).encode()) if path.endswith("/models") else (404, b"")
            writer.write(b"HTTP/1.1 %d Status\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
            await writer.drain()
            return True
        self._on_request()
        self.heads.append(head)
        self.bodies.append(json.loads(raw))
        self._num_open += 1
        self.num_open_max = max(self.num_open_max, self._num_open)
        try:
            return await self._write(self._script(self.bodies[-1]), reader, writer)
        finally:
            self._num_open -= 1

    async def _write(self, answer: FakeAnswer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 %d Status\r\ntransfer-encoding: chunked\r\n\r\n" % answer.status)
        for wait_s, data in answer.pieces:
            await asyncio.sleep(wait_s)
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        if answer.ending == "hang":
            await reader.read()
        if answer.ending != "end":
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


@contextmanager
def serving(*servers: FakeServer) -> Iterator[None]:
    """The servers listen in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def stop(listeners: list[asyncio.Server]) -> None:
        for listener in listeners:
            listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    listeners = [asyncio.run_coroutine_threadsafe(s.start(), loop).result(START_TIMEOUT_S) for s in servers]
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(stop(listeners), loop).result(START_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_TIMEOUT_S)
        loop.close()
