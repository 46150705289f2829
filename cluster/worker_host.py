"""Hosts one worker: links on an asyncio loop, steps on the step thread (or, in-process, on the same loop).

    links --frames--> Doorway --(source, message)--> Inbox --> step: handle, advance --> outbound --> Doorway --> links

One batch of messages per step and direction. Heartbeats leave from the loop, so that a long step does not look like a
dead worker; they stop when the step thread has not come round for STEP_STALL_S. Knows nothing about what a role does.
"""

import asyncio
import itertools
import math
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

from msgspec.structs import replace

from core.clock import Clock
from core.errors import LinkClosedError, LinkOverflowError
from core.ids import Epoch, RouterId
from core.layout import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN
from core.link import Link
from core.messages import (
    HEARTBEAT_S,
    HEARTBEAT_TIMEOUT_S,
    Alive,
    AnyMessage,
    Audited,
    FromWorker,
    Hello,
    Reject,
    ToWorker,
    Welcome,
    WorkerStatus,
)
from core.process import ProcessUsage, read_usage
from core.worker import Worker

HELLO_TIMEOUT_S = 5.0
IDLE_WAIT_S = 0.05
"""Longest pause of an idle step loop: expiries are seen this late at most."""
READ_WAIT_S_MIN = 1e-6
"""Shortest pause for a read: clocks round."""
STEP_STALL_S = 60.0
"""A step thread that did not come round for so long is stuck: the worker falls silent and is taken for dead."""
CHECK_IDLE_S = 5.0
"""An idle worker checks its invariants so often at most; O(blocks)."""
CHECK_BUSY_S = 60.0
"""One that is never idle checks them all the same."""
STOP_TIMEOUT_S = 10.0


