"""The link: an ordered, bidirectional stream of message frames between two processes, behind a seam.

`send` never blocks: a peer that does not keep up is cut at LINK_MESSAGES_MAX undelivered messages, so that
back-pressure never reaches a step. The in-memory links here carry the real encoded frames, with seeded delay and loss
of connection; the gRPC link is `core.link_grpc`. Knows nothing about what the messages mean.
"""

import asyncio
import contextvars
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from core.clock import Clock
from core.errors import LinkClosedError, LinkOverflowError
from core.messages import AnyMessage, decode_frame, encode_frame

LINK_MESSAGES_MAX = 100_000


class Link(Protocol):
    """One end of a link. Used from one asyncio loop only."""

    peer: str
    """Name or address of the other side, for messages to people."""

    def send(self, messages: list[AnyMessage]) -> None:
        """Queue one frame. Raises LinkClosedError, or LinkOverflowError after which the link is closed."""
        ...

    async def receive(self) -> list[AnyMessage]:
        """The next frame. Raises LinkClosedError once the link is closed and everything that arrived was received."""
        ...

    async def close(self, reason: str = "closed") -> None:
        """Close both directions. Idempotent."""
        ...

    @property
    def num_undelivered(self) -> int:
        """Frames that arrived here and were not received yet, or wait here to leave."""
        ...

    def check(self) -> None:
        """Assert RQ-2: what waits is within the limit, and nothing waits to leave on a closed link."""
        ...


class Dialer(Protocol):
    """Opens links."""

    async def dial(self, endpoint: str, timeout_s: float) -> Link:
        """Connect to `endpoint`. Raises LinkClosedError when nobody answers within `timeout_s`."""
        ...


Accept = Callable[[Link], Awaitable[None]]
"""Serves one accepted link until it returns; then the link is closed."""


class MemoryLink:
    """One end of an in-memory link. Frames arrive in order, each after the network's delay."""

    def __init__(self, peer: str, network: "MemoryNetwork", reader: str) -> None:
        """`reader`: who receives at this end."""
        self.peer = peer
        self.reader = reader
        self._network = network
        self._arrived: deque[tuple[float, bytes]] = deque()
        self._wake = asyncio.Event()
        self._closed_reason: str | None = None
        self._late_reason: str | None = None
        """Why the other side closed, while nothing gets through."""
        self._is_clogged = False
        self._other: MemoryLink | None = None

    def join(self, other: "MemoryLink") -> None:
        """Make the two ends each other's peer."""
        self._other, other._other = other, self

    def send(self, messages: list[AnyMessage]) -> None:
        if self._closed_reason is not None or self._other is None:
            raise LinkClosedError(peer=self.peer, reason=self._closed_reason or "not joined")
        if len(self._other._arrived) >= LINK_MESSAGES_MAX:
            self._cut("overflow")
            raise LinkOverflowError(peer=self.peer, limit_messages=LINK_MESSAGES_MAX)
        frame = encode_frame(messages)
        arrived = self._other._arrived
        due_s = self._network.due_s(len(frame), arrived[-1][0] if arrived else 0.0)
        arrived.append((due_s, frame))
        self._network.on_send(self.reader, self._other.reader, messages)
        self._other._wake.set()

    async def receive(self) -> list[AnyMessage]:
        clock = self._network.clock
        while True:
            if self._arrived and not self._is_clogged:
                wait_s = self._arrived[0][0] - clock.now()
                if wait_s <= 0:
                    return decode_frame(self._arrived.popleft()[1])
                await clock.sleep(wait_s)
                continue
            if self._closed_reason is not None:
                raise LinkClosedError(peer=self.peer, reason=self._closed_reason)
            self._wake.clear()
            await self._wake.wait()

    async def close(self, reason: str = "closed") -> None:
        self._cut(reason)

    @property
    def num_undelivered(self) -> int:
        return len(self._arrived)

    def check(self) -> None:
        assert len(self._arrived) <= LINK_MESSAGES_MAX, f"RQ-2: {len(self._arrived)} frames wait for {self.peer}"

    def lose(self) -> None:
        """Loss of connection: both ends close, frames under way are lost."""
        self._arrived.clear()
        if self._other is not None:
            self._other._arrived.clear()
        self._cut("connection lost")

    def clog(self) -> None:
        """Nothing gets through in either direction, not even the end of the connection, until `unclog`."""
        for end in self._ends():
            end._is_clogged = True

    def unclog(self) -> None:
        """What was held back arrives."""
        for end in self._ends():
            end._is_clogged = False
            if end._late_reason is not None and end._closed_reason is None:
                end._closed_reason = end._late_reason
            end._wake.set()

    @property
    def readers(self) -> frozenset[str]:
        """Who it joins."""
        return frozenset(end.reader for end in self._ends())

    @property
    def is_closed(self) -> bool:
        """Nothing is sent or received any more, at either end."""
        return all(end._closed_reason is not None for end in self._ends())

    def _ends(self) -> list["MemoryLink"]:
        return [self] if self._other is None else [self, self._other]

    def _cut(self, reason: str) -> None:
        for end in self._ends():
            if end is not self and end._is_clogged:
                end._late_reason = end._late_reason or reason
            elif end._closed_reason is None:
                end._closed_reason = reason
                end._wake.set()


