"""One simulated cluster: the real router, workers and controller in processes that can be stopped and killed, on links,
transports, disks and clocks that can fail, all in virtual time.

    controller --- routers ===links=== workers ===reads=== workers
         |  the runtime starts and kills processes; the controller itself is started again by its supervisor

Knows nothing about what is asked of the cluster, or which faults come when.
"""

import asyncio
import contextvars
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from cluster.assembly import WorkerIdentity
from cluster.controller import CONTROLLER_FILE, Controller, RecordFile
from cluster.local import LocalCluster
from cluster.reconcile import Target
from cluster.router_contact import CONTROLLER
from cluster.sim.cores import Cores
from cluster.sim.journal import Journal
from cluster.sim.loop import LoopClock, VirtualLoop
from cluster.sim.model import LetterCodec, PacedRunner, StepCost, letters_model
from cluster.sim.process import SimProcess
from cluster.sim.runtime import NO_PID, SimRuntime
from core.config import ClusterConfig
from core.errors import PdclusterError
from core.ids import RouterId, WorkerId
from core.layout import FULL_ATTENTION, Windows
from core.link import MemoryNetwork
from core.messages import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S
from kvtransfer.tiers.files_memory import MemoryFiles
from kvtransfer.transport.memory import MemoryFabric
from router.service import RouterService

RESPAWN_S = 1.0
"""The supervisor starts a controller that ended so much later."""
NOTICED_S = 1.1 * HEARTBEAT_TIMEOUT_S + HEARTBEAT_S + 1.0
"""Whoever is silent for so long has been noticed, clocks that differ included."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a world is made of, besides its configuration."""

    seed: int
    vocab_size: int
    max_model_len: int
    cost: StepCost
    windows: Windows = FULL_ATTENTION
    num_blocks: dict[str, int]
    """In the pool, by role."""
    link_delay_s: tuple[float, float] = (0.0, 0.0)
    link_bytes_per_s: float = math.inf
    read_bytes_per_s: float = math.inf
    num_cores: float = math.inf
    """Of the machine that all members share."""
    start_s: tuple[float, float] = (0.5, 2.0)
    """Bounds of the time from a member's start until it listens."""
    skew: float = 0.0
    """Clocks run by up to so much too fast or too slow, and begin anywhere."""
    is_checked: bool = True
    """Every worker checks itself after each of its steps."""


