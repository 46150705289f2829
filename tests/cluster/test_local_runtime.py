"""The real controller, routers and workers in one process on the manual clock: bring-up, restarts, loss of the
controller.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cluster.assembly import WorkerIdentity
from cluster.controller import Controller, RecordFile
from cluster.local import LocalCluster
from cluster.local_runtime import LocalRuntime
from cluster.reconcile import START_FAILURES_MAX, StartRouter, StartWorker, Target
from cluster.runtime import Observed, RouterSpec, Runtime, WorkerSpec
from core.clock import ManualClock
from core.config import load_config
from core.errors import ClusterError, ModelLoadError
from core.ids import Epoch, RouterId, WorkerId
from core.link import MemoryNetwork
from core.request import SamplingParams
from engine.standin import StandinRunner, expected_tokens
from kvtransfer.tiers.files import OsFiles
from kvtransfer.transport.memory import MemoryFabric
from router.generation import ChildDelta, PreparedRequest
from router.service import RouterService
from tests.e2e.stage import LETTERS, VOCAB, LetterCodec, play

YAML = """
schema_version: 1
name: test
model: {path: standin}
kv: {block_size: 4, device_blocks: 96}
prefill: {workers: 2}
decode: {workers: 2}
transfer: {transport: memory}
"""
ROUTER = RouterId("router-0")
READY_TIMEOUT_S = 20.0
PROMPT = list(range(40))


class Stage:
    """A cluster under a controller, faults at hand."""

    def __init__(self, directory: Path) -> None:
        (directory / "test.yaml").write_text(YAML)
        self.record = RecordFile(OsFiles(directory), directory / "controller.json", "test")
        self.clock = ManualClock()
        self.network = MemoryNetwork(self.clock, seed=1, delay_s=(0.0, 0.003))
        self.target = Target(config=load_config(directory / "test.yaml"), model_path=directory)
        self.made: list[tuple[WorkerId, Epoch]] = []
        """Every runner ever made, by whom it is for."""
        self.build_problem: dict[WorkerId, str] = {}
        self.cluster = LocalCluster(
            self.target.config,
            LETTERS,
            self._runner,
            clock=self.clock,
            network=self.network,
            fabric=MemoryFabric(self.clock, seed=1),
            is_checked=True,
        )
        self.runtime = LocalRuntime(self.cluster, clock=self.clock, network=self.network, text=LetterCodec())
        self.seam: Runtime = self.runtime
        """What the controller acts through."""

    def _runner(self, identity: WorkerIdentity) -> tuple[StandinRunner, memoryview]:
        self.made.append((identity.worker_id, identity.epoch))
        if identity.worker_id in self.build_problem:
            problem = self.build_problem[identity.worker_id]
            raise ModelLoadError(path="standin", file="weights", field="all", problem=problem)
        runner = StandinRunner(num_blocks=96, block_size=4, vocab_size=VOCAB)
        return runner, runner.byte_view()

    def start_controller(self) -> asyncio.Task[None]:
        """A controller that knows no more than the record, looping until cancelled."""
        self.controller = Controller(
            target=self.target, runtime=self.seam, clock=self.clock, dialer=self.network, record=self.record
        )
        return asyncio.create_task(self.controller.run())

    def play(self, scene: Callable[[], Awaitable[None]]) -> None:
        """Run a scene with a controller from the start and everything ended after it."""

        async def whole() -> None:
            self.loop = self.start_controller()
            try:
                await scene()
            finally:
                self.loop.cancel()
                await asyncio.gather(self.loop, return_exceptions=True)
                await self.controller.shutdown()
                running = await self.runtime.observe()
                await self.runtime.close()
            assert running == []

        play(whole, self.clock)

    @property
    def router(self) -> RouterService:
        return self.runtime.routers[ROUTER]

    async def until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline_s = self.clock.now() + READY_TIMEOUT_S
        while not is_so():
            assert self.clock.now() < deadline_s, f"not {what}: {self.controller.status()}"
            await self.clock.sleep(0.05)

    async def until_ready(self) -> None:
        """The controller finds every member ready, and so does the router's own view with all four pairs."""
        await self.until(lambda: self.controller.status()["state"] == "ready", "ready")
        await self.until(lambda: ROUTER in self.runtime.routers and self.router.num_pairs() == 4, "four pairs")

    async def ask(self, prompt: list[int], max_tokens: int = 6) -> list[int]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        prepared = PreparedRequest(token_ids=tuple(prompt), sampling=sampling, num_children=1, stop=())
        return [
            token
            async for event in self.router.generate(prepared)
            if isinstance(event, ChildDelta)
            for token in event.token_ids
        ]


