"""The control loop over a runtime of our own and the in-memory network, on a manual clock."""

import asyncio
from collections.abc import Coroutine
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from cluster.controller import LOOP_S, Controller, DurableRecord, RecordFile
from cluster.reconcile import START_FAILURES_MAX, MemberId, Target
from cluster.runtime import MemberRole, Observed, RouterSpec, WorkerSpec
from core.clock import ManualClock
from core.config import ClusterConfig
from core.errors import ClusterError
from core.ids import Epoch, RouterId, WorkerId
from core.link import Link, MemoryNetwork
from core.messages import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, AnyMessage, Hello, RouterStatus, WorkerSet
from kvtransfer.tiers.files import OsFiles
from kvtransfer.tiers.files_memory import MemoryFiles

CONFIG = ClusterConfig.model_validate(
    {"schema_version": 1, "name": "test", "model": {"path": "m"}, "kv": {"device_blocks": 64}}
)
TARGET = Target(config=CONFIG, model_path=Path("m"))
PREFILL = WorkerId("prefill-0")
ROUTER = RouterId("router-0")


class FakeRuntime:
    """Processes that listen as soon as they are started, and a router that answers its link."""

    def __init__(self, network: MemoryNetwork, clock: ManualClock) -> None:
        self.running: dict[tuple[MemberId, Epoch], Observed] = {}
        self.calls: list[str] = []
        self.start_problem: dict[MemberId, str] = {}
        self.is_silent = False
        self.is_beating = False
        """The router goes on sending heartbeats, which name no worker."""
        self.router_heard: list[AnyMessage] = []
        self.record_at_start: list[str] = []
        self.record_path: Path | None = None
        self._network = network
        self._clock = clock

    async def start_worker(self, spec: WorkerSpec) -> None:
        await self._start(spec.id, spec.role, spec.epoch)

    async def start_router(self, spec: RouterSpec) -> None:
        self._network.listen(f"{spec.id}:{spec.epoch}", self._answer)
        await self._start(spec.id, spec.role, spec.epoch)

    async def observe(self) -> list[Observed]:
        if self.is_silent:
            raise ClusterError(name="test", problem="Ray does not answer")
        return list(self.running.values())

    async def stop(self, member_id: MemberId, epoch: Epoch) -> None:
        self.calls.append(f"stop {member_id} {epoch}")
        self.running.pop((member_id, epoch), None)

    async def _start(self, member_id: MemberId, role: MemberRole, epoch: Epoch) -> None:
        self.calls.append(f"start {member_id} {epoch}")
        if self.record_path is not None:
            self.record_at_start.append(self.record_path.read_text())
        if member_id in self.start_problem:
            raise ClusterError(name="test", problem=self.start_problem[member_id])
        endpoint = f"{member_id}:{epoch}"
        self.running[member_id, epoch] = Observed(
            id=member_id, role=role, epoch=epoch, alive=True, endpoint=endpoint, pid=100
        )

    async def _answer(self, link: Link) -> None:
        for message in await link.receive():
            self.router_heard.append(message)
        status = RouterStatus(
            router=ROUTER, epoch=Epoch(1), pid=7, url="http://x", num_in_flight=3, num_in_flight_max=9,
            num_workers_ready={"prefill": 1},
        )  # fmt: skip
        link.send([status])
        beat = asyncio.ensure_future(self._beat(link, status))
        try:
            while True:
                self.router_heard += await link.receive()
        finally:
            beat.cancel()

    async def _beat(self, link: Link, status: RouterStatus) -> None:
        while True:
            await self._clock.sleep(HEARTBEAT_S)
            if self.is_beating:
                link.send([status])


