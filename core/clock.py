"""Time, behind a seam: deciders get `now` as a number, drivers wait on a `Clock`.

The manual clock moves only when told to, so that a test or the simulator owns time. Knows nothing about what waits on
it.
"""

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds of this process. Values of two processes cannot be compared (rebase deadlines)."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for people and for HTTP bodies only; never for deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait until `now()` has advanced by `seconds`."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that stands still until `advance`. Sleepers wake in order of their deadline, then of their arrival."""

    def __init__(self, start_s: float = 0.0, wall_start_s: float = 1_700_000_000.0) -> None:
        self._now = start_s
        self._wall_offset = wall_start_s - start_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    def next_deadline(self) -> float | None:
        """Deadline of the first sleeper still waiting, or None."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    def advance(self, seconds: float) -> None:
        """Move time forward and wake every sleeper whose deadline has come. Negative seconds are a ValueError."""
        if seconds < 0:
            raise ValueError(f"a manual clock cannot go back ({seconds} s)")
        target = self._now + seconds
        while (deadline := self.next_deadline()) is not None and deadline <= target:
            self._now = deadline
            heapq.heappop(self._sleepers)[2].set_result(None)
        self._now = target
