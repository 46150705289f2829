"""What holds a request at a point of its way: the selector chooses nobody, pools are full, planners plan nothing, reads
take for ever, the last tokens stay on the link.

Each is a real part with a gate in front of it, or a real state (leases that nobody releases, reads that do not end).
Knows nothing about which request is held, or why.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from cluster.assembly import WorkerIdentity
from cluster.local import LocalCluster
from core.clock import ManualClock
from core.config import ClusterConfig
from core.ids import Attempt, BlockDigest, BlockId, LeaseId, RequestId, RouterId, WeightIdentity, WorkerId
from core.link import Link, MemoryLink, MemoryNetwork
from core.messages import AnyMessage, Offer, Submit, Tokens
from core.request import AttemptKey, Request, SamplingParams
from decode.reception import Reception
from decode.worker import DecodeWorker
from engine.scheduler import Scheduler
from engine.standin import StandinRunner
from engine.step import StepPlan
from kvtransfer.puller import Puller, PullJob
from kvtransfer.session import PullSession
from kvtransfer.transport.base import Peer
from kvtransfer.transport.memory import MemoryFabric, MemoryTransport
from prefill.worker import PrefillWorker
from router.select import NOBODY_FAILED, Pair, RoundRobin, Topology
from tests.e2e.faults.freezing import FreezableClock, FreezableDoor, Freezer
from tests.e2e.stage import LETTERS, VOCAB

HOLD_S = 1e6
NO_DIGEST = BlockDigest(0)
FILLER = RequestId("filler")


class Gates:
    """What holds a request. Everything is open at first."""

    def __init__(self) -> None:
        self.selects = True
        self.num_steps: dict[str, float] = {"prefill": math.inf, "decode": math.inf}
        """Steps that the workers of a role may still plan."""
        self.finish = asyncio.Event()
        """The router hears of last tokens."""
        self.finish.set()
        self.num_finishes_held = 0


class GatedSelector(RoundRobin):
    """Chooses nobody while the gate is closed."""

    def __init__(self, gates: Gates) -> None:
        super().__init__()
        self._gates = gates

    def select(self, topology: Topology, failed: Mapping[WorkerId, int] = NOBODY_FAILED) -> Pair | None:
        return super().select(topology, failed) if self._gates.selects else None


class GatedLink:
    """A router's end of a link to a worker: last tokens wait at the gate, and are lost with the connection."""

    def __init__(self, link: MemoryLink, gates: Gates) -> None:
        self.inner = link
        self.peer = link.peer
        self._gates = gates

    @property
    def num_undelivered(self) -> int:
        return self.inner.num_undelivered

    def send(self, messages: list[AnyMessage]) -> None:
        self.inner.send(messages)

    async def receive(self) -> list[AnyMessage]:
        frame = await self.inner.receive()
        updates = [update for m in frame if isinstance(m, Tokens) for update in m.updates]
        if any(update.finish_reason is not None for update in updates) and not self._gates.finish.is_set():
            self._gates.num_finishes_held += 1
            await self._gates.finish.wait()
            if self.inner._closed_reason == "connection lost":
                return await self.inner.receive()
        return frame

    async def close(self, reason: str = "closed") -> None:
        await self.inner.close(reason)

    def check(self) -> None:
        self.inner.check()


class GatedNetwork(MemoryNetwork):
    """Every dialled link has the gate for last tokens."""

    def __init__(self, clock: ManualClock, gates: Gates) -> None:
        super().__init__(clock, seed=1, delay_s=(0.0, 0.003))
        self._gates = gates

    async def dial(self, endpoint: str, timeout_s: float, source: str = "") -> Link:
        link = await super().dial(endpoint, timeout_s, source)
        assert isinstance(link, MemoryLink)
        return GatedLink(link, self._gates)


