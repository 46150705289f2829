"""The contract of a link, over the in-memory network and over gRPC: one suite, so that either may stand for the other.

The in-memory cases are fast; the gRPC cases use sockets on loopback and are marked `process`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from core.clock import ManualClock
from core.errors import LinkClosedError, LinkOverflowError
from core.ids import Epoch, RouterId
from core.link import LINK_MESSAGES_MAX, Accept, Dialer, Link, MemoryLink, MemoryNetwork
from core.link_grpc import GrpcDialer, GrpcServer
from core.messages import AnyMessage, Drain, Hello, Reject, encode_frame

TIMEOUT_S = 20.0
Open = Callable[[Accept], AbstractAsyncContextManager[tuple[Dialer, str]]]


@asynccontextmanager
async def open_memory(accept: Accept) -> AsyncIterator[tuple[Dialer, str]]:
    network = MemoryNetwork(ManualClock())
    network.listen("worker", accept)
    yield network, "worker"
    await network.close()


@asynccontextmanager
async def open_grpc(accept: Accept) -> AsyncIterator[tuple[Dialer, str]]:
    server = GrpcServer(accept)
    endpoint = await server.start("127.0.0.1")
    try:
        yield GrpcDialer(), endpoint
    finally:
        await server.close()


@pytest.fixture(params=["memory", pytest.param("grpc", marks=pytest.mark.process)])
def open_listener(request: pytest.FixtureRequest) -> Open:
    return {"memory": open_memory, "grpc": open_grpc}[request.param]


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await test

    asyncio.run(bounded())


async def turns(count: int = 10) -> None:
    """Let what is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


def hello(number: int) -> Hello:
    return Hello(sender=RouterId("router-0"), epoch=Epoch(number), protocol_min=1, protocol_max=1)


async def echo(link: Link) -> None:
    while True:
        link.send(await link.receive())


async def ignore(link: Link) -> None:
    while True:
        await link.receive()


def with_link(open_listener: Open, accept: Accept, test: Callable[[Link], Awaitable[None]]) -> None:
    async def body() -> None:
        async with open_listener(accept) as (dialer, endpoint):
            link = await dialer.dial(endpoint, 5.0)
            try:
                await test(link)
            finally:
                await link.close("test over")

    run(body())


def test_frames_arrive_whole_and_in_order_when_many_are_sent(open_listener: Open) -> None:
    async def test(link: Link) -> None:
        frames: list[list[AnyMessage]] = [[hello(2 * i), hello(2 * i + 1)] for i in range(2000)]
        for frame in frames:
            link.send(frame)
        assert [await link.receive() for _ in frames] == frames

    with_link(open_listener, echo, test)


def test_last_frame_arrives_when_listener_closes_after_it(open_listener: Open) -> None:
    async def reject(link: Link) -> None:
        await link.receive()
        link.send([Reject(reason="no")])

    async def test(link: Link) -> None:
        for number in range(100):
            link.send([hello(number)])
        assert await link.receive() == [Reject(reason="no")]
        with pytest.raises(LinkClosedError):
            await link.receive()
        with pytest.raises(LinkClosedError):
            link.send([Drain()])

    with_link(open_listener, reject, test)


def test_frames_before_the_end_arrive_when_dialler_closes(open_listener: Open) -> None:
    received: list[AnyMessage] = []
    ended = asyncio.Event()

    async def collect(link: Link) -> None:
        try:
            while True:
                received.extend(await link.receive())
        except LinkClosedError:
            ended.set()

    async def test(link: Link) -> None:
        for number in range(500):
            link.send([hello(number)])
        await link.close()
        await link.close("again")
        await ended.wait()
        assert received == [hello(number) for number in range(500)]
        with pytest.raises(LinkClosedError, match="closed"):
            await link.receive()

    with_link(open_listener, collect, test)


def test_waiting_receive_ends_when_link_is_closed_here(open_listener: Open) -> None:
    async def test(link: Link) -> None:
        waiting = asyncio.ensure_future(link.receive())
        await asyncio.sleep(0)
        await link.close("enough")
        with pytest.raises(LinkClosedError, match="enough"):
            await waiting

    with_link(open_listener, ignore, test)


def test_receive_goes_on_when_an_earlier_receive_was_cancelled(open_listener: Open) -> None:
    async def test(link: Link) -> None:
        waiting = asyncio.ensure_future(link.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        link.send([hello(7)])
        assert await link.receive() == [hello(7)]

    with_link(open_listener, echo, test)


def test_sender_is_cut_when_peer_does_not_keep_up(open_listener: Open) -> None:
    async def test(link: Link) -> None:
        with pytest.raises(LinkOverflowError):
            for _ in range(LINK_MESSAGES_MAX + 1):
                link.send([Drain()])
        with pytest.raises(LinkClosedError):
            link.send([Drain()])
        link.check()

    with_link(open_listener, ignore, test)


def test_dial_is_refused_when_nobody_listens(open_listener: Open) -> None:
    async def body() -> None:
        async with open_listener(echo) as (dialer, _endpoint):
            with pytest.raises(LinkClosedError):
                await dialer.dial("127.0.0.1:1", 0.3)

    run(body())


def test_nothing_gets_through_a_partition_and_everything_after_it() -> None:
    """Frames, the end of the connection, and new connections."""
    clock = ManualClock()
    network = MemoryNetwork(clock)

    async def body() -> None:
        network.listen("worker", echo)
        dialer = network.dialer("router")
        link, doomed = await dialer.dial("worker", 1.0), await dialer.dial("worker", 1.0)
        other = await network.dialer("router-2").dial("worker", 1.0)
        network.partition("router", "worker")
        link.send([hello(1)])
        other.send([hello(2)])
        await doomed.close("enough")
        waiting = asyncio.ensure_future(link.receive())
        assert await other.receive() == [hello(2)]
        late = asyncio.ensure_future(dialer.dial("worker", 1.0))
        await turns()
        clock.advance(1.0)
        with pytest.raises(LinkClosedError, match="no answer within 1 s"):
            await late
        assert not waiting.done() and len(network.links_of("router", "worker")) == 2
        network.heal("router", "worker")
        assert await waiting == [hello(1)]
        await turns()
        assert [link.peer for link in network.links_of("router", "worker")] == ["worker"]
        await network.close()

    run(body())


def test_frames_queue_behind_each_other_when_a_link_is_slow() -> None:
    clock = ManualClock()
    network = MemoryNetwork(clock, delay_s=(1.0, 1.0), bytes_per_s=100.0)
    size = len(encode_frame([hello(1)]))

    async def body() -> None:
        network.listen("worker", ignore)
        link = await network.dial("worker", 1.0)
        assert isinstance(link, MemoryLink) and link._other is not None
        link.send([hello(1)])
        link.send([hello(2)])
        due = [due_s for due_s, _frame in link._other._arrived]
        assert due == pytest.approx([1.0 + size / 100, 1.0 + 2 * size / 100])
        await network.close()

    run(body())
