"""Everything at once: two routers, small pools, shared prefixes, workers that die, routers that are replaced, links and
reads that fail, clients that hang up. Whatever happens, every answer is right or an error, and nothing stays behind.
"""

import asyncio
import random
from dataclasses import dataclass, field, replace

import pytest

from cluster.assembly import WorkerIdentity
from cluster.local import LocalCluster
from core.clock import ManualClock
from core.config import parse_config
from core.errors import DeadlineExceededError, InvalidRequestError, PdclusterError, StalledError
from core.ids import Epoch, RouterId
from core.layout import FULL_ATTENTION, Windows
from core.link import MemoryNetwork
from core.request import SamplingParams
from engine.standin import StandinRunner, expected_tokens, standin_layout
from kvtransfer.transport.memory import MemoryFabric, MemoryFaults
from router.generation import ChildDelta, PreparedRequest
from router.service import RouterService
from tests.e2e.stage import LETTERS, VOCAB, LetterCodec

BLOCK = 4
LEASE_S = 3.0
STORM_S = 4.0
REQUEST_TIMEOUT_S = 120.0
TICK_S = 0.01


@dataclass(kw_only=True)
class Answer:
    """What became of one request."""

    expected: list[list[int]]
    got: list[list[int]]
    error: BaseException | None = None
    is_done: bool = False


