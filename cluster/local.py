"""The workers of one cluster in one process and on one clock. `cluster.local_runtime` adds routers and the seam that a
controller acts through.

Real planner, pool, leases, sessions and workers; in-memory links and transport; any runner. Tests and the
simulator run on it, and a single colocated decode worker of it is the oracle for every disaggregated answer. Knows
nothing about processes, Ray or HTTP; imports no torch.
"""

import asyncio
import contextvars
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from cluster.assembly import ServedModel, WorkerIdentity, build_handshake, build_worker
from cluster.worker_host import AsyncHost, Doorway, Inbox, welcome_of
from core.clock import Clock
from core.config import ClusterConfig
from core.ids import Epoch, Role, WorkerId
from core.link import Dialer, MemoryNetwork
from core.messages import WorkerAddress, WorkerSet
from core.process import ProcessUsage, read_usage
from core.worker import Worker
from engine.step import Runner
from kvtransfer.integrity import BlockDigester
from kvtransfer.puller import Puller
from kvtransfer.transport.base import Peer, Region
from kvtransfer.transport.memory import MemoryFabric, MemoryTransport

MakeRunner = Callable[[WorkerIdentity], tuple[Runner, memoryview]]
"""A runner for one worker, and the bytes of its KV pool, one contiguous run per block."""


