"""Virtual time: what waits wakes in order, at its time, in no time; what can never wake is found."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable

import pytest

from cluster.sim.cores import Cores
from cluster.sim.loop import LoopClock, VirtualLoop, run_virtual
from cluster.sim.process import SimProcess
from core.errors import SimulationError
from core.link import MemoryNetwork


def test_an_hour_passes_when_nothing_is_ready() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        clock = LoopClock(loop)
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await clock.sleep(seconds)
            seen.append((name, clock.now()))

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(sleeper("b", 3600.0), sleeper("a", 2.0), sleeper("never", 1e6)), 3601.0
            )
        return seen

    assert run_virtual(main) == [("a", 2.0), ("b", 3600.0)]


def test_sleepers_of_one_moment_all_wake_then_and_always_in_the_same_order() -> None:
    async def main() -> list[int]:
        clock = LoopClock(asyncio.get_running_loop())
        woken: list[int] = []

        async def sleeper(number: int) -> None:
            await clock.sleep(1.0)
            woken.append(number)

        await asyncio.gather(*(sleeper(number) for number in range(50)))
        return woken

    woken = run_virtual(main)
    assert sorted(woken) == list(range(50))
    assert run_virtual(main) == woken


def test_a_wait_that_cannot_end_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationError, match="nothing can happen any more"):
        run_virtual(main)


class Bench:
    """One process on a virtual loop, and what it did when."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.clock = LoopClock(loop)
        self.cores = Cores(loop, 2)
        self.process = SimProcess(
            "worker-0", loop, self.clock, MemoryNetwork(self.clock), cores=self.cores, offset_s=100.0, rate=2.0
        )
        self.done: list[tuple[str, float]] = []

    async def tick(self, count: int) -> None:
        """Once per second of the process's own time, which is two of its seconds per common one."""
        try:
            for number in range(count):
                await self.process.clock.sleep(2.0)
                self.done.append((f"tick {number}", self.clock.now()))
        finally:
            self.done.append(("cleaned up", self.clock.now()))


def test_stopped_process_does_nothing_and_goes_on_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        bench = Bench()
        bench.process.spawn(bench.tick(3))
        await bench.clock.sleep(1.5)
        assert bench.process.clock.now() == 103.0
        bench.process.stop()
        await bench.clock.sleep(10.0)
        bench.process.go_on()
        await bench.clock.sleep(10.0)
        return bench.done

    assert run_virtual(main) == [("tick 0", 1.0), ("tick 1", 11.5), ("tick 2", 12.5), ("cleaned up", 12.5)]


def test_killed_process_does_not_even_clean_up() -> None:
    async def main() -> list[tuple[str, float]]:
        bench = Bench()
        ticking = bench.process.spawn(bench.tick(3))
        await bench.clock.sleep(1.5)
        bench.process.kill()
        bench.process.go_on()  # a dead process does not go on
        ticking.cancel()
        await bench.clock.sleep(10.0)
        assert not ticking.done()
        done = list(bench.done)
        bench.process.bury()
        await asyncio.gather(ticking, return_exceptions=True)
        return done

    assert run_virtual(main) == [("tick 0", 1.0)]


def test_timeout_that_was_cancelled_does_not_strike_when_the_process_goes_on() -> None:
    """Both the answer and its timeout became due while the process was stopped; the answer came first."""

    async def main() -> str:
        bench = Bench()
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def ask() -> str:
            return await asyncio.wait_for(answer, 5.0)

        asking = bench.process.spawn(ask())
        await bench.clock.sleep(1.0)
        bench.process.stop()
        answer.set_result("in time")
        await bench.clock.sleep(10.0)
        bench.process.go_on()
        return await asking

    assert run_virtual(main) == "in time"


def test_step_takes_its_time_and_longer_when_the_process_is_stuck() -> None:
    async def main() -> list[float]:
        bench = Bench()
        spend_step = bench.process.spend_step
        assert spend_step is not None
        moments = []
        for seconds in (0.25, 0.0):
            bench.process.step_s = seconds
            await bench.process.spawn(_wait_for(spend_step))
            moments.append(bench.clock.now())
        bench.process.get_stuck(3.0)
        await bench.process.spawn(_wait_for(spend_step))
        return [*moments, bench.clock.now()]

    assert run_virtual(main) == [0.25, 0.25, 3.25]


async def _wait_for(wait: Callable[[], Awaitable[None]]) -> None:
    await wait()


def test_jobs_share_the_cores_when_there_are_more_of_them() -> None:
    """Two cores: three jobs of 2 s go at 2/3 until the first two end, a fourth comes when one has a core to itself."""

    async def main() -> list[float]:
        bench = Bench()
        ends: list[float] = []

        async def job(start_s: float, seconds: float) -> None:
            await bench.clock.sleep(start_s)
            await bench.cores.compute(seconds)
            ends.append(bench.clock.now())

        await asyncio.gather(job(0.0, 2.0), job(0.0, 2.0), job(0.0, 3.0), job(10.0, 1.0))
        return ends

    assert run_virtual(main) == pytest.approx([3.0, 3.0, 4.0, 11.0])


def test_context_outside_of_processes_belongs_to_nobody() -> None:
    async def main() -> float:
        bench = Bench()
        bench.process.kill()
        free = asyncio.get_running_loop().create_task(bench.clock.sleep(1.0), context=contextvars.Context())
        await free
        return bench.clock.now()

    assert run_virtual(main) == 1.0
