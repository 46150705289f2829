"""A trace served by a simulated cluster: every request at its time, with as many tokens as it had, and what came of it.

Answers are measured as `pdcluster bench serve` measures those of a server. Knows nothing about trace formats or about
how long a step takes.
"""

import asyncio
import contextvars
import math
from array import array
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

from cluster.bench.record import FailureReason, RequestRecord
from cluster.bench.summary import Numbers, Objectives, summarise
from cluster.sim.loop import run_virtual
from cluster.sim.model import StepCost
from cluster.sim.trace import Trace, TracedRequest, prompt_tokens
from cluster.sim.world import Setting, World
from core.config import ClusterConfig
from core.errors import PdclusterError, SimulationError
from core.request import SamplingParams
from engine.standin import expected_tokens, standin_layout
from router.buffer import IndexedEvent
from router.generation import ChildDelta, PreparedRequest, Summary

START_LIMIT_S = 60.0
SAMPLE_EVERY_S = 1.0
"""How often queues are looked at."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What is simulated besides the configuration and the trace."""

    cost: StepCost
    kv_bytes_per_token: int
    read_bytes_per_s: float
    link_delay_s: float
    num_cores: float
    max_output_tokens: int | None
    """Of any request; None: as many as it had."""
    vocab_size: int
    seed: int
    is_verified: bool
    """Every answer is compared with the right one."""
    objectives: Objectives | None
    percentiles: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class Served:
    """One request of the trace, as its client sees it."""

    request: TracedRequest
    started_s: float
    token_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    num_cached_tokens: int = 0
    failure: str = ""

    def record(self) -> RequestRecord:
        """As the bench has it."""
        return RequestRecord(
            started_s=self.started_s,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=0 if self.failure else self.num_tokens,
            token_times_s=self.token_times_s,
            failure=FailureReason.ERROR_EVENT if self.failure else None,
            detail=self.failure,
        )


@dataclass(slots=True)
class Load:
    """Of one worker over the run."""

    num_looks: int = 0
    num_waiting: int = 0
    """Summed over the looks."""
    num_waiting_max: int = 0
    num_running: int = 0

    def look(self, num_waiting: int, num_running: int) -> None:
        self.num_looks += 1
        self.num_waiting += num_waiting
        self.num_waiting_max = max(self.num_waiting_max, num_waiting)
        self.num_running += num_running


def replay(config: ClusterConfig, trace: Trace, options: ReplayOptions) -> Numbers:
    """Serve the whole trace. Raises SimulationError: the cluster does not start, or an answer is wrong."""
    if config.kv.device_blocks is None:
        problem = "kv.device_blocks is not given, and without a model the size of a block is not known"
        raise SimulationError(problem=f"{problem}. Add --set kv.device_blocks=N")

    async def course() -> Numbers:
        run = Replay(config, trace, options)
        try:
            return await run.course()
        finally:
            await run.world.close()

    return run_virtual(course)


