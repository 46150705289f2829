"""A process that is stopped (SIGSTOP) and goes on later (SIGCONT), played in one process: its clock wakes nobody and
its links bring nothing while it is frozen; what arrived meanwhile lies there when it thaws. Time goes on, as the
monotonic clock of a stopped process does; each process may count it from another origin.

Knows nothing about what runs in the process.
"""

import asyncio

from core.clock import Clock
from core.link import Accept, Dialer, Link, MemoryNetwork
from core.messages import AnyMessage


class Freezer:
    """The switch of one process."""

    def __init__(self) -> None:
        self._thaw = asyncio.Event()
        self._thaw.set()

    @property
    def is_frozen(self) -> bool:
        return not self._thaw.is_set()

    def freeze(self) -> None:
        self._thaw.clear()

    def thaw(self) -> None:
        self._thaw.set()

    async def wait(self) -> None:
        """Until the process runs."""
        await self._thaw.wait()


class FreezableClock:
    """A process's view of the common clock."""

    def __init__(self, clock: Clock, freezer: Freezer, offset_s: float = 0.0) -> None:
        self._clock = clock
        self._freezer = freezer
        self._offset_s = offset_s

    def now(self) -> float:
        return self._clock.now() + self._offset_s

    def wall(self) -> float:
        return self._clock.wall()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        await self._freezer.wait()


class FreezableLink:
    """A process's end of a link."""

    def __init__(self, link: Link, freezer: Freezer) -> None:
        self._link = link
        self._freezer = freezer
        self.peer = link.peer

    @property
    def num_undelivered(self) -> int:
        return self._link.num_undelivered

    def send(self, messages: list[AnyMessage]) -> None:
        self._link.send(messages)

    async def receive(self) -> list[AnyMessage]:
        frame = await self._link.receive()
        await self._freezer.wait()
        return frame

    async def close(self, reason: str = "closed") -> None:
        await self._link.close(reason)

    def check(self) -> None:
        self._link.check()


class FreezableDialer:
    """How a process opens links."""

    def __init__(self, dialer: Dialer, freezer: Freezer) -> None:
        self._dialer = dialer
        self._freezer = freezer

    async def dial(self, endpoint: str, timeout_s: float) -> Link:
        await self._freezer.wait()
        return FreezableLink(await self._dialer.dial(endpoint, timeout_s), self._freezer)


class FreezableDoor(MemoryNetwork):
    """Where a process listens: `listen` of a network, the accepted ends freezing with the process."""

    def __init__(self, network: MemoryNetwork, freezer: Freezer) -> None:
        self._network = network
        self._freezer = freezer

    def listen(self, endpoint: str, accept: Accept) -> None:
        async def accept_frozen(link: Link) -> None:
            await self._freezer.wait()
            await accept(FreezableLink(link, self._freezer))

        self._network.listen(endpoint, accept_frozen)
