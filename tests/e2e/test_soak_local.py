"""Thirty minutes of the faults that only seams can make: lost links, lost, late, stale and corrupt reads, dead workers.

SmolLM2 in `exact` on 2P2D in one process, real time, sixteen streams. Every answer equals the undisturbed one or ends
with a stated error, and nothing is held at the end. PDCLUSTER_SOAK_MINUTES and PDCLUSTER_SOAK_SEED as in `test_soak`.
"""

import asyncio
import os
import random
import resource
from collections import Counter

import pytest

from cluster.assembly import WorkerIdentity
from core.errors import PdclusterError
from core.ids import Epoch, WorkerId
from core.request import SamplingParams
from engine.runner import TorchRunner
from kvtransfer.transport.memory import MemoryFaults
from router.generation import ChildDelta, PreparedRequest
from tests.e2e.soak_clients import STATED_STATUSES, Question, make_questions
from tests.e2e.test_tokens import Served

pytestmark = [pytest.mark.torch, pytest.mark.slow]

MINUTES = float(os.environ.get("PDCLUSTER_SOAK_MINUTES", "30"))
SEED = int(os.environ.get("PDCLUSTER_SOAK_SEED", "1"))
NUM_STREAMS = 16
LEASE_S = 5.0
SETTINGS = (
    "prefill.workers=2",
    "decode.workers=2",
    "numerics=exact",
    "kv.device_blocks=160",
    f"transfer.lease_s={LEASE_S}",
    "transfer.credit_s=20",
    "prefill.max_batched_tokens=128",
)
GROWTH_KIB = 100 << 10
"""Of the peak resident memory between the first third of the soak and its end."""


class Storm:
    """One cluster, its undisturbed answers, and what goes wrong."""

    def __init__(self) -> None:
        self.rng = random.Random(SEED)
        self.served = Served(SETTINGS)
        self.served.cluster._make_runner = self._runner
        self._runners: dict[WorkerId, tuple[TorchRunner, memoryview]] = {}
        self._epochs: Counter[str] = Counter()
        self.answers: dict[Question, list[list[int]]] = {}
        self.endings: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.faults: Counter[str] = Counter()
        self.is_over = asyncio.Event()

    def _runner(self, identity: WorkerIdentity) -> tuple[TorchRunner, memoryview]:
        """A worker that starts again gets its old runner, emptied: packing the weights takes seconds."""
        if identity.worker_id not in self._runners:
            self._runners[identity.worker_id] = self.served._runner(identity)
        runner, view = self._runners[identity.worker_id]
        runner.cache.tensor.zero_()
        return runner, view

    async def ask(self, question: Question) -> tuple[list[list[int]], PdclusterError | None]:
        sampling = SamplingParams(
            max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed, ignore_eos=True
        )
        prepared = PreparedRequest(
            token_ids=question.token_ids, sampling=sampling, num_children=question.num_choices, stop=()
        )
        tokens: list[list[int]] = [[] for _ in range(question.num_choices)]
        events = self.served.service.generate(prepared)
        try:
            async for event in events:
                if isinstance(event, ChildDelta):
                    tokens[event.child] += event.token_ids
        except PdclusterError as error:
            return tokens, error
        finally:
            await events.aclose()
        return tokens, None

    async def stream(self, index: int) -> None:
        rng = random.Random(SEED * 1000 + index)
        while not self.is_over.is_set():
            question = rng.choice(list(self.answers))
            asking = asyncio.ensure_future(self.ask(question))
            if rng.random() < 0.25:
                await asyncio.wait({asking}, timeout=rng.uniform(0, 6))
                asking.cancel()
            try:
                self._judge(question, *await asking)
            except asyncio.CancelledError:
                self.endings["left"] += 1

    def _judge(self, question: Question, tokens: list[list[int]], error: PdclusterError | None) -> None:
        expected = self.answers[question]
        is_right = all(got == whole[: len(got)] for got, whole in zip(tokens, expected, strict=True))
        if error is None:
            is_right = tokens == expected
        elif error.http_status not in STATED_STATUSES:
            is_right = False
        self.endings["done" if error is None else f"{type(error).__name__}"] += 1
        if not is_right:
            self.wrong.append(f"{question}: {tokens} instead of {expected}, {error!r}")

    async def rage(self) -> None:
        while not self.is_over.is_set():
            await asyncio.sleep(self.rng.expovariate(1 / 4.0))
            fault = self.rng.choice([self._lose_link, self._spoil_reads, self._heal_reads, self._restart])
            self.faults[fault.__name__] += 1
            await fault()

    async def _lose_link(self) -> None:
        links = self.served.network.links[-12:]
        if links:
            self.rng.choice(links).lose()

    async def _spoil_reads(self) -> None:
        rng = self.rng
        self.served.fabric.faults = MemoryFaults(
            delay_s=(0.0, rng.choice([0.0, 0.1, 1.0])),
            loss_rate=rng.choice([0.0, 0.2]),
            corruption_rate=rng.choice([0.0, 0.2]),
            stale_rate=rng.choice([0.0, 0.2]),
            late_write_rate=rng.choice([0.0, 0.5]),
        )

    async def _heal_reads(self) -> None:
        self.served.fabric.faults = MemoryFaults()

    async def _restart(self) -> None:
        cluster = self.served.cluster
        worker_id = self.rng.choice(sorted(cluster.workers))
        role = cluster.workers[worker_id].role
        await cluster.kill_worker(worker_id)
        await asyncio.sleep(self.rng.choice([0.0, 0.5, 3.0]))
        self._epochs[worker_id] += 1
        epoch = Epoch(1 + self._epochs[worker_id])
        cluster.start_worker(WorkerIdentity(worker_id=worker_id, role=role, epoch=epoch))
        self.served.service.update_workers(cluster.worker_set())

    def assert_nothing_held(self) -> None:
        for worker in self.served.cluster.workers.values():
            worker.check()
            status = worker.status()
            held = (status.num_waiting, status.num_running, status.num_leases, status.num_pins, status.kv.blocks_used)
            assert held == (0, 0, 0, 0, 0), status
        admission = self.served.service.admission
        assert (admission.num_in_flight, admission.num_queued_prompt_tokens) == (0, 0)


def test_nothing_is_wrong_or_held_after_faults_of_links_and_reads() -> None:
    print(f"seed {SEED}, {MINUTES} minutes")
    storm = Storm()
    questions = make_questions(storm.rng, 16, 400)

    async def scene() -> None:
        for question in questions:
            storm.answers[question], error = await storm.ask(question)
            assert error is None, error
        streams = [asyncio.ensure_future(storm.stream(i)) for i in range(NUM_STREAMS)]
        raging = asyncio.ensure_future(storm.rage())
        await asyncio.sleep(MINUTES * 20)
        early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await asyncio.sleep(MINUTES * 40)
        storm.is_over.set()
        await asyncio.gather(raging, *streams)
        late = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        storm.served.fabric.faults = MemoryFaults()
        await asyncio.sleep(LEASE_S + 1.0)
        print(f"faults {dict(storm.faults)}, endings {dict(storm.endings)}, peak {early >> 10} then {late >> 10} MiB")
        assert not storm.wrong, storm.wrong[:3]
        assert storm.endings["done"] > 0
        storm.assert_nothing_held()
        for question in questions:
            assert await storm.ask(question) == (storm.answers[question], None)
        assert late <= early + GROWTH_KIB

    asyncio.run(storm.served.play(scene))