class World:
    """See the module. Made and used on a virtual loop."""

    def __init__(self, config: ClusterConfig, setting: Setting, log: TextIO | None = None) -> None:
        """`log`: where the journal is written, besides its last lines."""
        self.config = config
        self.setting = setting
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "a world needs virtual time"
        self._loop = loop
        self.clock = LoopClock(loop)
        self.journal = Journal(self.clock.now, log)
        self._rng = random.Random(f"{setting.seed} processes")
        self.network = MemoryNetwork(
            self.clock, seed=setting.seed, delay_s=setting.link_delay_s, bytes_per_s=setting.link_bytes_per_s
        )
        self.network.on_send = self.journal.note_frame
        self.fabric = MemoryFabric(self.clock, seed=setting.seed)
        self.fabric.bytes_per_s = setting.read_bytes_per_s
        self.fabric.is_blocked = self._is_read_blocked
        self.disk = MemoryFiles(seed=setting.seed)
        self._cores = Cores(loop, setting.num_cores)
        text = LetterCodec(setting.vocab_size)
        model = letters_model(
            block_size=config.kv.block_size,
            max_model_len=setting.max_model_len,
            vocab_size=setting.vocab_size,
            windows=setting.windows,
        )
        self.cluster = LocalCluster(
            config,
            model,
            self._runner,
            clock=self.clock,
            network=self.network,
            fabric=self.fabric,
            is_checked=setting.is_checked,
            process_of=self.process_of,
        )
        self.runtime = SimRuntime(self.cluster, self, clock=self.clock, network=self.network, text=text)
        self.controller: Controller | None = None
        self._processes: dict[str, SimProcess] = {}
        self._graves: list[SimProcess] = []
        self._supervisor: asyncio.Task[None] | None = None
        self.on_kill: Callable[[str], None] = lambda _name: None
        """Called with the name of a member whose process dies."""
        self.problems: list[str] = []
        """Invariants that did not hold."""

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin; the cluster comes up by itself."""
        self._supervisor = self._loop.create_task(self._supervise(), context=contextvars.Context())

    async def close(self) -> None:
        """End everything; what died is allowed to end, and nothing of that counts."""
        if self._supervisor is not None:
            self._supervisor.cancel()
        self.network.on_send = lambda _sender, _receiver, _messages: None
        for process in (*self._processes.values(), *self._graves):
            process.bury()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for worker in self.cluster.workers.values():
            worker.close()

    async def _supervise(self) -> None:
        while True:
            process = self.process_of(CONTROLLER)
            try:
                self.controller = self._controller(process)
            except PdclusterError as error:  # its record cannot be read or written
                self.journal.note(f"controller: {error}")
                await self.clock.sleep(RESPAWN_S)
                continue
            running = process.spawn(self.controller.run())
            running.add_done_callback(self.watch)
            while process.state != "dead":
                await self.clock.sleep(RESPAWN_S)

    def _controller(self, process: SimProcess) -> Controller:
        return process.context.run(
            lambda: Controller(
                target=Target(config=self.config, model_path=Path("letters")),
                runtime=self.runtime,
                clock=process.clock,
                dialer=process.dialer,
                record=RecordFile(self.disk, Path(CONTROLLER_FILE), self.config.name),
                pid=NO_PID,
            )
        )

    # ---- the machine -------------------------------------------------------------------------------------------------

    def process_of(self, name: str) -> SimProcess:
        if name in self._processes:
            self._graves.append(self._processes[name])
        rng, skew = self._rng, self.setting.skew
        offset_s, rate = rng.uniform(0, 1000.0) if skew else 0.0, 1.0 + rng.uniform(-skew, skew)
        dialer = self.network.dialer(name)
        process = SimProcess(name, self._loop, self.clock, dialer, cores=self._cores, offset_s=offset_s, rate=rate)
        self._processes[name] = process
        self.journal.note(f"{name} starts")
        return process

    def start_seconds(self, name: str) -> float:
        return self._rng.uniform(*self.setting.start_s)

    def broken(self, problem: str) -> None:
        self.journal.note(f"BROKEN {problem}")
        self.problems.append(problem)

    def watch(self, task: "asyncio.Task[Any]") -> None:
        """What a task of a member ends with, though it may not, is a broken invariant."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken(f"{type(error).__name__}: {error}")

    def process(self, name: str) -> SimProcess | None:
        """The process of a member that is there, running or stopped."""
        found = self._processes.get(name)
        return None if found is None or found.state == "dead" else found

    def kill(self, name: str) -> None:
        """SIGKILL; nothing happens when it is not there."""
        process = self.process(name)
        if process is None:
            return
        self.journal.note(f"{name} dies")
        process.kill()
        self.network.stop_listening(name)
        for link in self.network.links_of(name):
            link.lose()
        if name in self.cluster.workers:
            self.cluster.drop_worker(WorkerId(name))
        self.runtime.routers.pop(RouterId(name), None)
        if name == CONTROLLER:
            self.controller = None
            self.disk.crash()
        self.on_kill(name)

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        if (process := self.process(name)) is not None:
            self.journal.note(f"{name} is stopped")
            process.stop()

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        if (process := self.process(name)) is not None:
            self.journal.note(f"{name} goes on")
            process.go_on()

    def routers(self) -> list[RouterService]:
        return list(self.runtime.routers.values())

    def is_whole(self) -> bool:
        """Nothing is missing."""
        return not self.missing()

    def missing(self) -> str:
        """Which members the controller does not find ready, or which pairs a router does not find connected."""
        if self.controller is None:
            return "the controller"
        status = self.controller.status()
        states = {one["id"]: one["state"] for one in [*status["workers"], *status["routers"]]}
        if absent := {name: state for name, state in states.items() if state != "ready"} or status["state"] != "ready":
            return f"{status['state']}: {absent} {status['controller']['problem']}"
        config = self.config
        num_pairs = config.decode.workers * max(1, config.prefill.workers)
        pairs = {router.router_id: router.num_pairs() for router in self.routers() if router.num_pairs() != num_pairs}
        num_routers = len(self.routers())
        return f"pairs: {pairs} of {num_pairs}" if pairs or num_routers != config.router.processes else ""

    def _is_read_blocked(self, reader: str, source: str) -> bool:
        """NIXL needs the help of both sides, and the way between them."""
        ends = (self.process(reader), self.process(source))
        is_stopped = any(process is not None and process.state == "stopped" for process in ends)
        return is_stopped or self.network.is_partitioned(reader, source)

    def _runner(self, identity: WorkerIdentity) -> tuple[PacedRunner, memoryview]:
        process = self._processes[identity.worker_id]

        def spend(seconds: float) -> None:
            process.step_s += seconds

        runner = PacedRunner(
            num_blocks=self.setting.num_blocks[identity.role] * len(self.setting.windows),
            block_size=self.config.kv.block_size,
            vocab_size=self.setting.vocab_size,
            windows=self.setting.windows,
            cost=self.setting.cost,
            spend=spend,
        )
        return runner, runner.byte_view()

    # ---- books -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Note every invariant of any member that does not hold now."""
        for member in (*self.cluster.workers.values(), *self.routers()):
            try:
                cast(Any, member).check()
            except AssertionError as error:
                self.broken(f"{cast(Any, member).__class__.__name__}: {error}")

    def unnoticed(self) -> str:
        """A worker that has been stopped for longer than heartbeats take, and that a router still counts on."""
        long_s = self.clock.now() - NOTICED_S
        if self.network.healed_s > long_s:  # what a partition held back came late, and is a sign of life
            return ""
        for router in self.routers():
            watching = self.process(router.router_id)
            if watching is None or watching.state == "stopped" or watching.changed_s > long_s:
                continue
            topology = router.pool.topology()
            for life in (*topology.prefill, *topology.decode):
                process = self.process(life.worker)
                if process is not None and process.state == "stopped" and process.changed_s <= long_s:
                    return f"{router.router_id} counts on {life.worker}, which was stopped {NOTICED_S:g} s ago"
        return ""

    def held(self) -> dict[str, int]:
        """Everything that anybody holds, by owner and name; empty at rest."""
        books = {f"{r.router_id} {name}": count for r in self.routers() for name, count in r.books().items()}
        for worker in self.cluster.workers.values():
            books |= {f"{worker.worker_id} {name}": count for name, count in worker.books().items()}
            kv = worker.status().kv
            if kv.blocks_free + kv.blocks_cached != kv.blocks_total:
                books[f"{worker.worker_id} blocks"] = kv.blocks_total - kv.blocks_free - kv.blocks_cached
        return {name: count for name, count in books.items() if count}
