"""A cluster whose requests can be held at any point of their way, for `tests.e2e.faults.rows` to break something there.

Router service, HTTP application, workers, links and transfers are the real ones on the manual clock; `.gated` holds
requests. `books` tells what anybody holds. Knows nothing about faults.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import ASGIApp

from cluster.assembly import WorkerIdentity
from core.clock import ManualClock
from core.config import parse_config
from core.ids import Epoch, RouterId, WorkerId
from core.request import SamplingParams
from core.worker import Worker
from decode.worker import DecodeWorker
from engine.standin import expected_tokens
from prefill.worker import PrefillWorker
from router.actions import DEFAULT_STALL_LIMITS, StallLimits
from router.app import build_app
from router.run import Run
from router.select import Pair, RoundRobin, Topology
from router.service import RouterService
from tests.e2e.faults.client import Call
from tests.e2e.faults.freezing import FreezableClock, FreezableDialer, Freezer
from tests.e2e.faults.gated import Fills, GatedCluster, GatedNetwork, GatedSelector, Gates
from tests.e2e.stage import VOCAB, LetterCodec

BLOCKS = 32
LEASE_S = 3.0
CREDIT_S = 4.0
SCENE_S_MAX = 600.0
T = TypeVar("T")
ROUTER = RouterId("router-0")
ROUTER_OFFSET_S = 300.0
LATE_S = 0.05
"""A receiver's view of a deadline is later by the way there."""
CONFIG = """
schema_version: 1
name: faults
model: {path: standin}
kv: {block_size: 4, device_blocks: 32}
prefill: {max_batched_tokens: 8}
transfer: {transport: memory, lease_s: 3.0, credit_s: 4.0}
"""


