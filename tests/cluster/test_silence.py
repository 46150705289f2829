"""Who counts as silent, and what the controller does about it."""

import asyncio
from pathlib import Path

from cluster.controller import LOOP_S
from cluster.reconcile import SILENT_S
from cluster.silence import LOOK_GAP_S, Life, SilenceWatch
from core.ids import Epoch, RouterId, WorkerId
from core.messages import HEARTBEAT_TIMEOUT_S, KvUsage, RouterStatus, WorkerStatus
from tests.cluster.test_controller import PREFILL, Bench

ROUTER: Life = (RouterId("router-0"), Epoch(1))
WORKER: Life = (WorkerId("decode-0"), Epoch(1))


def _heartbeat(*workers: Life) -> RouterStatus:
    usage = KvUsage(blocks_total=1, blocks_free=1, blocks_cached=0, blocks_used=0)
    statuses = tuple(
        WorkerStatus(
            worker=WorkerId(worker), role="decode", epoch=epoch, state="ready", num_waiting=0, num_running=0,
            num_leases=0, num_pins=0, kv=usage, counters={},
        )
        for worker, epoch in workers
    )  # fmt: skip
    return RouterStatus(
        router=RouterId("router-0"), epoch=Epoch(1), pid=1, url="", num_in_flight=0, num_in_flight_max=1,
        num_workers_ready={}, workers=statuses,
    )  # fmt: skip


def _watch(watch: SilenceWatch, heard: dict[Life, RouterStatus], start_s: int, end_s: int) -> dict[Life, float]:
    silent: dict[Life, float] = {}
    for now in range(start_s, end_s):
        silent = watch.look([ROUTER], [WORKER], heard, float(now))
    return silent


def test_worker_is_silent_when_a_heard_router_does_not_hear_it() -> None:
    watch = SilenceWatch()
    assert _watch(watch, {ROUTER: _heartbeat(WORKER)}, 0, 5) == {ROUTER: 0.0, WORKER: 0.0}
    assert _watch(watch, {ROUTER: _heartbeat()}, 5, 9) == {ROUTER: 0.0, WORKER: 4.0}
    other_epoch = (WORKER[0], Epoch(2))
    assert _watch(watch, {ROUTER: _heartbeat(other_epoch)}, 9, 10)[WORKER] == 5.0
    assert _watch(watch, {ROUTER: _heartbeat(WORKER)}, 10, 11)[WORKER] == 0.0


def test_worker_is_not_blamed_when_its_router_is_silent() -> None:
    watch = SilenceWatch()
    _watch(watch, {ROUTER: _heartbeat(WORKER)}, 0, 2)
    assert _watch(watch, {}, 2, 40) == {ROUTER: 38.0, WORKER: 0.0}


def test_nobody_is_blamed_for_the_time_that_the_controller_slept() -> None:
    watch = SilenceWatch()
    _watch(watch, {ROUTER: _heartbeat(WORKER)}, 0, 2)
    asleep = int(2 + LOOK_GAP_S + 60)
    assert _watch(watch, {}, asleep, asleep + 1) == {ROUTER: 0.0, WORKER: 0.0}


def test_silent_router_is_replaced_in_the_next_epoch(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.steps(int((SILENT_S + HEARTBEAT_TIMEOUT_S) / LOOP_S) + 10)
        assert "stop router-0 1" in bench.runtime.calls
        assert bench.runtime.calls.index("start router-0 2") > bench.runtime.calls.index("start router-0 1")
        assert "stop prefill-0 1" not in bench.runtime.calls, "its only witness was silent"
        await bench.close()

    asyncio.run(body())


def test_silent_worker_is_replaced_when_its_router_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        bench.runtime.is_beating = True
        await bench.steps(int((SILENT_S + HEARTBEAT_TIMEOUT_S) / LOOP_S) + 10)
        assert f"stop {PREFILL} 1" in bench.runtime.calls and f"start {PREFILL} 2" in bench.runtime.calls
        assert "stop router-0 1" not in bench.runtime.calls
        worker = next(w for w in bench.controller.status()["workers"] if w["id"] == PREFILL)
        assert worker["epoch"] >= 2 and worker["restarts"] >= 1
        await bench.close()

    asyncio.run(body())