class GatedCluster(LocalCluster):
    """Workers that can be frozen, with gated planners; each life of a worker has a freezer of its own."""

    def __init__(
        self, config: ClusterConfig, clock: ManualClock, network: GatedNetwork, gates: Gates, num_blocks: int
    ) -> None:
        self.freezers: dict[WorkerId, Freezer] = {}
        self.clocks: dict[WorkerId, FreezableClock] = {}
        self.stalled: set[WorkerId] = set()
        """Workers that live and compute nothing."""
        self.fabric = MemoryFabric(clock, seed=1)
        self._gates = gates

        def make_runner(_identity: WorkerIdentity) -> tuple[StandinRunner, memoryview]:
            runner = StandinRunner(num_blocks=num_blocks, block_size=4, vocab_size=VOCAB)
            return runner, runner.byte_view()

        super().__init__(
            config, LETTERS, make_runner, clock=clock, network=network, fabric=self.fabric, is_checked=True
        )

    def start_worker(self, identity: WorkerIdentity) -> None:
        freezer = self.freezers[identity.worker_id] = Freezer()
        clock, network = self._clock, self._network
        own = self.clocks[identity.worker_id] = FreezableClock(clock, freezer, self.offset_s(identity))
        self._clock, self._network = own, FreezableDoor(network, freezer)
        try:
            super().start_worker(identity)
        finally:
            self._clock, self._network = clock, network
        self._gate(identity, self.scheduler(identity.worker_id), freezer)

    def _gate(self, identity: WorkerIdentity, scheduler: Scheduler, freezer: Freezer) -> None:
        plan, role = scheduler.plan, identity.role

        def gated() -> StepPlan | None:
            if freezer.is_frozen or identity.worker_id in self.stalled or self._gates.num_steps[role] <= 0:
                return None
            planned = plan()
            self._gates.num_steps[role] -= planned is not None
            return planned

        scheduler.plan = gated  # type: ignore[method-assign]

    @staticmethod
    def offset_s(identity: WorkerIdentity) -> float:
        """By how much a worker's clock differs from the common one: no two processes can compare their times."""
        return 1000.0 * (len(identity.role) + int(identity.worker_id.rsplit("-", 1)[1])) + identity.epoch

    def start_incompatible(self, identity: WorkerIdentity) -> None:
        """Start a worker with the weights of another model."""
        self.models[identity.worker_id] = replace(self.model, weight_identity=WeightIdentity("other"))
        self.start_worker(identity)
        del self.models[identity.worker_id]

    def end_step(self, worker: WorkerId) -> None:
        """The step dies; the doorway goes on."""
        self._tasks[worker][0].cancel()

    def scheduler(self, worker: WorkerId) -> Scheduler:
        found = self.workers[worker]
        assert isinstance(found, DecodeWorker | PrefillWorker)
        return found._scheduler

    def prefill(self, worker: WorkerId) -> PrefillWorker:
        found = self.workers[worker]
        assert isinstance(found, PrefillWorker)
        return found

    def decode(self, worker: WorkerId) -> DecodeWorker:
        found = self.workers[worker]
        assert isinstance(found, DecodeWorker)
        return found

    def transport(self, worker: WorkerId) -> MemoryTransport:
        """Of a decode worker."""
        puller = self.decode(worker)._puller
        assert isinstance(puller, Puller) and isinstance(puller._transport, MemoryTransport)
        return puller._transport

    def of_role(self, role: str) -> list[WorkerId]:
        return [id_ for id_, worker in self.workers.items() if worker.role == role]


class Fills:
    """Pools without a free block, as leases that nobody releases and reads that do not end leave them. A pool may be
    full for several reasons at once.
    """

    def __init__(self, cluster: GatedCluster) -> None:
        self._cluster = cluster
        self._reasons: dict[WorkerId, set[str]] = {}
        self._free: dict[WorkerId, Callable[[], None]] = {}

    def fill(self, worker: WorkerId, reason: str) -> None:
        reasons = self._reasons.setdefault(worker, set())
        if not reasons:
            role = self._cluster.workers[worker].role
            self._free[worker] = self._lease_all(worker) if role == "prefill" else self._read_all(worker)
        reasons.add(reason)

    def free(self, reason: str) -> None:
        """The blocks come free where this was the last reason."""
        for worker, reasons in self._reasons.items():
            if reasons == {reason} and worker in self._cluster.workers:
                self._free[worker]()
            reasons.discard(reason)

    def _lease_all(self, worker: WorkerId) -> Callable[[], None]:
        owner = self._cluster.prefill(worker)
        blocks = owner._pool.allocate(owner._pool.num_available)
        assert blocks is not None
        leases = owner._leases
        lease_id: LeaseId = leases.grant(FILLER, Attempt(0), HOLD_S).lease_id
        assert leases.extend(lease_id, blocks)
        return lambda: owner._pool.release(leases.release(lease_id))

    def _read_all(self, worker: WorkerId) -> Callable[[], None]:
        owner, transport = self._cluster.decode(worker), self._cluster.transport(worker)
        blocks = owner._pool.allocate(owner._pool.num_available)
        assert blocks is not None
        reception = _given_up(blocks, next(iter(transport._peers)))
        owner._intake._abandoned[reception.key] = reception
        before = set(transport._reads)
        indexes, digests = list(range(len(blocks))), [NO_DIGEST] * len(blocks)
        sources = [BlockId(i) for i in indexes]
        peer = next(iter(transport._peers))
        job = PullJob(key=reception.key, peer=peer, indexes=indexes, sources=sources, targets=blocks, digests=digests)
        owner._puller.submit(job)
        owner._puller.abandon(reception.key)
        (read_id,) = set(transport._reads) - before
        transport._reads[read_id].due_s = math.inf

        def end() -> None:
            if read_id in transport._reads:
                transport._reads[read_id].due_s = 0.0

        return end


def _given_up(blocks: list[BlockId], peer: Peer) -> Reception:
    """A reception that was cancelled while all of its blocks were being read."""
    key, count = AttemptKey(request_id=FILLER, attempt=Attempt(0)), len(blocks)
    session = PullSession(key=key, peer=peer, first_block_index=0, num_blocks=count, credit_deadline_s=HOLD_S)
    session.bind(blocks)
    offer = Offer(
        request_id=key.request_id,
        attempt=key.attempt,
        worker=peer.worker,
        epoch=peer.epoch,
        lease_id=LeaseId(1),
        lease_ttl_s=1.0,
        first_block_index=0,
        block_ids=tuple(blocks),
        digests=(NO_DIGEST,) * count,
        is_final=True,
    )
    session.on_offer(offer, 0.0)
    session.cancel()
    request = Request(request_id=FILLER, token_ids=(0,), sampling=SamplingParams(max_tokens=1))
    submit = Submit(request_id=FILLER, attempt=Attempt(0), request=request, prefill_worker=peer.worker)
    return Reception(
        submit=submit,
        router=RouterId("nobody"),
        keys=[],
        block_indexes=[],
        hashes=[],
        received_s=0.0,
        deadline_s=HOLD_S,
        session=session,
        targets=blocks,
    )
