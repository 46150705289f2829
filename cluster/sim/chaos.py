"""One chaos run: a schedule carried out on a world, and what is wrong with what came of it.

After every step of a worker and at every look of a router at its deadlines the numbered invariants are asserted. At the
end, when all faults are over: every answer is right or a stated error, every member is back, nothing is held, and new
requests are served. Knows nothing about where schedules come from.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from cluster.sim.clients import Clients, Reply, sampling_of
from cluster.sim.coverage import Cell, Coverage
from cluster.sim.faults import Trouble
from cluster.sim.loop import run_virtual
from cluster.sim.schedule import BLOCK_SIZE, CREDIT_S, LEASE_S, VOCAB_SIZE, Asked, ClusterShape, Fault, Schedule
from cluster.sim.world import Setting, World
from core.config import ClusterConfig, parse_config
from core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    PdclusterError,
    RequestCancelledError,
    SimulationError,
    StalledError,
    TransferFailedError,
)
from decode.intake import NO_OFFER, NO_ROOM
from engine.standin import expected_tokens
from engine.step import StepPlan

LOOK_S = 0.1
NEWS_S = 2.0
"""The controller and the routers know of the last fault by then."""
WHOLE_S = 90.0
"""All members are back by then, once nothing goes wrong any more."""
QUIET_S = 30.0
"""And nothing is held."""
STARTED_S = 60.0
CREDIT_LAPSES = (NO_OFFER, NO_ROOM)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a run."""

    seed: int
    problem: str
    """What is wrong, empty when nothing is."""
    seconds: float
    """Of virtual time."""
    endings: Counter[str]
    cells: Counter[Cell]
    """Cells of the fault matrix that it reached, and how often."""
    digest: str
    """Of the journal."""
    last_lines: tuple[str, ...]


def play(schedule: Schedule, log: TextIO | None = None) -> Verdict:
    """Carry out one run; `log`: where its journal is written."""
    runs: list[ChaosRun] = []

    async def course() -> str:
        run = ChaosRun(schedule, log)
        runs.append(run)
        try:
            return await run.course()
        except SimulationError as error:
            return str(error)
        finally:
            await run.world.close()

    problem = run_virtual(course)
    (run,) = runs
    journal = run.world.journal
    return Verdict(
        seed=schedule.seed,
        problem=problem,
        seconds=run.ended_s,
        endings=Counter(answer.ending for answer in run.clients.answers),
        cells=run.coverage.cells,
        digest=journal.digest(),
        last_lines=tuple(journal.last),
    )


def config_of(shape: ClusterShape) -> ClusterConfig:
    """The configuration of a shape."""
    is_colocated = shape.num_prefill == 0
    overrides = [
        f"mode={'colocated' if is_colocated else 'disaggregated'}",
        *([] if is_colocated else [f"prefill.workers={shape.num_prefill}"]),
        f"prefill.max_batched_tokens={shape.prefill_tokens}",
        f"decode.workers={shape.num_decode}",
        f"decode.max_running={shape.max_running}",
        f"decode.max_batched_tokens={shape.decode_tokens}",
        f"router.processes={shape.num_routers}",
        f"router.request_timeout_s={shape.request_timeout_s}",
        f"router.prompt_stall_s={shape.stall_s}",
        f"router.stream_stall_s={shape.stall_s}",
        f"transfer.lease_s={LEASE_S}",
        f"transfer.credit_s={CREDIT_S}",
    ]
    model, kv = "{path: letters}", f"{{block_size: {BLOCK_SIZE}, device_blocks: 99}}"
    text = f"{{schema_version: 1, name: chaos, model: {model}, kv: {kv}}}"
    return parse_config(text, file="chaos", overrides=overrides)


def setting_of(schedule: Schedule) -> Setting:
    """The world of a schedule."""
    shape = schedule.shape

    def cost(plan: StepPlan) -> float:
        return shape.step_s + shape.token_s * plan.num_tokens

    return Setting(
        seed=schedule.seed,
        vocab_size=VOCAB_SIZE,
        max_model_len=200,
        cost=cost,
        windows=shape.windows,
        num_blocks={"prefill": shape.prefill_blocks, "decode": shape.decode_blocks},
        link_delay_s=(0.0, shape.link_delay_s),
        link_bytes_per_s=shape.link_bytes_per_s,
        read_bytes_per_s=shape.read_bytes_per_s,
        num_cores=shape.num_cores,
        skew=shape.skew,
    )