class Bench:
    """A controller with everything around it."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(self.clock)
        self.runtime = FakeRuntime(self.network, self.clock)
        self.path = directory / "controller.json"
        self.files = OsFiles(directory)
        self.controller = self.new_controller()

    def new_controller(self) -> Controller:
        record = RecordFile(self.files, self.path, "test")
        return Controller(
            target=TARGET, runtime=self.runtime, clock=self.clock, dialer=self.network, record=record
        )  # fmt: skip

    async def steps(self, number: int) -> None:
        for _ in range(number):
            await self.controller.step()
            self.clock.advance(LOOP_S)
            for _ in range(20):
                await asyncio.sleep(0)

    async def close(self) -> None:
        self.runtime.is_silent = False
        await self.controller.shutdown()
        await self.network.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_nothing_is_started_when_the_end_comes_while_the_runtime_is_asked(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.steps(4)
        answer, observe, calls = asyncio.Event(), bench.runtime.observe, list(bench.runtime.calls)

        async def slow() -> list[Observed]:
            await answer.wait()
            return await observe()

        bench.runtime.observe = slow  # type: ignore[method-assign]
        step = asyncio.ensure_future(bench.controller.step())
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(bench.controller.shutdown())
        await asyncio.sleep(0)
        answer.set()
        await asyncio.gather(step, ending)
        assert all(call.startswith("stop ") for call in bench.runtime.calls[len(calls) :])
        assert not bench.controller._contacts, "nobody would end them"
        await bench.network.close()

    run(body())


def test_cluster_becomes_ready_and_router_learns_the_workers_when_started(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.steps(4)
        status = bench.controller.status()
        assert status["state"] == "ready" and status["reason"] == ""
        assert [(one["id"], one["epoch"], one["state"]) for one in status["workers"]] == [
            ("prefill-0", 1, "ready"),
            ("decode-0", 1, "ready"),
        ]
        assert status["routers"][0]["status"]["num_in_flight"] == 3
        assert isinstance(bench.runtime.router_heard[0], Hello)
        workers = bench.runtime.router_heard[-1]
        assert isinstance(workers, WorkerSet)
        assert [(one.worker, one.epoch) for one in workers.workers] == [("decode-0", 1), ("prefill-0", 1)]
        assert len([one for one in bench.runtime.router_heard if isinstance(one, WorkerSet)]) <= 2
        await bench.close()
        assert bench.runtime.running == {}

    run(body())


def test_worker_is_restarted_in_next_epoch_and_router_told_when_it_ends(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.steps(3)
        del bench.runtime.running[PREFILL, Epoch(1)]
        await bench.steps(1)
        gone = bench.runtime.router_heard[-1]
        assert isinstance(gone, WorkerSet) and [one.worker for one in gone.workers] == ["decode-0"]
        await bench.steps(6)
        back = bench.runtime.router_heard[-1]
        assert isinstance(back, WorkerSet)
        assert {one.worker: one.epoch for one in back.workers} == {"decode-0": 1, "prefill-0": 2}
        await bench.close()

    run(body())


def test_epoch_is_on_disk_when_a_start_begins(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        bench.runtime.record_path = bench.path
        await bench.steps(1)
        assert len(bench.runtime.record_at_start) == 3
        assert all('"prefill-0"' in text and '"phase": "starting"' in text for text in bench.runtime.record_at_start)
        await bench.close()

    run(body())


def test_new_controller_adopts_what_runs_when_the_old_one_is_lost(tmp_path: Path) -> None:
    """CL-2: what runs is not touched."""

    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.steps(3)
        running, calls = dict(bench.runtime.running), list(bench.runtime.calls)
        bench.controller = bench.new_controller()
        await bench.steps(3)
        assert bench.runtime.running == running and bench.runtime.calls == calls
        assert bench.controller.status()["state"] == "ready"
        assert bench.controller.status()["controller"]["epoch"] == 2
        await bench.close()

    run(body())


def test_old_epoch_is_never_reused_when_controller_dies_between_record_and_act(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.steps(3)
        bench.runtime.running.clear()
        await bench.steps(1)
        bench.clock.advance(1.0)
        bench.runtime.start_problem = {member: "the controller died here" for member in TARGET.members()}
        await bench.steps(1)
        bench.runtime.start_problem = {}
        bench.controller = bench.new_controller()
        await bench.steps(12)
        assert {epoch for _, epoch in bench.runtime.running} == {Epoch(3)}
        await bench.close()

    run(body())


def test_nothing_changes_when_the_runtime_does_not_answer(tmp_path: Path) -> None:
    """CL-2: losing Ray's head is no reason to stop anything."""

    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.steps(3)
        calls = list(bench.runtime.calls)
        bench.runtime.is_silent = True
        await bench.steps(100)
        assert bench.runtime.calls == calls
        assert "Ray does not answer" in bench.controller.status()["controller"]["problem"]
        await bench.close()

    run(body())