class Inbox:
    """Messages from the loop to the step, and the bell that wakes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[tuple[RouterId, ToWorker | None]] = []
        self.bell = threading.Event()
        self.on_ring: Callable[[], None] = lambda: None

    def put(self, source: RouterId, messages: list[ToWorker | None]) -> None:
        """Messages of one frame; None says that the link to `source` is gone."""
        with self._lock:
            self._items += [(source, message) for message in messages]
        self.ring()

    def ring(self) -> None:
        """Wake the step: there is something to look at. Any thread."""
        self.bell.set()
        self.on_ring()

    def __len__(self) -> int:
        """Messages that the step has not taken in yet."""
        return len(self._items)

    def take(self) -> list[tuple[RouterId, ToWorker | None]]:
        self.bell.clear()
        with self._lock:
            items, self._items = self._items, []
        return items


class Doorway:
    """The loop's half: accepts links, feeds the inbox, delivers what the worker says."""

    def __init__(
        self,
        *,
        welcome: Welcome,
        status: WorkerStatus,
        inbox: Inbox,
        clock: Clock,
        facts: Callable[[], dict[str, int]] = dict,
        usage: Callable[[], ProcessUsage | None] = read_usage,
    ) -> None:
        """`facts`: numbers about the process, added to the books of an audit; `usage`: those of its heartbeats."""
        self._welcome = welcome
        self._usage = usage
        self._facts = facts
        self._inbox = inbox
        self._clock = clock
        self._links: dict[RouterId, Link] = {}
        self._epochs: dict[RouterId, Epoch] = {}
        self._heard_s: dict[RouterId, float] = {}
        self._status = status
        self._status_s = clock.now()
        self.is_mute = False
        """The worker has ended; its loop may live on for a moment."""

    async def accept(self, link: Link) -> None:
        """Serve one link until it closes (a `core.link.Accept`)."""
        hello = await self._greet(link)
        if hello is None:
            return
        older, self._links[hello.sender] = self._links.get(hello.sender), link
        self._epochs[hello.sender] = hello.epoch
        self._heard_s[hello.sender] = self._clock.now()
        if older is not None:
            self._inbox.put(hello.sender, [None])
        try:
            link.send([self._welcome, self._status])  # before anything is waited for: heartbeats come after it
            if older is not None:
                await older.close("replaced by a newer link of the same sender")
            while True:
                frame = await link.receive()
                if self._links.get(hello.sender) is not link:  # what a replaced link still brings is nobody's
                    return
                self._heard_s[hello.sender] = self._clock.now()
                self._inbox.put(hello.sender, [m for m in frame if not isinstance(m, Hello | Alive)])  # type: ignore[misc]
        except (LinkClosedError, LinkOverflowError):
            if self._links.get(hello.sender) is link:
                del self._links[hello.sender]
                self._inbox.put(hello.sender, [None])

    async def _greet(self, link: Link) -> Hello | None:
        try:
            frame = await asyncio.wait_for(link.receive(), HELLO_TIMEOUT_S)
        except (TimeoutError, LinkClosedError):
            await link.close("no Hello came")
            return None
        hello = frame[0] if frame else None
        if not isinstance(hello, Hello):
            reason = "the first message must be Hello"
        elif hello.protocol_max < PROTOCOL_VERSION_MIN or hello.protocol_min > PROTOCOL_VERSION_MAX:
            reason = (
                f"{hello.sender} speaks protocol {hello.protocol_min} to {hello.protocol_max}, "
                f"{self._welcome.worker} speaks {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION_MAX}"
            )
        elif hello.sender in self._links and hello.epoch < self._epochs[hello.sender]:
            reason = f"epoch {self._epochs[hello.sender]} of {hello.sender} is connected, this one is {hello.epoch}"
        else:
            return hello
        link.send([Reject(reason=reason)])
        await link.close(reason)
        return None

    def deliver(self, outbound: list[tuple[RouterId, FromWorker]], status: WorkerStatus) -> None:
        """One frame per receiver; what is for a link that is gone is dropped, its requests are being cancelled."""
        self._status, self._status_s = status, self._clock.now()
        by_router: dict[RouterId, list[AnyMessage]] = {}
        for router, message in outbound:
            if isinstance(message, Audited):
                undelivered = sum(link.num_undelivered for link in self._links.values()) + len(self._inbox)
                facts = {"links": len(self._links), "undelivered": undelivered, **self._facts()}
                message = replace(message, books={**message.books, **facts})
            by_router.setdefault(router, []).append(message)
        for router, messages in by_router.items():
            self._send(router, messages)

    def heartbeat(self) -> None:
        """To every peer, unless the step is stuck or has ended: nobody answers for a worker that is not there."""
        if not self.is_mute and self._clock.now() - self._status_s < STEP_STALL_S:
            status = replace(self._status, process=self._usage())
            for router in list(self._links):
                self._send(router, [status])

    def _send(self, router: RouterId, messages: list[AnyMessage]) -> None:
        link = self._links.get(router)
        if link is None:
            return
        try:
            link.send(messages)
        except (LinkClosedError, LinkOverflowError):
            if self._links.get(router) is link:
                del self._links[router]
            self._inbox.put(router, [None])

    def check(self) -> None:
        """Assert that every link is a greeted router's, and within its limits (TX-2, RQ-2)."""
        for router, link in self._links.items():
            assert router in self._epochs and router in self._heard_s, f"TX-2: {router} has a link and never greeted"
            link.check()

    async def beat(self) -> None:
        """Send heartbeats, check the links, and give up routers that send no heartbeats, for ever."""
        while True:
            self.heartbeat()
            self.check()
            await self._give_up_silent()
            await self._clock.sleep(HEARTBEAT_S)

    async def _give_up_silent(self) -> None:
        """All at once: closing a link to a stopped peer takes a moment, and heartbeats wait for it."""
        now = self._clock.now()
        silent = [link for router, link in self._links.items() if now - self._heard_s[router] >= HEARTBEAT_TIMEOUT_S]
        if silent:
            await asyncio.gather(*(link.close(f"silent for {HEARTBEAT_TIMEOUT_S:g} s") for link in silent))


def step_once(worker: Worker, inbox: Inbox, now: float) -> bool:
    """Take messages in and run one iteration; True if there was anything to do."""
    items = inbox.take()
    for source, group in itertools.groupby(items, key=lambda item: item[0]):
        for _source, message in group:
            if message is None:
                worker.disconnect(source, now)
            else:
                worker.handle(source, message, now)
    return worker.advance(now) or bool(items)


def welcome_of(worker: Worker, *, pid: int, model_name: str, max_model_len: int) -> Welcome:
    """The worker's answer to Hello."""
    return Welcome(
        worker=worker.worker_id,
        role=worker.role,
        epoch=worker.epoch,
        pid=pid,
        handshake=worker.handshake(),
        model_name=model_name,
        max_model_len=max_model_len,
    )


