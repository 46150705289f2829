"""The runtime without processes: workers and routers of one cluster in this process, as a controller starts and stops
them.

The controller, routers, workers and their protocols are the real ones; processes, sockets and time are not. Tests and
the simulator run on it. Knows nothing about Ray, HTTP or why something starts; imports no torch.
"""

import asyncio
import os
from collections.abc import Callable

from cluster.assembly import WorkerIdentity
from cluster.local import LocalCluster, Process
from cluster.router_host import ControllerDoorway, build_service
from cluster.runtime import Observed, RouterSpec, WorkerSpec
from core.clock import Clock
from core.errors import ClusterError, PdclusterError
from core.ids import Epoch, RouterId, WorkerId
from core.link import MemoryNetwork
from router.service import CHECK_S, RouterService
from router.text import TextCodec


class LocalRuntime:
    """A `cluster.runtime.Runtime`. Members listen on the network under their ids; one epoch of each at a time.

    What is started, runs when the call returns. A worker that was killed is absent from the next observation, one
    that broke or could not be built is reported with the reason; `LocalCluster.close` raises what broke it.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        *,
        clock: Clock,
        network: MemoryNetwork,
        text: TextCodec,
        process_of: Callable[[RouterId], Process] | None = None,
        pid: int | None = None,
        check_s: float = CHECK_S,
    ) -> None:
        """`text`: tokenizer and template of every router, whatever the model path of its spec. `process_of`: what a
        router that starts now runs in; None: all in this one. `pid`: the members' process id; None: this one's.
        `check_s`: how often routers check themselves.
        """
        self._process_of = process_of or self._this_process
        self._pid = os.getpid() if pid is None else pid
        self._check_s = check_s
        self._cluster = cluster
        self._clock = clock
        self._network = network
        self._text = text
        self._ended: list[Observed] = []
        self.routers: dict[RouterId, RouterService] = {}
        """Those that run; their front doors, there being no HTTP."""

    async def start_worker(self, spec: WorkerSpec) -> None:
        assert spec.config == self._cluster.config, "a local cluster runs one configuration"
        worker = self._cluster.workers.get(spec.id)
        if self._is_running(spec, worker.epoch if worker else None):
            return
        try:
            self._cluster.start_worker(WorkerIdentity(worker_id=spec.id, role=spec.role, epoch=spec.epoch))
        except PdclusterError as error:  # a process would end with this; its end is observed
            self._ended.append(Observed(id=spec.id, role=spec.role, epoch=spec.epoch, alive=False, problem=str(error)))

    async def start_router(self, spec: RouterSpec) -> None:
        router = self.routers.get(spec.id)
        if self._is_running(spec, router.epoch if router else None):
            return
        process = self._process_of(spec.id)
        await asyncio.get_running_loop().create_task(self._start_in(process, spec), context=process.context.copy())

    async def _start_in(self, process: Process, spec: RouterSpec) -> None:
        service = build_service(
            spec,
            clock=process.clock,
            dialer=process.dialer,
            text=self._text,
            pid=self._pid,
            check_s=self._check_s,
        )
        await service.start()
        self.routers[spec.id] = service
        self._network.listen(spec.id, ControllerDoorway(service, process.clock).accept)

    def _this_process(self, router_id: RouterId) -> Process:
        return Process(clock=self._clock, dialer=self._network)

    async def observe(self) -> list[Observed]:
        ended, self._ended = self._ended, []
        for worker_id, worker in list(self._cluster.workers.items()):
            failure = self._cluster.failure(worker_id)
            if failure is not None:
                await self._cluster.kill_worker(worker_id)
                problem = f"{type(failure).__name__}: {failure}"
                ended.append(Observed(id=worker_id, role=worker.role, epoch=worker.epoch, alive=False, problem=problem))
        pid = self._pid
        workers = [
            Observed(id=id_, role=worker.role, epoch=worker.epoch, alive=True, endpoint=id_, pid=pid)
            for id_, worker in self._cluster.workers.items()
        ]
        routers = [
            Observed(id=id_, role="router", epoch=router.epoch, alive=True, endpoint=id_, pid=pid, url=router.url)
            for id_, router in self.routers.items()
        ]
        return ended + workers + routers

    async def stop(self, member_id: WorkerId | RouterId, epoch: Epoch) -> None:
        worker = self._cluster.workers.get(WorkerId(member_id))
        if worker is not None and worker.epoch == epoch:
            await self._cluster.stop_worker(worker.worker_id)
        router = self.routers.get(RouterId(member_id))
        if router is not None and router.epoch == epoch:
            del self.routers[router.router_id]
            self._network.stop_listening(member_id)
            await router.close()
            for link in self._network.links:
                if link.peer == member_id:
                    await link.close("the router stopped")

    async def close(self) -> None:
        """End everything, routers first; raises what a worker's task failed with."""
        for router in list(self.routers.values()):
            await self.stop(router.router_id, router.epoch)
        await self._cluster.close()

    def _is_running(self, spec: WorkerSpec | RouterSpec, running: Epoch | None) -> bool:
        """Whether exactly this is there already. Raises ClusterError while another epoch of it is."""
        if running is None or running == spec.epoch:
            return running is not None
        problem = f"{spec.id} cannot start in epoch {spec.epoch} while its epoch {running} runs"
        raise ClusterError(name=spec.config.name, problem=problem)
