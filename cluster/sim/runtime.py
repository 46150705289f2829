"""The runtime of a simulated cluster: the in-process one, with the manners of real processes. Starting takes time and
may be cut short, and to stop a process is to kill it, whatever state it is in.

Knows nothing about faults or about why something starts.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from cluster.local import LocalCluster
from cluster.local_runtime import LocalRuntime
from cluster.runtime import Observed, RouterSpec, WorkerSpec
from cluster.sim.process import SimProcess
from core.clock import Clock
from core.ids import Epoch, RouterId, WorkerId
from core.link import MemoryNetwork
from router.text import TextCodec

NO_PID = 1
START_CALL_S = 0.01
"""Until the runtime has taken an order to start something."""


class Machine(Protocol):
    """Where the processes are."""

    def process_of(self, name: str) -> SimProcess:
        """A new process for a member that starts now."""
        ...

    def kill(self, name: str) -> None: ...

    def broken(self, problem: str) -> None:
        """A member's invariant does not hold."""
        ...

    def watch(self, task: "asyncio.Task[Any]") -> None:
        """A task that must not fail has ended."""
        ...

    def start_seconds(self, name: str) -> float:
        """How long a member takes from its start until it listens."""
        ...


class SimRuntime(LocalRuntime):
    """See the module."""

    def __init__(
        self, cluster: LocalCluster, machine: Machine, *, clock: Clock, network: MemoryNetwork, text: TextCodec
    ) -> None:
        super().__init__(
            cluster, clock=clock, network=network, text=text, process_of=machine.process_of, pid=NO_PID, check_s=0.0
        )
        self._machine = machine
        self._starting: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._epochs: dict[str, int] = {}
        """The newest that each member was started in."""

    async def start_worker(self, spec: WorkerSpec) -> None:
        start = super().start_worker
        await self._begin(spec, lambda: start(spec))

    async def start_router(self, spec: RouterSpec) -> None:
        start = super().start_router
        await self._begin(spec, lambda: start(spec))

    async def _begin(self, spec: WorkerSpec | RouterSpec, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._clock.sleep(START_CALL_S)
        key = (str(spec.id), int(spec.epoch))
        if key not in self._starting and spec.id not in self._cluster.workers and spec.id not in self.routers:
            if spec.epoch <= self._epochs.get(spec.id, 0):
                self._machine.broken(f"CL-1: {spec.id} starts in epoch {spec.epoch} again")
            self._epochs[spec.id] = spec.epoch
            coming = self._come_up(spec, start)
            task = asyncio.get_running_loop().create_task(coming, context=contextvars.Context())
            task.add_done_callback(self._machine.watch)
            self._starting[key] = task

    async def _come_up(self, spec: WorkerSpec | RouterSpec, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._clock.sleep(self._machine.start_seconds(spec.id))
        await start()
        if (router := self.routers.get(RouterId(spec.id))) is not None:
            router.on_failure = lambda error: self._machine.broken(f"{spec.id}: {type(error).__name__}: {error}")
        del self._starting[str(spec.id), int(spec.epoch)]

    async def observe(self) -> list[Observed]:
        for worker_id in list(self._cluster.workers):
            if (failure := self._cluster.failure(worker_id)) is not None:
                self._machine.broken(f"{worker_id}: {type(failure).__name__}: {failure}")
                self._machine.kill(worker_id)
        starting = [
            Observed(id=WorkerId(name), role=_role_of(name), epoch=Epoch(epoch), alive=True, pid=NO_PID)
            for name, epoch in self._starting
        ]
        return starting + await super().observe()

    async def stop(self, member_id: WorkerId | RouterId, epoch: Epoch) -> None:
        coming = self._starting.pop((str(member_id), int(epoch)), None)
        if coming is not None:
            coming.cancel()
        member = self._cluster.workers.get(WorkerId(member_id)) or self.routers.get(RouterId(member_id))
        if member is not None and member.epoch == epoch:
            self._machine.kill(member_id)


def _role_of(name: str) -> Any:
    return name.rsplit("-", 1)[0]