def test_cluster_fails_with_the_reason_when_a_worker_cannot_start(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        bench.runtime.start_problem[PREFILL] = "no room"
        await bench.steps(60)
        status = bench.controller.status()
        assert status["state"] == "failed" and "no room" in status["reason"]
        assert len([call for call in bench.runtime.calls if call.startswith("start prefill-0")]) == START_FAILURES_MAX
        await bench.close()

    run(body())


def test_router_is_called_silent_when_its_heartbeats_stop(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.steps(4)
        assert bench.controller.status()["routers"][0]["status"] is not None
        await bench.steps(int(HEARTBEAT_TIMEOUT_S / LOOP_S) + 2)
        assert bench.controller.status()["routers"][0]["status"] is None
        await bench.close()

    run(body())


def test_record_is_refused_with_its_path_when_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "controller.json"
    path.write_text('{"schema_version": 1, "epoch":')
    with pytest.raises(ClusterError, match=rf"{tmp_path}/controller\.json cannot be read"):
        RecordFile(OsFiles(tmp_path), path, "test").read()


def test_nothing_is_done_and_nothing_lost_while_the_record_cannot_be_written(tmp_path: Path) -> None:
    """What is not recorded is not done: a controller that died then would not know of it."""

    async def body() -> None:
        bench = Bench(tmp_path)
        bench.files = disk = MemoryFiles(seed=1)  # type: ignore[assignment]
        bench.controller = bench.new_controller()
        await bench.steps(3)
        calls = list(bench.runtime.calls)
        disk.faults.capacity_bytes = 0
        (life,) = [life for life in bench.runtime.running if life[0] == PREFILL]
        bench.runtime.running[life] = replace(bench.runtime.running[life], alive=False, problem="it broke")
        await bench.steps(1)
        del bench.runtime.running[life]  # an end is reported once
        await bench.steps(5)
        assert bench.runtime.calls == calls
        assert "no space left" in bench.controller.status()["controller"]["problem"]
        disk.faults.capacity_bytes = 2**20
        await bench.steps(1)
        assert "it broke" in bench.controller.status()["reason"]
        await bench.steps(5)
        assert f"start {PREFILL} 2" in bench.runtime.calls
        await bench.close()

    run(body())


def test_record_is_whole_when_the_machine_fails_while_it_is_replaced() -> None:
    """At any operation: the older one or the newer one is read."""
    for num_operations in range(8):
        for seed in range(10):
            disk = MemoryFiles(seed=seed)
            older = DurableRecord(schema_version=1, epoch=1, members={})
            record = RecordFile(disk, Path("controller.json"), "test")
            record.write(older)
            newer = replace_struct(older, epoch=2)
            with pytest.raises(Failed) if num_operations < 5 else nullcontext():
                RecordFile(_Failing(disk, num_operations), Path("controller.json"), "test").write(newer)
            disk.crash()
            assert record.read() in (older, newer)
            record.write(newer)
            assert record.read() == newer


class Failed(Exception):
    """The machine fails here."""


class _Failing:
    """Files of a machine that fails at one operation."""

    def __init__(self, disk: MemoryFiles, num_operations: int) -> None:
        self._disk = disk
        self._left = num_operations

    def __getattr__(self, name: str) -> Any:
        if self._left == 0:
            raise Failed(name)
        self._left -= 1
        return getattr(self._disk, name)