def _expected(prompt: list[int], max_tokens: int = 6) -> list[int]:
    return expected_tokens(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), vocab_size=VOCAB)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


FIRST = [(WorkerId(name), Epoch(1)) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]


def test_cluster_answers_when_the_controller_brought_it_up_from_its_yaml(stage: Stage) -> None:
    def heard() -> object:
        (router,) = stage.controller.status()["routers"]
        return router["status"] and router["status"]["num_workers_ready"]

    async def scene() -> None:
        await stage.until_ready()
        assert stage.router.is_ready()
        prompts = [list(range(start, start + 35)) for start in range(8)]
        answers = await asyncio.gather(*(stage.ask(prompt) for prompt in prompts))
        assert answers == [_expected(prompt) for prompt in prompts]
        assert stage.made == FIRST
        await stage.until(lambda: heard() == {"prefill": 2, "decode": 2}, "told of its workers by the router")

    stage.play(scene)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_serves_again_in_the_next_epoch_when_it_was_killed(stage: Stage, role: str) -> None:
    victim, other = WorkerId(f"{role}-0"), WorkerId(f"{role}-1")

    async def scene() -> None:
        await stage.until_ready()
        await stage.cluster.kill_worker(victim)
        assert await stage.ask(PROMPT) == _expected(PROMPT)
        await stage.until(lambda: stage.controller.status()["state"] != "ready", "seen")
        await stage.until_ready()
        assert stage.made == [*FIRST, (victim, Epoch(2))]
        await stage.cluster.kill_worker(other)
        prompt = list(range(50, 90))
        assert await stage.ask(prompt) == _expected(prompt)
        counter = {
            "prefill": "pdcluster_prefill_computed_tokens_total",
            "decode": "pdcluster_decode_prompt_tokens_computed_total",
        }[role]
        assert stage.cluster.workers[victim].status().counters[counter] > 0

    stage.play(scene)


def test_request_in_flight_goes_on_when_the_controller_is_lost_and_a_new_one_adopts_what_runs(stage: Stage) -> None:
    """CL-2. The old controller's links stay, as those of one that hangs: the routers leave it for the newer one."""

    async def scene() -> None:
        await stage.until_ready()
        workers, router = dict(stage.cluster.workers), stage.router
        asking = [asyncio.ensure_future(stage.ask([*PROMPT, number], max_tokens=150)) for number in range(6)]
        await stage.until(lambda: router.admission.num_in_flight == 6, "in flight")
        stage.loop.cancel()
        assert await stage.ask(PROMPT) == _expected(PROMPT)
        stage.loop = stage.start_controller()
        await stage.until_ready()
        answers = await asyncio.gather(*asking)
        assert answers == [_expected([*PROMPT, number], max_tokens=150) for number in range(6)]
        assert stage.cluster.workers == workers and stage.router is router and stage.made == FIRST
        assert stage.controller.status()["controller"]["epoch"] == 2
        await stage.cluster.kill_worker(WorkerId("decode-1"))
        await stage.until(lambda: stage.controller.status()["state"] != "ready", "seen")
        await stage.until_ready()
        assert stage.made == [*FIRST, (WorkerId("decode-1"), Epoch(2))]
        for _ in range(60):  # the old controller dials again and again, with workers of long ago
            await stage.clock.sleep(0.05)
            assert stage.router.num_pairs() == 4

    stage.play(scene)


