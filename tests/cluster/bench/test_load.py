"""When requests are sent, on a clock that stands still: rates, the limit on concurrency, duration, windows."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from cluster.bench.load import run_load, run_until
from cluster.bench.record import RequestRecord
from cluster.bench.workload import Prompt
from core.clock import ManualClock

T = TypeVar("T")
TURNS = 20


def play(clock: ManualClock, scene: Callable[[], Awaitable[T]]) -> T:
    """Run while virtual time jumps from one deadline to the next."""

    async def main() -> T:
        task = asyncio.ensure_future(scene())
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            deadline_s = clock.next_deadline()
            assert deadline_s is not None, "nobody waits and nothing ends"
            clock.advance(deadline_s - clock.now())

    return asyncio.run(main())


def prompts(count: int) -> list[Prompt]:
    return [Prompt(content=(index,), num_tokens=1, num_output_tokens=1) for index in range(count)]


class Server:
    """Answers after `service_s`; remembers when it was asked and how many were under way."""

    def __init__(self, clock: ManualClock, service_s: float) -> None:
        self._clock = clock
        self._service_s = service_s
        self.num_open = 0
        self.num_open_max = 0
        self.asked_s: list[float] = []

    async def send(self, prompt: Prompt, queue_s: float) -> RequestRecord:
        self.asked_s.append(self._clock.now())
        self.num_open += 1
        self.num_open_max = max(self.num_open_max, self.num_open)
        started_s = self._clock.now()
        await self._clock.sleep(self._service_s)
        self.num_open -= 1
        return RequestRecord(
            started_s=started_s,
            num_prompt_tokens=int(prompt.content[0]),
            num_output_tokens=1,
            token_times_s=[self._clock.now()],
            queue_s=queue_s,
        )


def test_requests_leave_at_their_times_and_overlap_when_the_loop_is_open() -> None:
    clock = ManualClock(100.0)
    server = Server(clock, service_s=5.0)
    result = play(clock, lambda: run_load(server.send, prompts(3), [1.0, 1.5, 4.0], None, clock))
    assert server.asked_s == [101.0, 101.5, 104.0]
    assert server.num_open_max == 3
    assert result.duration_s == 9.0
    assert result.lateness_s == 0.0
    assert [r.num_prompt_tokens for r in result.records] == [0, 1, 2]


def test_no_more_than_the_limit_are_under_way_when_concurrency_is_bounded() -> None:
    clock = ManualClock()
    server = Server(clock, service_s=2.0)
    result = play(clock, lambda: run_load(server.send, prompts(5), [0.0] * 5, 2, clock))
    assert server.num_open_max == 2
    assert server.asked_s == [0.0, 0.0, 2.0, 2.0, 4.0]
    assert result.duration_s == 6.0
    assert [r.queue_s for r in result.records] == [0.0, 0.0, 2.0, 2.0, 4.0]
    assert [r.e2el_s for r in result.records] == [2.0] * 5, "time is counted from sending"


def test_lateness_shows_when_the_client_cannot_keep_up() -> None:
    clock = ManualClock()

    class SlowClock:
        """Every wait takes half a second longer than asked."""

        now, wall = clock.now, clock.wall

        async def sleep(self, seconds: float) -> None:
            await clock.sleep(seconds + 0.5)

    server = Server(clock, service_s=0.25)
    result = play(clock, lambda: run_load(server.send, prompts(2), [1.0, 3.0], None, SlowClock()))
    assert result.lateness_s == pytest.approx(0.5)


def test_nothing_is_sent_after_the_end_of_a_window_and_what_was_sent_is_awaited() -> None:
    clock = ManualClock()
    server = Server(clock, service_s=4.0)
    records = play(clock, lambda: run_until(server.send, prompts(3), [1.0, 9.0, 10.0], 10.0, clock))
    assert (server.asked_s, len(records), clock.now()) == ([1.0, 9.0], 2, 13.0)


def test_a_quiet_window_lasts_its_time() -> None:
    clock = ManualClock()
    assert play(clock, lambda: run_until(Server(clock, 1.0).send, [], [], 10.0, clock)) == []
    assert clock.now() == 10.0


def test_an_error_of_our_own_ends_the_run() -> None:
    clock = ManualClock()

    async def send(prompt: Prompt, queue_s: float) -> RequestRecord:
        raise RuntimeError("a bug")

    with pytest.raises(ExceptionGroup) as caught:
        play(clock, lambda: run_load(send, prompts(1), [0.0], None, clock))
    assert caught.group_contains(RuntimeError, match="a bug")
