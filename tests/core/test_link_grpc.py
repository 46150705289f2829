"""What only the gRPC link does: real peers that die, bytes that are no frame, ports that are taken, large frames."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from core.errors import LinkClosedError
from core.ids import Attempt, Epoch, RequestId, RouterId, WorkerId
from core.link import Link
from core.link_grpc import METHOD, SERVICE, GrpcDialer, GrpcLink, GrpcServer
from core.messages import AnyMessage, Drain, Hello, Submit
from core.request import Request, SamplingParams

pytestmark = pytest.mark.process

PEER = """
import asyncio, sys
from core.errors import LinkClosedError
from core.link_grpc import GrpcDialer, GrpcServer

async def echo(link):
    while True:
        link.send(await link.receive())

async def main():
    if len(sys.argv) > 1:
        link = await GrpcDialer().dial(sys.argv[1], 10.0)
        await echo(link)
    server = GrpcServer(echo)
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
ENDING_PEER = """
import asyncio
from core.link_grpc import GrpcServer

async def end_soon(link):
    frame = await link.receive()
    for _ in range(4):
        await asyncio.sleep(0.1)
        link.send(frame)
    await link.close("you were silent")

async def main():
    server = GrpcServer(end_soon)
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
NOTICED_S = 2.0


def start_peer(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PEER, *arguments], stdout=subprocess.PIPE, text=True)


def hello() -> list[AnyMessage]:
    return [Hello(sender=RouterId("router-0"), epoch=Epoch(1), protocol_min=1, protocol_max=1)]


async def echo(link: Link) -> None:
    while True:
        link.send(await link.receive())


def test_dialler_notices_at_once_when_listener_is_killed() -> None:
    async def body(peer: subprocess.Popen[str]) -> None:
        assert peer.stdout is not None
        link = await GrpcDialer().dial(peer.stdout.readline().strip(), 10.0)
        link.send(hello())
        assert await link.receive() == hello()
        peer.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(LinkClosedError):
            await asyncio.wait_for(link.receive(), 10.0)
        assert time.monotonic() - killed < NOTICED_S
        await link.close()

    with start_peer() as peer:
        asyncio.run(body(peer))


def test_listener_notices_at_once_when_dialler_is_killed() -> None:
    async def body() -> None:
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        ended = asyncio.Event()

        async def accept(link: Link) -> None:
            link.send(hello())
            assert await link.receive() == hello()
            accepted.put_nowait(link)
            try:
                await link.receive()
            finally:
                ended.set()

        server = GrpcServer(accept)
        with start_peer(await server.start("127.0.0.1")) as peer:
            await asyncio.wait_for(accepted.get(), 15.0)
            peer.send_signal(signal.SIGKILL)
            killed = time.monotonic()
            await asyncio.wait_for(ended.wait(), 10.0)
            assert time.monotonic() - killed < NOTICED_S
        await server.close()

    asyncio.run(body())


def test_link_closes_with_the_reason_when_a_frame_is_not_decodable() -> None:
    async def body() -> None:
        server = GrpcServer(echo)
        channel: Any = grpc.aio.insecure_channel(await server.start("127.0.0.1"))
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        await call.write(b"\xc1 not a frame")
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be decoded"):
            await asyncio.wait_for(call.read(), 5.0)
        await channel.close()
        await server.close()

    asyncio.run(body())


def test_start_fails_when_the_port_is_taken() -> None:
    async def body() -> None:
        first, second = GrpcServer(echo), GrpcServer(echo)
        host, port = (await first.start("127.0.0.1")).split(":")
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await second.start(host, int(port))
        await first.close()
        await first.close()

    asyncio.run(body())


def test_large_frame_arrives_when_it_is_below_the_limit() -> None:
    async def body() -> None:
        server = GrpcServer(echo)
        link = await GrpcDialer().dial(await server.start("127.0.0.1"), 5.0)
        request = Request(
            request_id=RequestId("r"), token_ids=tuple(range(3_000_000)), sampling=SamplingParams(max_tokens=1)
        )
        frame: list[AnyMessage] = [
            Submit(request_id=request.request_id, attempt=Attempt(0), request=request, prefill_worker=WorkerId("p"))
        ]
        link.send(frame)
        assert await asyncio.wait_for(link.receive(), 15.0) == frame
        await link.close()
        await server.close()

    asyncio.run(body())


def test_links_end_when_the_listener_closes() -> None:
    async def body() -> None:
        server = GrpcServer(echo)
        endpoint = await server.start("127.0.0.1")
        links = [await GrpcDialer().dial(endpoint, 5.0) for _ in range(3)]
        await server.close()
        for link in links:
            with pytest.raises(LinkClosedError, match="the listener is closing"):
                await asyncio.wait_for(link.receive(), 5.0)
        with pytest.raises(LinkClosedError, match="nobody answers"):
            await GrpcDialer().dial(endpoint, 0.3)

    asyncio.run(body())


def test_check_finds_it_when_waiting_messages_are_miscounted() -> None:
    """RQ-2: the limit of a link is only as good as its count."""

    async def body() -> None:
        async def unused(_frame: bytes = b"") -> None:
            return

        link = GrpcLink("peer", unused, unused)
        link.send([Drain(), Drain()])
        link.check()
        link._num_outgoing_messages -= 1
        with pytest.raises(AssertionError, match="RQ-2: 1 messages are counted for peer, 2 wait"):
            link.check()

    asyncio.run(body())


def test_close_ends_in_bounded_time_when_the_peer_reads_nothing() -> None:
    async def body() -> None:
        never = asyncio.Event()

        async def stuck_write(_frame: bytes) -> None:
            await never.wait()

        async def stuck_read() -> bytes:
            await never.wait()
            return b""

        link = GrpcLink("peer", stuck_read, stuck_write)
        running = asyncio.ensure_future(link.run())
        link.send([Drain()])
        assert link.num_undelivered == 1
        link.check()
        await asyncio.wait_for(link.close("enough"), 5.0)
        await running
        assert link.closed_reason == "enough"
        assert link.num_undelivered == 0
        link.check()

    asyncio.run(body())


def num_connections(port: int) -> int:
    """Established TCP connections of this network namespace to a port."""
    lines = [line for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    fields = [line.split() for line in lines]
    return sum(one[3] == "01" and int(one[2].rpartition(":")[2], 16) == port for one in fields)


def test_connection_is_closed_when_a_write_finds_that_the_peer_has_ended_the_link() -> None:
    """As a process does that was stopped for a while: the peer gave it up meanwhile, and it first of all writes."""

    async def write_often(link: Link) -> None:
        while True:
            link.send(hello())
            await asyncio.sleep(0.05)

    async def body(endpoint: str) -> None:
        dialer, port = GrpcDialer(), int(endpoint.rpartition(":")[2])
        for _ in range(2):
            link = await dialer.dial(endpoint, 10.0)
            writing = asyncio.ensure_future(write_often(link))
            await asyncio.sleep(0.1)
            assert num_connections(port) == 1
            threading.Event().wait(1.0)  # nothing runs here
            with pytest.raises(LinkClosedError):
                while True:
                    await link.receive()
            await asyncio.gather(writing, return_exceptions=True)
            await link.close()
            async with asyncio.timeout(NOTICED_S):
                while num_connections(port):
                    await asyncio.sleep(0.01)

    with subprocess.Popen([sys.executable, "-c", ENDING_PEER], stdout=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stdout is not None
            asyncio.run(body(peer.stdout.readline().strip()))
        finally:
            peer.kill()
