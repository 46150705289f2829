"""The cores of one machine, shared by whoever computes: as many jobs as there are cores go at full speed, more of them
go slower, all alike (processor sharing).

Knows nothing about what is computed.
"""

import asyncio
import contextvars
import math
from dataclasses import dataclass

DONE_S = 1e-9
"""Work that is left of a job that has ended, at most: rounding."""


@dataclass(eq=False, slots=True)
class _Job:
    left_s: float
    """On a core of its own."""
    done: "asyncio.Future[None]"


class Cores:
    """See the module. On one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_cores: float = math.inf) -> None:
        self._loop = loop
        self._num_cores = num_cores
        self._jobs: list[_Job] = []
        self._looked_s = loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def compute(self, seconds: float) -> None:
        """Wait until `seconds` of one core's work are done."""
        self._work()
        job = _Job(left_s=seconds, done=self._loop.create_future())
        self._jobs.append(job)
        self._wait()
        await job.done

    def _rate(self) -> float:
        return min(1.0, self._num_cores / len(self._jobs))

    def _work(self) -> None:
        """Bring the jobs up to now, and end those that are done."""
        now = self._loop.time()
        if self._jobs:
            done_s = (now - self._looked_s) * self._rate()
            for job in self._jobs:
                job.left_s -= done_s
        self._looked_s = now
        ended = [job for job in self._jobs if job.left_s <= DONE_S]
        self._jobs = [job for job in self._jobs if job.left_s > DONE_S]
        for job in ended:
            if not job.done.done():
                job.done.set_result(None)

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            next_s = min(job.left_s for job in self._jobs) / self._rate()
            # In no process: the machine computes on when whoever asked last is stopped.
            self._timer = self._loop.call_later(next_s, self._tick, context=contextvars.Context())

    def _tick(self) -> None:
        self._work()
        self._wait()