@dataclass(kw_only=True)
class Process:
    """What a member runs in, real or played."""

    clock: Clock
    dialer: Dialer
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Of every task of the member."""
    spend_step: Callable[[], Awaitable[None]] | None = None
    """Waits as long as the step just done takes."""
    timer: Callable[[], float] = time.perf_counter
    """What measures the parts of a step."""
    usage: Callable[[], ProcessUsage | None] = read_usage


class LocalCluster:
    """Workers of `config`, reachable over `network` under their ids as endpoints."""

    def __init__(
        self,
        config: ClusterConfig,
        model: ServedModel,
        make_runner: MakeRunner,
        *,
        clock: Clock,
        network: MemoryNetwork,
        fabric: MemoryFabric,
        executor: Executor | None = None,
        is_checked: bool = False,
        process_of: Callable[[WorkerId], Process] | None = None,
    ) -> None:
        """`executor` (of one thread): where steps run, for runners that take long; None: on the loop.

        `is_checked`: assert every worker's invariants after each of its steps, not only now and then.
        `process_of`: what a worker that starts now runs in; None: all in this one.
        """
        self._process_of = process_of or self._this_process
        self._is_checked = is_checked
        self.config = config
        self.model = model
        self.models: dict[WorkerId, ServedModel] = {}
        """What some workers serve instead, from their next start on."""
        self._make_runner = make_runner
        self._clock = clock
        self._network = network
        self._fabric = fabric
        self._executor = executor
        self.workers: dict[WorkerId, Worker] = {}
        self._tasks: dict[WorkerId, list[asyncio.Task[None]]] = {}
        self._failures: list[BaseException] = []

    def start(self) -> WorkerSet:
        """Start every worker the configuration asks for; what a controller would tell the routers."""
        counts: list[tuple[Role, int]] = [
            ("prefill", self.config.prefill.workers),
            ("decode", self.config.decode.workers),
        ]
        for role, count in counts:
            for index in range(count):
                self.start_worker(WorkerIdentity(worker_id=WorkerId(f"{role}-{index}"), role=role, epoch=Epoch(1)))
        return self.worker_set()

    def start_worker(self, identity: WorkerIdentity) -> None:
        """Start one worker; a restarted one gets a higher epoch."""
        process = self._process_of(identity.worker_id)
        process.context.run(self._start_in, process, identity)

    def _start_in(self, process: Process, identity: WorkerIdentity) -> None:
        model = self.models.get(identity.worker_id, self.model)
        transport, worker = self._build(identity, model, process)
        inbox = Inbox()
        welcome = welcome_of(worker, pid=0, model_name=model.name, max_model_len=model.max_model_len)
        clock = process.clock
        doorway = Doorway(welcome=welcome, status=worker.status(), inbox=inbox, clock=clock, usage=process.usage)
        host = AsyncHost(
            worker,
            doorway,
            inbox,
            clock,
            self._executor,
            is_checked=self._is_checked,
            spend_step=process.spend_step,
            until_read_s=lambda: self._until_read_s(transport),
        )
        loop = asyncio.get_running_loop()
        self.workers[identity.worker_id] = worker
        self._tasks[identity.worker_id] = [loop.create_task(host.run()), loop.create_task(doorway.beat())]
        self._network.listen(identity.worker_id, doorway.accept)

    def _until_read_s(self, transport: MemoryTransport) -> float:
        due_s = transport.next_due_s
        return math.inf if due_s is None else due_s - self._clock.now()

    def _this_process(self, worker_id: WorkerId) -> Process:
        return Process(clock=self._clock, dialer=self._network)

    def worker_set(self) -> WorkerSet:
        """Addresses of all live workers."""
        addresses = [
            WorkerAddress(worker=w.worker_id, role=w.role, epoch=w.epoch, endpoint=w.worker_id, pid=0)
            for w in self.workers.values()
        ]
        return WorkerSet(workers=tuple(addresses))

    def failure(self, worker_id: WorkerId) -> BaseException | None:
        """What broke a worker's step or heartbeat; None while both go on."""
        broken = (task.exception() for task in self._tasks[worker_id] if task.done() and not task.cancelled())
        return next((error for error in broken if error is not None), None)

    async def kill_worker(self, worker_id: WorkerId) -> None:
        """End a worker as SIGKILL would: no message, no cleanup, its memory unreadable."""
        await self._end_tasks(self.drop_worker(worker_id))

    def drop_worker(self, worker_id: WorkerId) -> list[asyncio.Task[None]]:
        """Forget a worker whose process has died, and break its connections. Returns its tasks, which never ended."""
        worker = self.workers.pop(worker_id)
        self._network.stop_listening(worker_id)
        self._fabric.kill(Peer(worker=worker_id, epoch=worker.epoch))
        for link in self._network.links:
            if link.peer == worker_id:
                link.lose()
        return self._tasks.pop(worker_id)

    async def stop_worker(self, worker_id: WorkerId) -> None:
        """End a worker in order: its step first, then its links and its transport."""
        worker = self.workers.pop(worker_id)
        self._network.stop_listening(worker_id)
        await self._end_tasks(self._tasks.pop(worker_id))
        for link in self._network.links:
            if link.peer == worker_id:
                await link.close("the worker stopped")
        worker.close()

    async def close(self) -> None:
        """End everything; raises what the task of any worker failed with first, of those that ended before too."""
        for worker_id in list(self.workers):
            await self.stop_worker(worker_id)
        await self._network.close()
        if self._failures:
            raise self._failures[0]

    async def _end_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self._failures += [result for result in results if isinstance(result, Exception)]

    def _build(self, identity: WorkerIdentity, model: ServedModel, process: Process) -> tuple[MemoryTransport, Worker]:
        runner, view = self._make_runner(identity)
        block_bytes = model.layout.block_bytes()
        region = Region(address=0, block_bytes=block_bytes, num_blocks=runner.num_blocks, device="cpu", view=view)
        peer = Peer(worker=identity.worker_id, epoch=identity.epoch)
        transport = MemoryTransport(self._fabric, peer, region)
        digester = BlockDigester(view, block_bytes)
        handshake = build_handshake(
            self.config,
            model,
            num_blocks=runner.num_blocks,
            transport=transport.name,
            transport_metadata=transport.metadata(),
        )
        worker = build_worker(
            identity,
            self.config,
            model,
            runner=runner,
            handshake=handshake,
            digester=digester,
            transfer=Puller(transport, digester, clock=process.clock),
            timer=process.timer,
        )
        return transport, worker