class Checkup:
    """Lets a worker check its invariants now and then: one whose books are wrong must not serve on, the assertion ends
    its host.
    """

    def __init__(self, worker: Worker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock
        self._checked_s = clock.now()

    def when_due(self, did_work: bool) -> None:
        """After each iteration; `did_work`: there was something to do in it."""
        now = self._clock.now()
        if now - self._checked_s >= (CHECK_BUSY_S if did_work else CHECK_IDLE_S):
            self._checked_s = now
            self._worker.check()


class ThreadedHost:
    """The step loop of a worker process, on the one thread of `executor`. The loop of the doorway is the caller's."""

    def __init__(
        self, worker: Worker, doorway: Doorway, inbox: Inbox, clock: Clock, executor: ThreadPoolExecutor
    ) -> None:
        self._worker = worker
        self._doorway = doorway
        self._inbox = inbox
        self._clock = clock
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[BaseException], None] = lambda _error: None
        self._executor = executor
        self._checkup = Checkup(worker, clock)
        self._running: Future[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure` is called on the step thread when the worker broke an invariant; the process must end then."""
        self._loop, self._on_failure = loop, on_failure
        self._running = self._executor.submit(self._run)

    def stop(self) -> None:
        """End the step thread, then the worker."""
        self._stop.set()
        self._inbox.ring()
        if self._running is not None:
            wait([self._running], STOP_TIMEOUT_S)
        self._executor.shutdown(wait=False)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                did_work = step_once(self._worker, self._inbox, self._clock.now())
                self._hand_over()
                self._checkup.when_due(did_work)
                if not did_work:
                    self._inbox.bell.wait(IDLE_WAIT_S)
        except BaseException as error:
            self._doorway.is_mute = True
            self._on_failure(error)
            raise
        finally:
            self._doorway.is_mute = True
            self._worker.close()

    def _hand_over(self) -> None:
        assert self._loop is not None
        outbound = self._worker.take_outbound()
        status = self._worker.status()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._doorway.deliver, outbound, status)


class AsyncHost:
    """Worker and doorway on one loop, for the in-process runtime and the simulator.

    With an executor the steps run there, so that links and heartbeats live on while a model computes. With `spend_step`
    they take time of the clock: a step's work is done at its start, and what it has to say leaves at its end.
    """

    def __init__(
        self,
        worker: Worker,
        doorway: Doorway,
        inbox: Inbox,
        clock: Clock,
        executor: Executor | None = None,
        *,
        is_checked: bool = False,
        spend_step: Callable[[], Awaitable[None]] | None = None,
        until_read_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`is_checked`: assert the worker's invariants after every step, not only now and then. `spend_step`: waits
        as long as the step just done takes. `until_read_s`: seconds until a read ends; a transfer thread would ring.
        """
        self._is_checked = is_checked
        self.worker = worker
        self._doorway = doorway
        self._inbox = inbox
        self._clock = clock
        self._executor = executor
        self._spend_step = spend_step
        self._until_read_s = until_read_s
        self._checkup = Checkup(worker, clock)
        self._wake = asyncio.Event()
        inbox.on_ring = self._wake.set

    async def run(self) -> None:
        """Step for ever; between steps the loop serves others."""
        while True:
            self._wake.clear()
            did_work = await self._step()
            outbound, status = self.worker.take_outbound(), self.worker.status()
            if self._spend_step is not None:
                await self._spend_step()
            self._doorway.deliver(outbound, status)
            if self._is_checked:
                self.worker.check()
            else:
                self._checkup.when_due(did_work)
            if did_work:
                await asyncio.sleep(0)
            else:
                await self._pause()

    async def _step(self) -> bool:
        if self._executor is None:
            return step_once(self.worker, self._inbox, self._clock.now())
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, step_once, self.worker, self._inbox, self._clock.now())

    async def _pause(self) -> None:
        """Until a message arrives or a read ends; while anything is held, until IDLE_WAIT_S of the clock passed at
        most.
        """
        longest_s = IDLE_WAIT_S if any(self.worker.books().values()) else CHECK_IDLE_S
        if (until_read_s := self._until_read_s()) > 0:  # one that is due and stands still is waited for like others
            longest_s = min(longest_s, max(until_read_s, READ_WAIT_S_MIN))
        sleep = asyncio.ensure_future(self._clock.sleep(longest_s))
        wake = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({sleep, wake}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in (sleep, wake):
                future.cancel()
            await asyncio.gather(sleep, wake, return_exceptions=True)