class Replay:
    """One run while it lasts."""

    def __init__(self, config: ClusterConfig, trace: Trace, options: ReplayOptions) -> None:
        self._config = config
        self._trace = trace
        self._options = options
        self.world = World(config, _setting(config, trace, options))
        self._loads: dict[str, Load] = {}
        self._served: list[Served] = []

    async def course(self) -> Numbers:
        """Start, serve, sum up."""
        world = self.world
        await world.start()
        while missing := world.missing():
            if world.clock.now() > START_LIMIT_S:
                raise SimulationError(problem=f"the cluster does not start: {missing}")
            await world.clock.sleep(SAMPLE_EVERY_S)
        began_s = world.clock.now()
        looking = asyncio.get_running_loop().create_task(self._look(), context=contextvars.Context())
        tasks: set[asyncio.Task[None]] = set()
        for index, request in enumerate(self._trace.requests):
            await world.clock.sleep(began_s + request.arrival_s - world.clock.now())
            self._raise_problem()
            task = asyncio.ensure_future(self._ask(index, request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        looking.cancel()
        world.check()
        self._raise_problem()
        return self._numbers(world.clock.now() - began_s)

    def _raise_problem(self) -> None:
        """Whatever was found wrong so far ends the run, whoever found it."""
        if self.world.problems:
            raise SimulationError(problem=self.world.problems[0])

    async def _look(self) -> None:
        while True:
            for worker_id, worker in self.world.cluster.workers.items():
                status = worker.status()
                self._loads.setdefault(worker_id, Load()).look(status.num_waiting, status.num_running)
            await self.world.clock.sleep(SAMPLE_EVERY_S)

    async def _ask(self, index: int, request: TracedRequest) -> None:
        world, options = self.world, self._options
        served = Served(request=request, started_s=world.clock.now())
        self._served.append(served)
        routers = world.routers()
        router = routers[index % len(routers)]
        process = world.process(router.router_id)
        assert process is not None, "a router that listens has a process"
        prompt = tuple(prompt_tokens(request, vocab_size=options.vocab_size, seed=options.seed))
        max_tokens = min(request.num_output_tokens, options.max_output_tokens or request.num_output_tokens)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        prepared = PreparedRequest(token_ids=prompt, sampling=sampling, num_children=1, stop=())
        serving = process.spawn(self._serve(served, router.generate_all([prepared])))
        serving.add_done_callback(world.watch)
        await asyncio.wait({serving})
        if serving.exception() is not None:
            return
        answer = serving.result()
        if options.is_verified and not served.failure:
            self._verify(index, prompt, sampling, answer)

    async def _serve(self, served: Served, events: AsyncGenerator[IndexedEvent, None]) -> list[int]:
        """Returns the token ids of the answer, where they are to be verified."""
        answer: list[int] = []
        try:
            async for _prompt, event in events:
                if isinstance(event, ChildDelta) and event.token_ids:
                    served.token_times_s.append(self.world.clock.now())
                    served.num_tokens += len(event.token_ids)
                    if self._options.is_verified:
                        answer.extend(event.token_ids)
                elif isinstance(event, Summary):
                    served.num_cached_tokens = event.num_cached_tokens
        except PdclusterError as error:
            served.failure = f"{type(error).__name__}: {error}"
        finally:
            await events.aclose()
        return answer

    def _verify(self, index: int, prompt: tuple[int, ...], sampling: SamplingParams, answer: list[int]) -> None:
        right = expected_tokens(prompt, sampling, vocab_size=self._options.vocab_size)
        if answer != right:
            self.world.broken(f"request {index} is answered with {answer[:20]}, expected {right[:20]}")

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def _numbers(self, seconds: float) -> Numbers:
        options = self._options
        records = [served.record() for served in self._served]
        return {
            "kind": "simulated",
            "trace": self._trace.name,
            **summarise(records, seconds, options.objectives, options.percentiles),
            "hit_rates": self._hit_rates(),
            "workers": dict(self._workers(seconds)),
        }

    def _hit_rates(self) -> Numbers:
        """Shares of all prompt tokens, and of all blocks of the trace, that no worker had to compute."""
        complete = [served for served in self._served if not served.failure]
        num_prompt = sum(served.request.num_prompt_tokens for served in complete)
        num_cached = sum(served.num_cached_tokens for served in complete)
        rates: Numbers = {"device_tokens": num_cached / num_prompt if num_prompt else None}
        if self._trace.block_size is not None:
            size = self._trace.block_size
            num_blocks = sum(math.ceil(served.request.num_prompt_tokens / size) for served in complete)
            num_hits = sum(served.num_cached_tokens // size for served in complete)
            rates["device_blocks"] = num_hits / num_blocks if num_blocks else None
        return rates

    def _workers(self, seconds: float) -> Iterator[tuple[str, Numbers]]:
        for worker_id, worker in sorted(self.world.cluster.workers.items()):
            load, process = self._loads[worker_id], self.world.process(worker_id)
            assert process is not None, "a worker that listens has a process"
            yield (
                worker_id,
                {
                    "utilisation": process.busy_s / seconds,
                    "mean_waiting": load.num_waiting / load.num_looks,
                    "max_waiting": load.num_waiting_max,
                    "mean_running": load.num_running / load.num_looks,
                    "num_preemptions": worker.status().counters.get("pdcluster_preemptions_total", 0.0),
                },
            )


def _setting(config: ClusterConfig, trace: Trace, options: ReplayOptions) -> Setting:
    """The world of a trace. The stand-in's blocks are smaller than a model's, and move as much slower."""
    block_size, num_blocks = config.kv.block_size, config.kv.device_blocks
    assert num_blocks is not None, "replay looks at it"
    longest = max((one.num_prompt_tokens + one.num_output_tokens for one in trace.requests), default=1)
    shrunk = standin_layout(block_size).block_bytes() / (options.kv_bytes_per_token * block_size)
    return Setting(
        seed=options.seed,
        vocab_size=options.vocab_size,
        max_model_len=min(config.model.max_model_len or longest, num_blocks * block_size),
        cost=options.cost,
        num_blocks={"prefill": num_blocks, "decode": num_blocks},
        link_delay_s=(options.link_delay_s, options.link_delay_s),
        read_bytes_per_s=options.read_bytes_per_s * shrunk,
        num_cores=options.num_cores,
        is_checked=False,
    )
