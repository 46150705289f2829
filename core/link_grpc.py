"""The link over gRPC: one bidirectional stream of raw frames per link, without protobuf.

Each link has its own connection, so that a peer that does not keep up slows nobody else. Frames leave in the order of
`send`; a peer that stops reading is cut when LINK_MESSAGES_MAX messages wait for it; a peer that dies is noticed when
its connection closes or, without that, after KEEPALIVE_S + KEEPALIVE_TIMEOUT_S. Knows nothing about what the messages
mean.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import grpc
import msgspec

from core.errors import LinkClosedError, LinkOverflowError
from core.link import LINK_MESSAGES_MAX, Accept, Link
from core.messages import FRAME_BYTES_MAX, AnyMessage, decode_frame, encode_frame

SERVICE = "pdcluster.Link"
METHOD = "Stream"
INCOMING_FRAMES_MAX = 1024
"""Frames that arrived and were not received yet; above it the peer's own queue fills."""
FLUSH_S = 1.0
"""How long a closing link tries to deliver what was sent, and how long a listener waits for its links to end."""
KEEPALIVE_S = 5.0
KEEPALIVE_TIMEOUT_S = 5.0
LINKS_MAX = 1024
"""Accepted links per listener; more are refused."""

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 1000) // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", int(KEEPALIVE_S * 1000) // 2),
    ("grpc.http2.max_ping_strikes", 0),
]
_STREAM_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What reading from or writing to a stream raises when its connection is gone."""

_EOF: object = getattr(grpc.aio, "EOF")  # noqa: B009  (missing from the type stubs)

Read = Callable[[], Awaitable[Any]]
Write = Callable[[bytes], Awaitable[None]]


class GrpcLink:
    """One end of a gRPC link. `run`, called by the dialer or listener, moves the frames until the link has closed."""

    def __init__(self, peer: str, read: Read, write: Write) -> None:
        self.peer = peer
        self._read = read
        self._write = write
        self._incoming: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._outgoing: deque[tuple[int, bytes]] = deque()
        self._num_outgoing_messages = 0
        self._queued = asyncio.Event()
        self._closing = asyncio.Event()
        self._ended = asyncio.Event()
        self._closed_reason: str | None = None
        self._can_flush = True

    def send(self, messages: list[AnyMessage]) -> None:
        if self._closed_reason is not None:
            raise LinkClosedError(peer=self.peer, reason=self._closed_reason)
        if self._num_outgoing_messages >= LINK_MESSAGES_MAX:
            self.mark_closed("the peer does not keep up", can_flush=False)
            raise LinkOverflowError(peer=self.peer, limit_messages=LINK_MESSAGES_MAX)
        self._outgoing.append((len(messages), encode_frame(messages)))
        self._num_outgoing_messages += len(messages)
        self._queued.set()

    async def receive(self) -> list[AnyMessage]:
        while not self._incoming:
            if self._closed_reason is not None:
                raise LinkClosedError(peer=self.peer, reason=self._closed_reason)
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._incoming.popleft()
        self._room.set()
        try:
            return decode_frame(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._incoming.clear()
            self.mark_closed(f"a frame cannot be decoded: {error}")
            raise LinkClosedError(peer=self.peer, reason=self._closed_reason) from error

    @property
    def num_undelivered(self) -> int:
        return len(self._incoming) + len(self._outgoing)

    def check(self) -> None:
        waiting = [count for count, _frame in self._outgoing]
        assert sum(waiting) == self._num_outgoing_messages, (
            f"RQ-2: {self._num_outgoing_messages} messages are counted for {self.peer}, {sum(waiting)} wait"
        )
        assert sum(waiting[:-1]) < LINK_MESSAGES_MAX, f"RQ-2: {sum(waiting)} messages wait for {self.peer}"
        assert len(self._incoming) <= INCOMING_FRAMES_MAX, f"RQ-2: {len(self._incoming)} frames of {self.peer} wait"
        assert not (self._ended.is_set() and waiting), f"RQ-2: {sum(waiting)} messages wait on an ended link"

    async def close(self, reason: str = "closed") -> None:
        self.mark_closed(reason)
        await self._ended.wait()

    @property
    def closed_reason(self) -> str | None:
        """Why the link is closed; None while it is open."""
        return self._closed_reason

    def mark_closed(self, reason: str, *, can_flush: bool = True) -> None:
        """Begin to close: nothing more is sent; what was sent is still written for FLUSH_S if `can_flush`."""
        if self._closed_reason is None:
            self._closed_reason = reason
            self._can_flush = can_flush
        for event in (self._arrived, self._queued, self._room, self._closing):
            event.set()

    async def run(self, half_close: Callable[[], Awaitable[None]] | None = None) -> None:
        """Move frames until the link is closed.

        `half_close` tells the peer that nothing more comes; its end of stream is then awaited for at most FLUSH_S.
        """
        reader = asyncio.create_task(self._read_frames())
        writer = asyncio.create_task(self._write_frames())
        try:
            await self._closing.wait()
            if self._can_flush:
                await asyncio.wait({writer}, timeout=FLUSH_S)
                if half_close is not None and writer.done() and not reader.done():
                    with suppress(*_STREAM_ERRORS):
                        await half_close()
                    await asyncio.wait({reader}, timeout=FLUSH_S)
        finally:
            self.mark_closed("connection lost", can_flush=False)
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            self._outgoing.clear()
            self._num_outgoing_messages = 0
            del self._read, self._write  # gRPC keeps a connection for as long as anybody refers to its call
            self._ended.set()

    async def _read_frames(self) -> None:
        reason = "the peer closed the link"
        try:
            while (frame := await self._read()) is not _EOF:
                if self._closed_reason is not None:
                    continue
                self._incoming.append(frame)
                self._arrived.set()
                while len(self._incoming) >= INCOMING_FRAMES_MAX and self._closed_reason is None:
                    self._room.clear()
                    await self._room.wait()
        except _STREAM_ERRORS as error:
            reason = _explain(error)
        self.mark_closed(reason, can_flush=False)

    async def _write_frames(self) -> None:
        while True:
            while self._outgoing:
                num_messages, frame = self._outgoing[0]
                try:
                    await self._write(frame)
                except _STREAM_ERRORS as error:
                    # The reader knows why, and may still find frames that arrived before the end.
                    await asyncio.wait({asyncio.ensure_future(self._closing.wait())}, timeout=FLUSH_S)
                    self.mark_closed(_explain(error), can_flush=False)
                    return
                self._outgoing.popleft()
                self._num_outgoing_messages -= num_messages
            if self._closed_reason is not None:
                return
            self._queued.clear()
            await self._queued.wait()


class GrpcDialer:
    """Opens links over gRPC, each on a connection of its own. Used from one asyncio loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def dial(self, endpoint: str, timeout_s: float) -> Link:
        """Connect to `host:port`, trying until `timeout_s`. Raises LinkClosedError when no link server answers."""
        channel: Any = grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        try:
            async with asyncio.timeout(timeout_s):
                await channel.channel_ready()
                call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
                await call.initial_metadata()
                if call.done():
                    raise LinkClosedError(peer=endpoint, reason=f"refused: {await call.details()}")
        except TimeoutError as error:
            await channel.close()
            raise LinkClosedError(peer=endpoint, reason=f"nobody answers within {timeout_s} s") from error
        except BaseException:
            await channel.close()
            raise
        link = GrpcLink(endpoint, call.read, call.write)
        task = asyncio.create_task(self._run(link, call, channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return link

    async def _run(self, link: GrpcLink, call: Any, channel: Any) -> None:
        try:
            await link.run(call.done_writing)
        finally:
            call.cancel()
            # A write that failed because the peer had ended the stream leaves a call that counts as done here and as
            # open in gRPC's core, for which `cancel` does nothing: its connection would stay open for ever.
            call._cython_call.cancel("the link is closed")
            await channel.close()


class GrpcServer:
    """Listens for links and serves each with `accept`. Used from one asyncio loop."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept
        self._links: set[GrpcLink] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int = 0) -> str:
        """Listen on `host:port` (0: any free port) and return that endpoint. Raises OSError when it is taken."""
        assert self._server is None, "a link server starts once"
        server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=LINKS_MAX)
        handler = grpc.stream_stream_rpc_method_handler(cast("Any", self._serve))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        if bound == 0:
            raise OSError(f"cannot listen on {host}:{port}")
        await server.start()
        self._server = server
        return f"{host}:{bound}"

    async def close(self) -> None:
        """Close every link and stop listening. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        for link in list(self._links):
            link.mark_closed("the listener is closing")
        await server.stop(FLUSH_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, _frames: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.send_initial_metadata(())
        link = GrpcLink(context.peer(), context.read, context.write)
        self._links.add(link)
        task: asyncio.Task[None] = asyncio.ensure_future(self._accept_link(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await link.run()
        finally:
            self._links.discard(link)
        context.set_code(grpc.StatusCode.ABORTED)
        context.set_details(link.closed_reason or "closed")

    async def _accept_link(self, link: GrpcLink) -> None:
        try:
            await self._accept(link)
        except LinkClosedError:
            return
        finally:
            link.mark_closed("the peer finished")


def _explain(error: BaseException) -> str:
    """What a person should read about a broken stream."""
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is not grpc.StatusCode.INTERNAL:
        return error.details() or str(error.code())
    return "connection lost"
