"""Router, links and workers together in one process on the manual clock, topology by topology."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.assembly import WorkerIdentity
from cluster.local import LocalCluster
from core.clock import ManualClock
from core.config import ClusterConfig, parse_config
from core.errors import PdclusterError, WorkerLostError
from core.ids import Epoch, RouterId, WorkerId
from core.link import MemoryNetwork
from core.request import SamplingParams
from engine.standin import StandinRunner, expected_tokens
from kvtransfer.transport.memory import MemoryFabric
from router.generation import ChildDelta, PreparedRequest, Summary
from router.service import RouterService
from tests.e2e.stage import LETTERS, VOCAB, LetterCodec, play


def _config(*overrides: str) -> ClusterConfig:
    lines = ["schema_version: 1", "name: test", "model: {path: standin}", "kv: {block_size: 4, device_blocks: 96}"]
    return parse_config("\n".join(lines), file="test.yaml", overrides=overrides)


class Stage:
    """A cluster on stage: `ask` sends a request, `cluster` and `network` take faults."""

    def __init__(self, *overrides: str, seed: int = 0, delay_s: tuple[float, float] = (0.0, 0.003)) -> None:
        self.config = _config(*overrides)
        self.clock = ManualClock()
        self.network = MemoryNetwork(self.clock, seed=seed, delay_s=delay_s)
        self.fabric = MemoryFabric(self.clock, seed=seed)
        self.runners: dict[WorkerId, StandinRunner] = {}
        self.cluster = LocalCluster(
            self.config,
            LETTERS,
            self._runner,
            clock=self.clock,
            network=self.network,
            fabric=self.fabric,
            is_checked=True,
        )
        self.service = RouterService(
            router_id=RouterId("router-0"),
            epoch=Epoch(1),
            clock=self.clock,
            dialer=self.network,
            text=LetterCodec(),
            model_name="standin",
            mode=self.config.mode,
            check_s=0.0,
        )

    def _runner(self, identity: WorkerIdentity) -> tuple[StandinRunner, memoryview]:
        runner = StandinRunner(num_blocks=96, block_size=4, vocab_size=VOCAB)
        self.runners[identity.worker_id] = runner
        return runner, runner.byte_view()

    async def open(self) -> None:
        await self.service.start()
        self.service.update_workers(self.cluster.start())
        while not self.service.is_ready():
            await self.clock.sleep(0.01)

    async def close(self) -> None:
        await self.service.close()
        await self.cluster.close()

    async def settle(self, seconds: float = 1.0) -> None:
        await self.clock.sleep(seconds)

    async def ask(self, prompt: list[int], *, num_children: int = 1, **sampling: Any) -> list[list[int]]:
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling})
        prepared = PreparedRequest(token_ids=tuple(prompt), sampling=params, num_children=num_children, stop=())
        outputs: list[list[int]] = [[] for _ in range(num_children)]
        async for event in self.service.generate(prepared):
            if isinstance(event, ChildDelta):
                outputs[event.child] += event.token_ids
            else:
                assert isinstance(event, Summary)
        return outputs

    def assert_nothing_held(self) -> None:
        for worker in self.cluster.workers.values():
            status = worker.status()
            assert (status.kv.blocks_used, status.num_leases, status.num_pins) == (0, 0, 0), status
            assert not any(worker.books().values()), worker.books()
        self.service.check()
        assert not any(self.service.books().values()), self.service.books()


def stage_and_play(stage: Stage, scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await stage.open()
        try:
            await scene()
        finally:
            await stage.close()

    play(whole, stage.clock)


def _prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def _expected(prompt: list[int], child: int = 0, **sampling: Any) -> list[int]:
    params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling})
    return expected_tokens(prompt, params, vocab_size=VOCAB, child=child)


TOPOLOGIES = {
    "1P1D": ("prefill.workers=1", "decode.workers=1"),
    "2P2D": ("prefill.workers=2", "decode.workers=2"),
    "3P1D": ("prefill.workers=3", "decode.workers=1"),
    "colocated": ("mode=colocated", "decode.workers=2"),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("chunk", ["16", "512"])
def test_every_topology_gives_the_same_tokens_when_requests_come_at_once(topology: str, chunk: str) -> None:
    stage = Stage(*TOPOLOGIES[topology], f"prefill.max_batched_tokens={chunk}")
    prompts = _prompts(12)

    async def scene() -> None:
        answers = await asyncio.gather(*(stage.ask(p) for p in prompts))
        assert [a[0] for a in answers] == [_expected(p) for p in prompts]
        again = await asyncio.gather(*(stage.ask(p, num_children=2, temperature=1.0, seed=3) for p in prompts[:4]))
        for prompt, answer in zip(prompts, again, strict=False):
            assert answer == [_expected(prompt, child, temperature=1.0, seed=3) for child in range(2)]
        await stage.settle()
        stage.assert_nothing_held()

    stage_and_play(stage, scene)


def test_bytes_really_move_between_workers_when_disaggregated() -> None:
    stage = Stage()
    prompt = _prompts(1, longest=61)[0] + list(range(40))

    async def scene() -> None:
        await stage.ask(prompt)
        decode, prefill = stage.cluster.workers[WorkerId("decode-0")], stage.cluster.workers[WorkerId("prefill-0")]
        demanded = (len(prompt) - 1) // 4
        assert decode.status().counters['pdcluster_pulled_bytes_total{source="peer"}'] == demanded * 32 > 0
        assert prefill.status().counters["pdcluster_prefill_computed_tokens_total"] == demanded * 4

    stage_and_play(stage, scene)


def test_request_is_served_by_another_pair_when_its_prefill_worker_dies_before_the_first_token() -> None:
    stage = Stage("prefill.workers=2", "prefill.max_batched_tokens=4", "transfer.lease_s=5.0")
    prompt = _prompts(1, seed=4)[0] * 2 + list(range(40))

    async def scene() -> None:
        asking = asyncio.ensure_future(stage.ask(prompt))
        while not any(r.num_steps > 1 for w, r in stage.runners.items() if w.startswith("prefill")):
            await stage.clock.sleep(0.001)
        victim = next(w for w, r in stage.runners.items() if w.startswith("prefill") and r.num_steps)
        await stage.cluster.kill_worker(victim)
        assert (await asking)[0] == _expected(prompt)
        await stage.settle(6.0)
        stage.assert_nothing_held()

    stage_and_play(stage, scene)


def test_request_ends_with_an_error_and_nothing_is_held_when_its_decode_worker_dies_after_tokens() -> None:
    stage = Stage("decode.workers=2")

    async def scene() -> None:
        asking = asyncio.ensure_future(stage.ask(list(range(30)), max_tokens=150))
        while not any(r.num_steps > 3 for w, r in stage.runners.items() if w.startswith("decode")):
            await stage.clock.sleep(0.001)
        victim = next(w for w, r in stage.runners.items() if w.startswith("decode") and r.num_steps)
        await stage.cluster.kill_worker(victim)
        with pytest.raises(WorkerLostError):
            await asking
        await stage.settle(2.0)
        stage.assert_nothing_held()
        stage.service.update_workers(stage.cluster.worker_set())
        assert (await stage.ask(list(range(30))))[0] == _expected(list(range(30)))

    stage_and_play(stage, scene)


def test_restarted_worker_serves_again_when_it_has_a_new_epoch() -> None:
    stage = Stage()

    async def scene() -> None:
        await stage.ask(list(range(30)))
        await stage.cluster.kill_worker(WorkerId("prefill-0"))
        identity = WorkerIdentity(worker_id=WorkerId("prefill-0"), role="prefill", epoch=Epoch(2))
        stage.cluster.start_worker(identity)
        stage.service.update_workers(stage.cluster.worker_set())
        await stage.settle(2.0)
        while not stage.service.is_ready():
            await stage.clock.sleep(0.01)
        prompt = list(range(50, 90))
        assert (await stage.ask(prompt))[0] == _expected(prompt)
        assert stage.runners[WorkerId("prefill-0")].num_computed_tokens == 36

    stage_and_play(stage, scene)


@pytest.mark.parametrize("seed", range(4))
def test_hang_ups_at_random_moments_leave_nothing_behind(seed: int) -> None:
    stage = Stage("prefill.max_batched_tokens=8", seed=seed)
    rng = random.Random(seed)

    async def impatient(prompt: list[int]) -> None:
        asking = asyncio.ensure_future(stage.ask(prompt, max_tokens=40))
        await stage.clock.sleep(rng.random() * 0.3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def scene() -> None:
        await asyncio.gather(*(impatient(p) for p in _prompts(20, seed)))
        await stage.settle(2.0)
        stage.assert_nothing_held()
        assert (await stage.ask([1, 2, 3]))[0] == _expected([1, 2, 3])

    stage_and_play(stage, scene)


def test_request_is_refused_when_no_worker_lives() -> None:
    stage = Stage()

    async def scene() -> None:
        await stage.cluster.kill_worker(WorkerId("decode-0"))
        await stage.settle(0.5)
        with pytest.raises(PdclusterError) as caught:
            await stage.ask([1, 2, 3])
        assert caught.value.http_status == 503
        assert not stage.service.is_ready()

    stage_and_play(stage, scene)