class Twice:
    """A runtime whose every action happens twice."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def start_worker(self, spec: WorkerSpec) -> None:
        for _ in range(2):
            await self._runtime.start_worker(spec)

    async def start_router(self, spec: RouterSpec) -> None:
        for _ in range(2):
            await self._runtime.start_router(spec)

    async def observe(self) -> list[Observed]:
        return await self._runtime.observe()

    async def stop(self, member_id: WorkerId | RouterId, epoch: Epoch) -> None:
        for _ in range(2):
            await self._runtime.stop(member_id, epoch)


def test_cluster_is_the_same_when_every_action_is_done_twice(stage: Stage) -> None:
    """CL-1."""
    stage.seam = Twice(stage.runtime)

    async def scene() -> None:
        await stage.until_ready()
        await stage.cluster.kill_worker(WorkerId("decode-0"))
        await stage.until(lambda: stage.controller.status()["state"] != "ready", "seen")
        await stage.until_ready()
        assert stage.made == [*FIRST, (WorkerId("decode-0"), Epoch(2))]
        assert await stage.ask(PROMPT) == _expected(PROMPT)

    stage.play(scene)


def test_nothing_changes_when_an_action_is_repeated_or_is_of_another_epoch(stage: Stage) -> None:
    """CL-1."""

    async def scene() -> None:
        await stage.until_ready()
        before, workers, router = await stage.runtime.observe(), dict(stage.cluster.workers), stage.router
        for member_id, role in stage.target.members().items():
            start = stage.target.start(member_id, role, Epoch(1))
            if isinstance(start, StartWorker):
                await stage.runtime.start_worker(start.spec)
            else:
                await stage.runtime.start_router(start.spec)
            for epoch in (0, 2):
                await stage.runtime.stop(member_id, Epoch(epoch))
        assert await stage.runtime.observe() == before
        assert stage.cluster.workers == workers and stage.router is router

    stage.play(scene)


def test_start_is_refused_when_another_epoch_runs(stage: Stage) -> None:
    async def scene() -> None:
        await stage.until_ready()
        worker = stage.target.start(WorkerId("decode-0"), "decode", Epoch(2))
        router = stage.target.start(ROUTER, "router", Epoch(2))
        assert isinstance(worker, StartWorker) and isinstance(router, StartRouter)
        with pytest.raises(ClusterError, match="decode-0 cannot start in epoch 2 while its epoch 1 runs"):
            await stage.runtime.start_worker(worker.spec)
        with pytest.raises(ClusterError, match="router-0 cannot start"):
            await stage.runtime.start_router(router.spec)

    stage.play(scene)


def test_router_is_replaced_and_serves_when_it_was_stopped(stage: Stage) -> None:
    async def scene() -> None:
        await stage.until_ready()
        await stage.runtime.stop(ROUTER, Epoch(1))
        await stage.until(lambda: ROUTER in stage.runtime.routers, "back")
        await stage.until_ready()
        assert stage.router.epoch == 2 and stage.made == FIRST
        assert await stage.ask(PROMPT) == _expected(PROMPT)

    stage.play(scene)


def test_worker_is_restarted_and_the_cause_kept_when_it_breaks_an_invariant(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    def broken(_now: float) -> bool:
        raise AssertionError("planted")

    async def scene() -> None:
        await stage.until_ready()
        monkeypatch.setattr(stage.cluster.workers[WorkerId("decode-0")], "advance", broken)
        await stage.until(lambda: "planted" in stage.controller.status()["reason"], "reported")
        await stage.until_ready()
        assert stage.made == [*FIRST, (WorkerId("decode-0"), Epoch(2))]
        assert await stage.ask(PROMPT) == _expected(PROMPT)
        ends.append("well")

    with pytest.raises(AssertionError, match="planted"):
        stage.play(scene)
    assert ends == ["well"]


def test_cluster_fails_with_the_reason_when_a_worker_cannot_be_built(stage: Stage) -> None:
    stage.build_problem[WorkerId("prefill-1")] = "is not there"

    async def scene() -> None:
        await stage.until(lambda: stage.controller.status()["state"] == "failed", "failed")
        assert "is not there" in stage.controller.status()["reason"]
        assert len([1 for worker_id, _ in stage.made if worker_id == "prefill-1"]) == START_FAILURES_MAX

    stage.play(scene)