class ChaosRun:
    """One run while it lasts."""

    def __init__(self, schedule: Schedule, log: TextIO | None) -> None:
        self.schedule = schedule
        self.world = World(config_of(schedule.shape), setting_of(schedule), log)
        self.clients = Clients(self.world)
        self.trouble = Trouble(self.world)
        self.coverage = Coverage(self.world)
        self.trouble.on_strike = self.coverage.strikes
        self.clients.on_leave = partial(self.coverage.client, "client-hang-up")
        self.clients.on_cancel = partial(self.coverage.client, "client-cancel")
        self.clients.on_error = self.coverage.ended
        self.ended_s = 0.0
        self._judged: dict[str, tuple[str, int]] = {}
        """By answer: what it was when it was looked at last."""
        self._right: dict[tuple[str, int], list[int]] = {}

    async def course(self) -> str:
        """Returns what is wrong, empty when nothing is."""
        world = self.world
        await world.start()
        try:
            return await self._course()
        finally:
            self.ended_s = world.clock.now()

    async def _course(self) -> str:
        if problem := await self._until_whole(STARTED_S):
            return f"the cluster does not start: {problem}"
        happening = [
            *(asyncio.ensure_future(self._ask(asked)) for asked in self.schedule.asked),
            *(asyncio.ensure_future(self._strike(fault)) for fault in self.schedule.faults),
        ]
        while not all(one.done() for one in happening):
            await self.world.clock.sleep(LOOK_S)
            if problem := self._look():
                return problem
        for one in happening:
            one.result()
        await self.world.clock.sleep(NEWS_S)
        if problem := await self._until_whole(WHOLE_S):
            return problem
        if problem := await self._until_quiet():
            return problem
        return await self._serves_again()

    async def _ask(self, asked: Asked) -> None:
        await self.world.clock.sleep(asked.at_s)
        await self.clients.ask(asked)

    async def _strike(self, fault: Fault) -> None:
        await self.world.clock.sleep(fault.at_s)
        await self.trouble.strike(fault)

    def _look(self) -> str:
        """What is wrong by now."""
        world = self.world
        for worker_id in world.cluster.workers:
            if (failure := world.cluster.failure(worker_id)) is not None:
                world.broken(f"{worker_id}: {type(failure).__name__}: {failure}")
        world.check()
        self.coverage.look()
        if world.problems:
            return world.problems[0]
        if problem := world.unnoticed():
            return problem
        now, limit_s = world.clock.now(), self.schedule.shape.request_timeout_s
        longest_s = limit_s * 1.1 + max((fault.seconds for fault in self.schedule.faults), default=0.0) + 1.0
        for answer in self.clients.answers:
            if answer.ending == "open" and now - answer.asked_s > longest_s:
                return f"{answer.name} hangs for {now - answer.asked_s:.1f} s"
            if problem := self._judge(answer):
                return problem
        return ""

    def _judge(self, answer: Reply) -> str:
        """What is wrong with an answer, whether it has ended or not."""
        state = (answer.ending, sum(map(len, answer.got)))
        if self._judged.get(answer.name) == state:
            return ""
        self._judged[answer.name] = state
        for child, got in enumerate(answer.got):
            if not got and answer.ending != "done":
                continue
            expected = self._expected(answer, child)
            is_right = got == expected if answer.ending == "done" else got == expected[: len(got)]
            if not is_right:
                return f"{answer.name}: choice {child} is {got}, expected {expected}"
        error = answer.error
        if error is not None and (type(error) is PdclusterError or isinstance(error, InvalidRequestError)):
            return f"{answer.name}: a member lost track: {error}"
        if error is not None and not self.schedule.faults and not _is_of_load(error):
            return f"{answer.name} fails although nothing goes wrong: {type(error).__name__}: {error}"
        return ""

    def _expected(self, answer: Reply, child: int) -> list[int]:
        asked, known = answer.asked, self._right.get((answer.name, child))
        if known is None:
            windows = self.schedule.shape.windows
            known = self._right[answer.name, child] = expected_tokens(
                asked.prompt, sampling_of(asked), vocab_size=VOCAB_SIZE, child=child, windows=windows
            )
        return known

    async def _until_whole(self, limit_s: float) -> str:
        deadline_s = self.world.clock.now() + limit_s
        while not self.world.is_whole():
            if problem := self._look():
                return problem
            if self.world.clock.now() >= deadline_s:
                return f"not all members are back after {limit_s:g} s: {self.world.missing()}"
            await self.world.clock.sleep(LOOK_S)
        return ""

    async def _until_quiet(self) -> str:
        deadline_s = self.world.clock.now() + QUIET_S
        while held := self.world.held():
            if problem := self._look():
                return problem
            if self.world.clock.now() >= deadline_s:
                return f"held {QUIET_S:g} s after everything has ended: {held}"
            await self.world.clock.sleep(LOOK_S)
        return ""

    async def _serves_again(self) -> str:
        """Every router serves a request, as if nothing had been."""
        shape = self.schedule.shape
        prompt = tuple(range(min(20, shape.max_tokens - 2)))
        for router in range(shape.num_routers):
            asked = Asked(
                at_s=0.0, router=router, prompt=prompt, max_tokens=2, temperature=0.0, seed=0, stop_token=VOCAB_SIZE
            )
            answer = await self.clients.ask(asked)
            is_late = isinstance(answer.error, DeadlineExceededError | StalledError)
            if answer.ending != "done" and not is_late:
                return f"after everything is over, {answer.name} ends with {answer.ending}: {answer.error}"
            if problem := self._judge(answer):
                return problem
        return self._look() or await self._until_quiet()


def _is_of_load(error: BaseException) -> bool:
    """What a request may end with where nothing breaks: too many others, or its own time or wish."""
    if isinstance(error, TransferFailedError):
        return any(lapse in str(error) for lapse in CREDIT_LAPSES)
    return isinstance(error, DeadlineExceededError | StalledError | RequestCancelledError | OverloadedError)