@dataclass(kw_only=True)
class Chaos:
    """One cluster and what happens to it, all drawn from `seed`."""

    seed: int
    windows: Windows = FULL_ATTENTION
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.num_turns = rng.choice([1, 1, 2, 6])
        self.is_colocated = rng.random() < 0.15
        self.max_blocks = {"prefill": rng.randrange(16, 40), "decode": rng.randrange(14, 40)}
        """Of one sequence, in every group of layers."""
        overrides = [
            f"mode={'colocated' if self.is_colocated else 'disaggregated'}",
            *([] if self.is_colocated else [f"prefill.workers={rng.randrange(1, 3)}"]),
            f"prefill.max_batched_tokens={rng.choice([4, 8, 64])}",
            f"decode.workers={rng.randrange(1, 3)}",
            f"decode.max_running={rng.choice([1, 3, 8])}",
            f"decode.max_batched_tokens={rng.choice([8, 64])}",
            f"transfer.lease_s={LEASE_S}",
            f"transfer.credit_s={LEASE_S}",
        ]
        lines = ["schema_version: 1", "name: chaos", "model: {path: standin}", "kv: {block_size: 4, device_blocks: 99}"]
        self.config = parse_config("\n".join(lines), file="chaos.yaml", overrides=overrides)
        self.clock = ManualClock()
        self.network = MemoryNetwork(self.clock, seed=self.seed, delay_s=(0.0, rng.choice([0.0, 0.003, 0.05])))
        self.fabric = MemoryFabric(self.clock, seed=self.seed)
        self.cluster = LocalCluster(
            self.config,
            replace(LETTERS, layout=standin_layout(BLOCK, self.windows)),
            self._runner,
            clock=self.clock,
            network=self.network,
            fabric=self.fabric,
            is_checked=True,
        )
        self.epochs: dict[str, int] = {}
        self.routers = [self._router(RouterId(f"router-{i}")) for i in range(2)]
        self.gone: list[RouterService] = []

    def _runner(self, identity: WorkerIdentity) -> tuple[StandinRunner, memoryview]:
        num_blocks = self.max_blocks[identity.role] * len(self.windows)
        runner = StandinRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, windows=self.windows)
        return runner, runner.byte_view()

    def _next_epoch(self, name: str) -> Epoch:
        self.epochs[name] = self.epochs.get(name, 0) + 1
        return Epoch(self.epochs[name])

    def _router(self, router_id: RouterId) -> RouterService:
        return RouterService(
            router_id=router_id,
            epoch=self._next_epoch(router_id),
            clock=self.clock,
            dialer=self.network,
            text=LetterCodec(),
            model_name="standin",
            mode=self.config.mode,
            request_timeout_s=REQUEST_TIMEOUT_S,
            check_s=0.0,
        )

    # ---- requests --------------------------------------------------------------------------------------------------

    def _prompt(self) -> list[int]:
        rng = self.rng
        shared = random.Random(rng.randrange(3))
        prefix = [shared.randrange(VOCAB) for _ in range(30)][: rng.choice([0, 4, 8, 15, 30])]
        return (prefix + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))])[: self._longest() - 2]

    def _longest(self) -> int:
        return min(self.max_blocks.values()) * BLOCK

    async def ask(self, patience_s: float | None = None) -> Answer:
        """One random request; with `patience_s` the client hangs up by then."""
        rng, prompt = self.rng, self._prompt()
        sampling = SamplingParams(
            max_tokens=min(rng.choice([1, 2, 9, 30]), self._longest() - len(prompt)),
            temperature=float(rng.randrange(2)),
            seed=rng.randrange(1000),
            stop_token_ids=(rng.randrange(VOCAB),),
        )
        num_children = rng.choice([1, 1, 1, 2, 4])
        children = range(num_children)
        answer = Answer(
            expected=[
                expected_tokens(prompt, sampling, vocab_size=VOCAB, child=child, windows=self.windows)
                for child in children
            ],
            got=[[] for _ in children],
        )
        self.answers.append(answer)
        prepared = PreparedRequest(token_ids=tuple(prompt), sampling=sampling, num_children=num_children, stop=())
        reading = asyncio.ensure_future(self._read(rng.choice(self.routers), prepared, answer))
        if patience_s is not None:
            await self.clock.sleep(patience_s)
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return answer

    async def _read(self, router: RouterService, prepared: PreparedRequest, answer: Answer) -> None:
        events = router.generate(prepared)
        try:
            async for event in events:
                if isinstance(event, ChildDelta):
                    answer.got[event.child] += event.token_ids
            answer.is_done = True
        except BaseException as error:
            answer.error = error
            raise
        finally:
            await events.aclose()

    # ---- what goes wrong -------------------------------------------------------------------------------------------

    async def _mishap(self) -> None:
        await self.clock.sleep(self.rng.uniform(0, STORM_S))
        mishaps = [self._lose_link, self._lose_link, self._restart_worker, self._spoil_reads, self._replace_router]
        await self.rng.choice(mishaps)()

    async def _lose_link(self) -> None:
        if self.network.links:
            self.rng.choice(self.network.links[-12:]).lose()

    async def _restart_worker(self) -> None:
        workers = sorted(self.cluster.workers)
        if not workers:
            return
        worker = self.rng.choice(workers)
        role = self.cluster.workers[worker].role
        await self.cluster.kill_worker(worker)
        await self.clock.sleep(self.rng.choice([0.0, 0.1, 2.0]))
        identity = WorkerIdentity(worker_id=worker, role=role, epoch=self._next_epoch(worker))
        self.cluster.start_worker(identity)
        for router in self.rng.sample(self.routers, 2):
            await self.clock.sleep(self.rng.choice([0.0, 0.0, 0.3]))
            router.update_workers(self.cluster.worker_set())

    async def _spoil_reads(self) -> None:
        rng = self.rng
        self.fabric.faults = MemoryFaults(
            delay_s=(0.0, rng.choice([0.0, 0.1, 1.0])),
            loss_rate=rng.choice([0.0, 0.2]),
            corruption_rate=rng.choice([0.0, 0.2]),
            stale_rate=rng.choice([0.0, 0.2]),
            late_write_rate=rng.choice([0.0, 0.5]),
        )

    async def _replace_router(self) -> None:
        """A newer process of the same name, while the older still lives."""
        index = self.rng.randrange(2)
        older = self.routers[index]
        self.routers[index] = self._router(older.router_id)
        await self.routers[index].start()
        self.routers[index].update_workers(self.cluster.worker_set())
        await self.clock.sleep(self.rng.choice([0.0, 1.0]))
        await older.close()
        self.gone.append(older)

    # ---- the course ------------------------------------------------------------------------------------------------

    async def course(self) -> None:
        """Storm, calm, and a look at what is left."""
        rng = self.rng
        workers = self.cluster.start()
        self.epochs |= {address.worker: address.epoch for address in workers.workers}
        for router in self.routers:
            await router.start()
            router.update_workers(workers)
        try:
            await self._storm(rng.choice([5, 20, 50]), rng.randrange(0, 10))
            await self._calm()
            await self._look()
        finally:
            for router in (*self.routers, *self.gone):
                await router.close()
            await self.cluster.close()

    async def _storm(self, num_requests: int, num_mishaps: int) -> None:
        async def later() -> None:
            await self.clock.sleep(self.rng.uniform(0, STORM_S))
            await self.ask(self.rng.uniform(0, 2.0) if self.rng.random() < 0.25 else None)

        mishaps = [self._mishap() for _ in range(num_mishaps)]
        await asyncio.gather(*(later() for _ in range(num_requests)), *mishaps)

    async def _calm(self) -> None:
        self.fabric.faults = MemoryFaults()
        for router in self.routers:
            router.update_workers(self.cluster.worker_set())
        await self.clock.sleep(LEASE_S + 1.0)

    async def _look(self) -> None:
        self._assert_nothing_held()
        for answer in self.answers:
            self._judge(answer)
        for router in self.routers:
            for _ in range(100):
                await self.clock.sleep(0.0 if router.is_ready() else 0.1)
            assert router.is_ready()
        for _ in range(4):
            answer = await self.ask()
            assert answer.is_done, answer.error
            self._judge(answer)

    def _judge(self, answer: Answer) -> None:
        if answer.is_done:
            assert answer.got == answer.expected
            return
        for got, expected in zip(answer.got, answer.expected, strict=True):
            assert got == expected[: len(got)]
        assert isinstance(answer.error, PdclusterError | asyncio.CancelledError), answer.error
        is_confused = type(answer.error) is PdclusterError or isinstance(answer.error, InvalidRequestError)
        assert not is_confused, f"a worker or the router lost track: {answer.error}"
        is_late = isinstance(answer.error, DeadlineExceededError | StalledError)
        assert not is_late, f"somebody waited in vain: {answer.error}"

    def _assert_nothing_held(self) -> None:
        for worker in self.cluster.workers.values():
            worker.check()
            status = worker.status()
            held = (status.num_waiting, status.num_running, status.num_leases, status.num_pins, status.kv.blocks_used)
            assert held == (0, 0, 0, 0, 0), status
            assert not any(worker.books().values()), worker.books()
        for router in (*self.routers, *self.gone):
            router.check()
            assert not any(router.books().values()), router.books()


def play_chaos(seed: int, windows: Windows = FULL_ATTENTION) -> Chaos:
    """Run one course. The fewer turns of the loop between two moments of the clock, the longer everything takes."""
    chaos = Chaos(seed=seed, windows=windows)

    async def run() -> None:
        task = asyncio.ensure_future(chaos.course())
        while True:
            for _ in range(chaos.num_turns):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            assert chaos.clock.now() < 3 * REQUEST_TIMEOUT_S, "the course does not end"
            chaos.clock.advance(TICK_S)

    asyncio.run(run())
    return chaos


@pytest.mark.parametrize("seed", [3, 10, 34, 54, 55, 65, 100, 101])
def test_answers_are_right_or_errors_and_nothing_stays_when_everything_goes_wrong(seed: int) -> None:
    """RQ-1, TX-1, TX-2, KV-1, KV-4."""
    play_chaos(seed)


@pytest.mark.parametrize("seed", [1, 2, 4])
@pytest.mark.parametrize("windows", [(None, 6), (5,)])
def test_the_same_holds_when_layers_look_back_a_window_only(seed: int, windows: Windows) -> None:
    """KV-3, TX-3 on top: blocks that the windows have passed are given back while their sequence runs."""
    play_chaos(seed, windows)
