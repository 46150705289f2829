"""The link: an ordered, bidirectional stream of message frames between two processes, behind a seam.

`send` never blocks: a peer that does not keep up is cut at LINK_MESSAGES_MAX undelivered messages, so that
back-pressure never reaches a step. The in-memory links here carry the real encoded frames, with seeded delay and loss
of connection; the gRPC link is `core.link_grpc`. Knows nothing about what the messages mean.
"""

import asyncio
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
    """One end of an in-memory link. Frames arrive in order, each after a delay from [delay_min_s, delay_max_s]."""

    def __init__(self, peer: str, clock: Clock, rng: random.Random, delay_s: tuple[float, float]) -> None:
        self.peer = peer
        self._clock = clock
        self._rng = rng
        self._delay_s = delay_s
        self._arrived: deque[tuple[float, bytes]] = deque()
        self._wake = asyncio.Event()
        self._closed_reason: str | None = None
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
        due = self._clock.now() + self._rng.uniform(*self._delay_s)
        if self._other._arrived:
            due = max(due, self._other._arrived[-1][0])
        self._other._arrived.append((due, encode_frame(messages)))
        self._other._wake.set()

    async def receive(self) -> list[AnyMessage]:
        while True:
            if self._arrived:
                wait_s = self._arrived[0][0] - self._clock.now()
                if wait_s <= 0:
                    return decode_frame(self._arrived.popleft()[1])
                await self._clock.sleep(wait_s)
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

    def _cut(self, reason: str) -> None:
        for end in (self, self._other):
            if end is not None and end._closed_reason is None:
                end._closed_reason = reason
                end._wake.set()


class MemoryNetwork:
    """Dialer and listener of in-memory links, by endpoint name."""

    def __init__(self, clock: Clock, *, seed: int = 0, delay_s: tuple[float, float] = (0.0, 0.0)) -> None:
        self._clock = clock
        self._rng = random.Random(seed)
        self._delay_s = delay_s
        self._listeners: dict[str, Accept] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.links: list[MemoryLink] = []
        """Dialling ends of every link ever opened, for fault injection."""

    def listen(self, endpoint: str, accept: Accept) -> None:
        self._listeners[endpoint] = accept

    def stop_listening(self, endpoint: str) -> None:
        self._listeners.pop(endpoint, None)

    async def dial(self, endpoint: str, timeout_s: float) -> Link:
        accept = self._listeners.get(endpoint)
        if accept is None:
            raise LinkClosedError(peer=endpoint, reason="nobody listens")
        near = MemoryLink(endpoint, self._clock, self._rng, self._delay_s)
        far = MemoryLink(f"dialler of {endpoint}", self._clock, self._rng, self._delay_s)
        near.join(far)
        self.links.append(near)
        task = asyncio.get_running_loop().create_task(self._serve(accept, far))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return near

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