def _unobserved(_sender: str, _receiver: str, _messages: list[AnyMessage]) -> None:
    """Nobody looks."""


class MemoryNetwork:
    """Dialer and listener of in-memory links, by endpoint name. Who listens serves in the context it listened in."""

    def __init__(
        self,
        clock: Clock,
        *,
        seed: int = 0,
        delay_s: tuple[float, float] = (0.0, 0.0),
        bytes_per_s: float = math.inf,
    ) -> None:
        """`delay_s`: bounds of a frame's latency; `bytes_per_s`: of each direction of a link."""
        self.clock = clock
        self.delay_s = delay_s
        self.bytes_per_s = bytes_per_s
        self.on_send: Callable[[str, str, list[AnyMessage]], None] = _unobserved
        """Called with sender, receiver and messages of every frame."""
        self._rng = random.Random(seed)
        self._listeners: dict[str, tuple[Accept, contextvars.Context]] = {}
        self._partitions: set[frozenset[str]] = set()
        self.healed_s = -math.inf
        """When a partition last ended."""
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order: what closes them does so in the same order always
        self.links: list[MemoryLink] = []
        """Dialling ends of every link ever opened, for fault injection."""

    def listen(self, endpoint: str, accept: Accept) -> None:
        self._listeners[endpoint] = (accept, contextvars.copy_context())

    def stop_listening(self, endpoint: str) -> None:
        self._listeners.pop(endpoint, None)

    def dialer(self, name: str) -> "NamedDialer":
        """How the process `name` opens links: partitions apply to it."""
        return NamedDialer(self, name)

    async def dial(self, endpoint: str, timeout_s: float, source: str = "") -> Link:
        """Connect as `source`."""
        if frozenset((source, endpoint)) in self._partitions:
            await self.clock.sleep(timeout_s)
            raise LinkClosedError(peer=endpoint, reason=f"no answer within {timeout_s:g} s")
        if endpoint not in self._listeners:
            raise LinkClosedError(peer=endpoint, reason="nobody listens")
        accept, context = self._listeners[endpoint]
        near = MemoryLink(endpoint, self, source or f"dialler of {endpoint}")
        far = MemoryLink(f"dialler of {endpoint}", self, endpoint)
        near.join(far)
        self.links.append(near)
        task = asyncio.get_running_loop().create_task(self._serve(accept, far), context=context.copy())
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return near

    def partition(self, one: str, other: str) -> None:
        """Nothing gets through between two processes, in open links and new ones, until `heal`."""
        self._partitions.add(frozenset((one, other)))
        for link in self.links_of(one, other):
            link.clog()

    def heal(self, one: str, other: str) -> None:
        self._partitions.discard(frozenset((one, other)))
        self.healed_s = self.clock.now()
        for link in self.links_of(one, other):
            link.unclog()

    def is_partitioned(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._partitions

    def links_of(self, *names: str) -> list[MemoryLink]:
        """Open links that join all of `names`, which dialled with a name of their own."""
        return [link for link in self.links if link.readers.issuperset(names) and not link.is_closed]

    def due_s(self, num_bytes: int, after_s: float) -> float:
        """When a frame that is sent now arrives, behind one that arrives at `after_s`."""
        now = self.clock.now()
        due_s = max(now + self._rng.uniform(*self.delay_s), after_s)
        return due_s + num_bytes / self.bytes_per_s

    async def close(self) -> None:
        """Close every link and wait for the serving tasks."""
        for link in self.links:
            await link.close("network closed")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, accept: Accept, link: MemoryLink) -> None:
        try:
            await accept(link)
        except LinkClosedError:
            return
        finally:
            await link.close("peer finished")


class NamedDialer:
    """A `Dialer` for one process of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network = network
        self._name = name

    async def dial(self, endpoint: str, timeout_s: float) -> Link:
        return await self._network.dial(endpoint, timeout_s, self._name)