class FaultStage:
    """See the module."""

    def __init__(
        self,
        *,
        num_pairs: int,
        num_blocks: int = BLOCKS,
        request_timeout_s: float = 600.0,
        stall: StallLimits = DEFAULT_STALL_LIMITS,
    ) -> None:
        self.clock = ManualClock()
        self.tick_s = 0.01
        """How time passes; coarser while nothing but time shall pass."""
        self.gates = Gates()
        overrides = [f"prefill.workers={num_pairs}", f"decode.workers={num_pairs}"]
        self.config = parse_config(CONFIG, file="faults.yaml", overrides=overrides)
        self.network = GatedNetwork(self.clock, self.gates)
        self.cluster = GatedCluster(self.config, self.clock, self.network, self.gates, num_blocks)
        self.fills = Fills(self.cluster)
        self.request_timeout_s = request_timeout_s
        self.stall = stall
        self.epochs: Counter[str] = Counter()
        self.router_freezer = Freezer()
        self.service = self.new_router()
        self.app: ASGIApp = build_app(self.service)
        self.run: Run | None = None
        """Of the request on stage."""

    # ---- life --------------------------------------------------------------------------------------------------------

    def new_router(self) -> RouterService:
        """The next life of the router, not started."""
        self.epochs[ROUTER] += 1
        self.router_freezer = Freezer()
        service = RouterService(
            router_id=ROUTER,
            epoch=Epoch(self.epochs[ROUTER]),
            clock=FreezableClock(self.clock, self.router_freezer, ROUTER_OFFSET_S),
            dialer=FreezableDialer(self.network, self.router_freezer),
            text=LetterCodec(),
            model_name="standin",
            mode="disaggregated",
            request_timeout_s=self.request_timeout_s,
            stall=self.stall,
            check_s=0.0,
        )
        service._selector = GatedSelector(self.gates)
        return service

    async def open(self) -> None:
        """Everything runs and all pairs are ready."""
        addresses = self.cluster.start()
        self.epochs |= {address.worker: address.epoch for address in addresses.workers}
        await self.start_router(self.service)

    async def start_router(self, service: RouterService) -> None:
        self.service, self.app = service, build_app(service)
        await service.start()
        service.update_workers(self.cluster.worker_set())
        await self.until(self.is_whole)

    async def close(self) -> None:
        await self.service.close()
        await self.cluster.close()

    def is_whole(self) -> bool:
        """Every pair of workers can serve."""
        return self.service.num_pairs() == self.config.prefill.workers * self.config.decode.workers

    async def restart(self, worker: WorkerId, role: Any) -> None:
        """The next life of a worker that was killed."""
        self.epochs[worker] += 1
        identity = WorkerIdentity(worker_id=worker, role=role, epoch=Epoch(self.epochs[worker]))
        self.cluster.start_worker(identity)
        self.service.update_workers(self.cluster.worker_set())

    # ---- requests ----------------------------------------------------------------------------------------------------

    def call(self, prompt: list[int], *, max_tokens: int, request_id: str = "client-1") -> Call:
        return Call(self.app, prompt, max_tokens=max_tokens, request_id=request_id)

    async def enter(self, prompt: list[int], max_tokens: int) -> Call:
        """Begin the request on stage; its `run` is known when this returns."""
        call = self.call(prompt, max_tokens=max_tokens)
        await self.until(lambda: len(self.service.runs) == 1)
        (self.run,) = self.service.runs.values()
        return call

    async def until(self, is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline_s = self.clock.now() + timeout_s
        while not is_so():
            assert self.clock.now() < deadline_s, "it does not come to this"
            await self.clock.sleep(0.01)

    def pair(self) -> Pair:
        """Who serves the request on stage, or who would be chosen for it now."""
        assert self.run is not None
        if self.run.flow.pair is not None:
            return self.run.flow.pair
        chosen = _peek(self.service._selector, self.service.pool.topology(), self.run.flow.failed)
        assert chosen is not None
        return chosen

    # ---- books -------------------------------------------------------------------------------------------------------

    def books(self) -> dict[str, int]:
        """All that anybody holds, by owner and name; empty when nothing is held."""
        books = {f"router {name}": count for name, count in self.service.books().items()}
        for worker in self.cluster.workers.values():
            worker.check()
            kv = worker.status().kv
            assert kv.blocks_free + kv.blocks_cached + kv.blocks_used == kv.blocks_total, "KV-1"
            books |= {f"{worker.worker_id} {name}": count for name, count in worker.books().items()}
        return {name: count for name, count in books.items() if count}

    def late_deadlines(self) -> list[str]:
        """Who waits longer for the request on stage than its router does, whatever their clocks say."""
        assert self.run is not None
        left_s = self.run.flow._deadline - self.service.clock.now() + LATE_S
        waits = [
            (worker.worker_id, one.deadline_s - self.cluster.clocks[worker.worker_id].now())
            for worker in self.cluster.workers.values()
            for one in _waiting_at(worker)
            if one.key.request_id == self.run.flow.request.request_id
        ]
        return [f"{worker} {wait_s:.3f} s, not {left_s:.3f} s" for worker, wait_s in waits if not 0 <= wait_s <= left_s]

    def tasks(self) -> Counter[str]:
        """What runs, by what it runs; the waits of a step loop come and go."""
        names = [getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()]
        return Counter(name for name in names if name not in ("FreezableClock.sleep", "Event.wait"))


def _waiting_at(worker: Worker) -> list[Any]:
    """Requests that a worker has, with `key` and `deadline_s`."""
    if isinstance(worker, PrefillWorker):
        return list(worker._handoffs.values())
    assert isinstance(worker, DecodeWorker)
    return [*worker._live.values(), *worker._intake._waiting, *worker._intake._active.values()]


def _peek(selector: RoundRobin, topology: Topology, failed: Mapping[WorkerId, int]) -> Pair | None:
    copy = RoundRobin()
    copy._next_decode, copy._next_prefill = selector._next_decode, dict(selector._next_prefill)
    return copy.select(topology, failed)


def play(stage: FaultStage, scene: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a scene while virtual time passes in ticks of `stage.tick_s`, SCENE_S_MAX seconds at most."""

    async def run() -> T:
        task = asyncio.ensure_future(scene())
        while stage.clock.now() < SCENE_S_MAX:
            for _turn in range(8):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            stage.clock.advance(stage.tick_s)
        raise AssertionError(f"the scene did not end within {SCENE_S_MAX:g} virtual seconds")

    return asyncio.run(run())


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """The right answer."""
    return expected_tokens(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), vocab_size=VOCAB)
