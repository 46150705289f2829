"""The doorway of a worker: who is let in, who replaces whom, and whose messages still count."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.assembly import build_handshake
from cluster.worker_host import CHECK_BUSY_S, CHECK_IDLE_S, Doorway, Inbox, ThreadedHost
from core.clock import ManualClock
from core.config import parse_config
from core.errors import LinkClosedError
from core.ids import Attempt, Epoch, RequestId, Role, RouterId, WorkerId
from core.link import Link, MemoryLink, MemoryNetwork
from core.messages import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, Alive, Cancel, Hello, KvUsage, Reject, Welcome, WorkerStatus
from tests.e2e.conftest import Pair
from tests.e2e.stage import LETTERS, play

ROUTER = RouterId("router-0")
TIMEOUT_S = 20.0
CONFIG = "schema_version: 1\nname: t\nmodel: {path: standin}\nkv: {block_size: 4, device_blocks: 8}\n"


class Door:
    """One doorway on a memory network, and what came through it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(self.clock)
        self.inbox = Inbox()
        role: Role = "decode"
        worker, epoch = WorkerId("decode-0"), Epoch(1)
        handshake = build_handshake(
            parse_config(CONFIG, file="t.yaml"), LETTERS, num_blocks=8, transport="memory", transport_metadata=b""
        )
        usage = KvUsage(blocks_total=8, blocks_free=8, blocks_cached=0, blocks_used=0)
        self.doorway = Doorway(
            welcome=Welcome(
                worker=worker, role=role, epoch=epoch, pid=0, handshake=handshake, model_name="m", max_model_len=9
            ),
            status=WorkerStatus(
                worker=worker, role=role, epoch=epoch, state="ready", num_waiting=0, num_running=0,
                num_leases=0, num_pins=0, kv=usage, counters={},
            ),
            inbox=self.inbox,
            clock=self.clock,
        )  # fmt: skip
        self.network.listen("door", self.doorway.accept)

    async def knock(self, epoch: int) -> tuple[Link, Any]:
        """A link on which a router of this epoch greets, and the first answer."""
        link = await self.network.dial("door", 1.0)
        link.send([Hello(sender=ROUTER, epoch=Epoch(epoch), protocol_min=1, protocol_max=1)])
        return link, (await link.receive())[0]

    def play(self, scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            beat = asyncio.ensure_future(self.doorway.beat())
            await scene()
            beat.cancel()
            await self.network.close()

        play(whole, self.clock)


def _cancel(name: str) -> Cancel:
    return Cancel(request_id=RequestId(name), attempt=Attempt(0))


def test_older_link_ends_when_a_newer_epoch_greets() -> None:
    door = Door()

    async def scene() -> None:
        older, first = await door.knock(1)
        newer, second = await door.knock(2)
        assert isinstance(first, Welcome) and isinstance(second, Welcome)
        with pytest.raises(LinkClosedError):
            while True:
                await older.receive()
        newer.send([_cancel("new")])
        await door.clock.sleep(0.1)
        assert door.inbox.take() == [(ROUTER, None), (ROUTER, _cancel("new"))]

    door.play(scene)


def test_a_new_link_begins_with_the_greeting_when_the_older_one_is_slow_to_close() -> None:
    door = Door()

    async def scene() -> None:
        await door.knock(1)

        async def slow(reason: str = "") -> None:
            await door.clock.sleep(3.0)

        door.doorway._links[ROUTER].close = slow  # type: ignore[method-assign]
        _link, first = await door.knock(2)
        assert isinstance(first, Welcome), first

    door.play(scene)


def test_messages_under_way_change_nothing_when_their_link_was_replaced() -> None:
    """TX-2: nobody would cancel what they ask for."""
    door = Door()

    async def scene() -> None:
        older, _ = await door.knock(1)
        assert isinstance(older, MemoryLink)
        door.network.delay_s = (0.5, 0.5)
        older.send([_cancel("old")])
        door.network.delay_s = (0.0, 0.0)
        await door.knock(2)
        await door.clock.sleep(1.0)
        assert door.inbox.take() == [(ROUTER, None)]

    door.play(scene)


def test_older_epoch_is_rejected_while_a_newer_one_is_connected() -> None:
    """TX-2: two processes of one name would otherwise throw each other out for ever."""
    door = Door()

    async def scene() -> None:
        newer, _ = await door.knock(2)
        _older, answer = await door.knock(1)
        assert isinstance(answer, Reject) and "epoch 2 of router-0" in answer.reason
        newer.send([_cancel("new")])
        await door.clock.sleep(0.1)
        assert door.inbox.take() == [(ROUTER, _cancel("new"))]
        await newer.close()
        await door.clock.sleep(0.1)
        _older, answer = await door.knock(1)
        assert isinstance(answer, Welcome)

    door.play(scene)


def test_one_link_is_left_when_a_router_dials_many_times_at_once() -> None:
    door = Door()

    async def scene() -> None:
        links = [link for link, _ in await asyncio.gather(*(door.knock(1) for _ in range(5)))]
        await door.clock.sleep(0.1)
        door.inbox.take()
        for number, link in enumerate(links):
            try:
                link.send([_cancel(str(number))])
            except LinkClosedError:
                continue
        await door.clock.sleep(0.1)
        assert len(door.inbox.take()) == 1

    door.play(scene)


def test_router_that_falls_silent_is_given_up_with_everything_it_asked_for() -> None:
    """A stopped process keeps its sockets open: only missing heartbeats tell."""
    door = Door()

    async def scene() -> None:
        link, _ = await door.knock(1)
        for _ in range(int(2 * HEARTBEAT_TIMEOUT_S / HEARTBEAT_S)):
            link.send([Alive()])
            await door.clock.sleep(HEARTBEAT_S)
        assert door.inbox.take() == []
        await door.clock.sleep(HEARTBEAT_TIMEOUT_S + 2 * HEARTBEAT_S)
        assert door.inbox.take() == [(ROUTER, None)]
        with pytest.raises(LinkClosedError):
            while True:
                await link.receive()

    door.play(scene)


def test_heartbeats_end_when_a_link_was_never_greeted() -> None:
    """TX-2: whoever beats checks the links; without heartbeats the worker counts as dead."""
    door = Door()

    async def scene() -> None:
        link, _ = await door.knock(1)
        beat = asyncio.ensure_future(door.doorway.beat())
        await door.clock.sleep(HEARTBEAT_S)
        assert not beat.done()
        door.doorway._links[RouterId("router-9")] = link
        with pytest.raises(AssertionError, match="TX-2: router-9 has a link and never greeted"):
            await beat
        del door.doorway._links[RouterId("router-9")]

    async def whole() -> None:
        await scene()
        await door.network.close()

    play(whole, door.clock)


@pytest.mark.parametrize(("is_busy", "after_s"), [(False, CHECK_IDLE_S), (True, CHECK_BUSY_S)])
def test_step_thread_ends_with_the_invariant_when_the_books_are_wrong(
    is_busy: bool, after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV-1: idle or not, a worker does not serve on with wrong books."""
    pair, door = Pair(), Door()
    monkeypatch.setattr("cluster.worker_host.step_once", lambda _worker, _inbox, _now: is_busy)
    executor = ThreadPoolExecutor(max_workers=1)
    host = ThreadedHost(pair.decode, door.doorway, door.inbox, pair.clock, executor)
    pair.decode._pool.allocate(1)

    async def body() -> BaseException:
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[BaseException] = loop.create_future()

        def fail(error: BaseException) -> None:
            loop.call_soon_threadsafe(failed.set_result, error)

        host.start(loop, fail)
        pair.clock.advance(after_s)
        return await asyncio.wait_for(failed, TIMEOUT_S)

    assert "KV-1: block 0 has 1 references and is held by nobody" in str(asyncio.run(body()))
    host.stop()
    assert door.doorway.is_mute


def test_heartbeats_go_on_when_many_silent_routers_are_slow_to_close() -> None:
    """Each takes a moment to give up; one after the other they would make the worker look dead to a live router."""
    door = Door()

    async def scene() -> None:
        for number in range(8):
            link = await door.network.dial("door", 1.0)
            link.send([Hello(sender=RouterId(f"wedged-{number}"), epoch=Epoch(1), protocol_min=1, protocol_max=1)])
        await door.clock.sleep(0.1)

        async def slow(reason: str = "") -> None:
            await door.clock.sleep(1.0)

        for near in door.doorway._links.values():
            near.close = slow  # type: ignore[method-assign]
        await door.clock.sleep(HEARTBEAT_TIMEOUT_S + HEARTBEAT_S)
        started_s = door.clock.now()
        await door.doorway._give_up_silent()
        assert door.clock.now() - started_s < 2.0

    door.play(scene)
