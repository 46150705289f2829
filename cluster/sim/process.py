"""A process of the simulated cluster: it can be stopped and continued (SIGSTOP, SIGCONT) and killed (SIGKILL); its
clock starts anywhere and may run fast or slow, and its steps take time.

All that runs in its context belongs to it. While it is stopped nothing of it runs, and what became ready runs in order
when it goes on; once it is dead nothing of it ever runs, no cleanup either. Knows nothing about what the members do.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Literal

from cluster.local import Process
from cluster.sim.cores import Cores
from cluster.sim.loop import OWNER, Outcome, Turn, VirtualLoop
from core.clock import Clock
from core.link import Dialer
from core.process import ProcessUsage

NO_USAGE = ProcessUsage(cpu_s=0.0, resident_bytes=0, num_open_fds=0)


class SkewedClock:
    """A process's own view of the time: from another origin, and `rate` times as fast."""

    def __init__(self, clock: Clock, offset_s: float, rate: float) -> None:
        self._clock = clock
        self._offset_s = offset_s
        self._rate = rate

    def now(self) -> float:
        return self._offset_s + self._clock.now() * self._rate

    def wall(self) -> float:
        return self._clock.wall()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds / self._rate)


class SimProcess(Process):
    """See the module."""

    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        clock: Clock,
        dialer: Dialer,
        *,
        cores: Cores,
        offset_s: float = 0.0,
        rate: float = 1.0,
    ) -> None:
        """`cores`: where its steps compute; `offset_s`, `rate`: of its clock against the common one, `clock`."""
        super().__init__(
            clock=SkewedClock(clock, offset_s, rate),
            dialer=dialer,
            spend_step=self._spend_step,
            timer=loop.time,
            usage=lambda: NO_USAGE,
        )
        self.name = name
        self.state: Literal["running", "stopped", "dead"] = "running"
        self.step_s = 0.0
        """What steps have cost since the host last asked: the runner adds to it."""
        self.busy_s = 0.0
        """What all steps have cost."""
        self.changed_s = loop.time()
        """When it was started, stopped or continued last."""
        self._base = clock
        self._cores = cores
        self._loop = loop
        self._kept: deque[Turn] = deque()
        self._stuck_until_s = 0.0
        self.context.run(OWNER.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, Outcome]) -> asyncio.Task[Outcome]:
        """Run it in this process."""
        return self._loop.create_task(coroutine, context=self.context.copy())

    async def _spend_step(self) -> None:
        step_s, self.step_s = self.step_s, 0.0
        self.busy_s += step_s
        if step_s > 0:
            await self._cores.compute(step_s)
        while (stuck_s := self._stuck_until_s - self._loop.time()) > 0:
            await self._base.sleep(stuck_s)

    def take_turn(self, turn: Turn) -> None:
        """As `cluster.sim.loop.Owner`."""
        if self.state == "running":
            turn.run()
        else:
            self._kept.append(turn)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.state == "running":
            self.state = "stopped"
            self.changed_s = self._loop.time()

    def go_on(self) -> None:
        """SIGCONT."""
        if self.state == "stopped":
            self.bury()

    def kill(self) -> None:
        """SIGKILL."""
        self.state = "dead"

    def bury(self) -> None:
        """Let what never ended run to its end; of a dead process, once the simulation is over and nothing counts."""
        self.state = "running"
        self.changed_s = self._loop.time()
        while self._kept:
            self._loop.run_turn(self._kept.popleft())

    def get_stuck(self, seconds: float) -> None:
        """No step ends before so long; the rest of the process goes on."""
        self._stuck_until_s = self._loop.time() + seconds
