"""The rows of the fault matrix: what breaks, for how long, and how it is repaired.

A fault strikes the workers that serve the request on stage (or would be chosen for it now). Knows nothing about
outcomes.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cluster.assembly import WorkerIdentity
from core.ids import Epoch, WorkerId
from kvtransfer.transport.memory import MemoryFaults
from router.actions import DEFAULT_STALL_LIMITS, StallLimits
from tests.e2e.faults.client import Call
from tests.e2e.faults.stage import CREDIT_S, LEASE_S, FaultStage

STOPPED_S = 16.0
"""Longer than heartbeat, lease, credit and read timeouts."""
AT_ONCE_S = 0.5
"""No lease, credit or heartbeat is waited for."""
EXHAUSTED_S = 2 * CREDIT_S
FAULT = "fault"
FINE_S, COARSE_S = 0.01, 0.05


@dataclass(kw_only=True)
class Scene:
    """The request on stage as a fault finds it."""

    stage: FaultStage
    call: Call
    column: str
    prefill: WorkerId
    decode: WorkerId

    @property
    def attempt(self) -> int:
        assert self.stage.run is not None
        return self.stage.run.flow.attempt

    async def pass_by(self, seconds: float) -> None:
        self.stage.tick_s = COARSE_S
        await self.stage.clock.sleep(seconds)
        self.stage.tick_s = FINE_S


Act = Callable[[Scene], Awaitable[None]]


async def _nothing(scene: Scene) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: `strike` breaks something and returns at once, `last` is how long it stays so, `repair` ends it."""

    strike: Act
    last: Act = _nothing
    repair: Act = _nothing
    num_pairs: int = 2
    request_timeout_s: float = 600.0
    stall: StallLimits = DEFAULT_STALL_LIMITS
    clean_within_s: float = LEASE_S + 1.0
    """From the end of request and fault until nothing is held."""
    opens_late: bool = False
    """The request is held until the fault has lasted."""
    is_away: bool = False
    """While it lasts, nobody can be served."""
    serves_meanwhile: bool = False
    """While it lasts, others are served at once."""
    before: Callable[[FaultStage, str], Awaitable[None]] | None = None
    """What must have happened before the request comes."""


NO_FAULT = Row(strike=_nothing)


def _passing(seconds: float) -> Act:
    async def last(scene: Scene) -> None:
        await scene.pass_by(seconds)

    return last


# ---- clients and deadlines -------------------------------------------------------------------------------------------


async def _hang_up(scene: Scene) -> None:
    scene.call.hang_up()


async def _abort(scene: Scene) -> None:
    assert scene.stage.service.abort("somebody-else") == scene.stage.service.abort("") == 0
    assert scene.stage.service.abort("client-1") == 1


# ---- processes -------------------------------------------------------------------------------------------------------


def _kill(role: str) -> Act:
    async def strike(scene: Scene) -> None:
        await scene.stage.cluster.kill_worker(getattr(scene, role))

    return strike


def _restart(role: str) -> Act:
    async def repair(scene: Scene) -> None:
        await scene.stage.restart(getattr(scene, role), role)

    return repair


def _stop(role: str) -> Act:
    async def strike(scene: Scene) -> None:
        """Reads from a stopped process do not end: NIXL needs the help of both sides."""
        victim = getattr(scene, role)
        scene.stage.cluster.freezers[victim].freeze()
        for worker in scene.stage.cluster.of_role("decode"):
            for read in scene.stage.cluster.transport(worker)._reads.values():
                if read.peer.worker == victim:
                    read.due_s = math.inf

    return strike


def _continue(role: str) -> Act:
    async def repair(scene: Scene) -> None:
        scene.stage.cluster.freezers[getattr(scene, role)].thaw()

    return repair


async def _kill_router(scene: Scene) -> None:
    """Its tasks end without a word, its connections break, the client's too."""
    stage = scene.stage
    stage.router_freezer.freeze()
    for link in stage.network.links:
        link.lose()
    service, clients = stage.service, list(stage.service.pool._clients.values())
    tasks: list[asyncio.Future[Any] | None] = [service._ticker, scene.call.task, *(c._task for c in clients)]  # type: ignore[attr-defined]
    scene.call.hang_up()
    for task in tasks:
        if task is not None:
            task.cancel()
    await asyncio.gather(*(task for task in tasks if task), return_exceptions=True)


async def _restart_router(scene: Scene) -> None:
    await scene.stage.start_router(scene.stage.new_router())


async def _stop_router(scene: Scene) -> None:
    scene.stage.router_freezer.freeze()


async def _continue_router(scene: Scene) -> None:
    scene.stage.router_freezer.thaw()


# ---- links and transfers ---------------------------------------------------------------------------------------------


def _cut(role: str) -> Act:
    async def strike(scene: Scene) -> None:
        for link in scene.stage.network.links:
            if link.peer == getattr(scene, role):
                link.lose()

    return strike


def _spoil(**faults: float) -> Act:
    async def strike(scene: Scene) -> None:
        scene.stage.cluster.fabric.faults = MemoryFaults(**faults)  # type: ignore[arg-type]

    return strike


async def _until_it_shows(scene: Scene) -> None:
    """As long as the attempt that met it lasts."""
    attempt = scene.attempt
    for _ in range(200):
        if scene.call.task.done() or scene.attempt > attempt:
            return
        await scene.stage.clock.sleep(0.01)


async def _sound_reads(scene: Scene) -> None:
    scene.stage.cluster.fabric.faults = MemoryFaults()


async def _give_up_reads(stage: FaultStage, column: str) -> None:
    """Both decode workers have reads that were given up; not where the request's own reads are to be given up."""
    if column == "pull":
        return
    faults = stage.cluster.fabric.faults
    faults.delay_s, faults.late_write_rate = (1e5, 1e5), 1.0
    calls = [stage.call(list(range(n, n + 40)), max_tokens=2, request_id=f"earlier-{n}") for n in range(2)]
    workers = stage.cluster.of_role("decode")
    await stage.until(lambda: all(len(stage.cluster.transport(w)._reads) >= 5 for w in workers))
    for call in calls:
        call.hang_up()
    await stage.until(lambda: not stage.service.runs)
    await stage.clock.sleep(0.1)
    reads = [read for w in workers for read in stage.cluster.transport(w)._reads.values()]
    assert all(read.is_abandoned for read in reads)
    faults.delay_s = (0.0, 0.0)


async def _write_late(scene: Scene) -> None:
    """Reads that were given up write now; the request's own, if it pulls, are given up and write even later."""
    own_due_s = scene.stage.clock.now() + 18.0
    scene.stage.cluster.fabric.faults.late_write_rate = 1.0
    for worker in scene.stage.cluster.of_role("decode"):
        for read in scene.stage.cluster.transport(worker)._reads.values():
            read.is_stalled, read.due_s = False, scene.stage.clock.now() if read.is_abandoned else own_due_s


# ---- handshakes and pools --------------------------------------------------------------------------------------------


async def _come_back_as_another(scene: Scene) -> None:
    """The prefill worker is restarted with other weights: no decode worker may read from it."""
    stage = scene.stage
    await stage.cluster.kill_worker(scene.prefill)
    stage.epochs[scene.prefill] += 1
    identity = WorkerIdentity(worker_id=scene.prefill, role="prefill", epoch=Epoch(stage.epochs[scene.prefill]))
    stage.cluster.start_incompatible(identity)
    stage.service.update_workers(stage.cluster.worker_set())


async def _until_refused(scene: Scene) -> None:
    await scene.stage.until(lambda: len(scene.stage.service.pool.refusals()) == 2)
    assert all("weight_identity" in reason for reason in scene.stage.service.pool.refusals())


async def _come_back_as_before(scene: Scene) -> None:
    await scene.stage.cluster.kill_worker(scene.prefill)
    await scene.stage.restart(scene.prefill, "prefill")


def _fill(role: str) -> Act:
    async def strike(scene: Scene) -> None:
        scene.stage.fills.fill(getattr(scene, role), FAULT)

    return strike


async def _free(scene: Scene) -> None:
    scene.stage.fills.free(FAULT)


def _stall(role: str) -> Act:
    async def strike(scene: Scene) -> None:
        scene.stage.cluster.stalled.add(getattr(scene, role))

    return strike


async def _unstall(scene: Scene) -> None:
    scene.stage.cluster.stalled.clear()


def _stalled(role: str) -> Row:
    limits = StallLimits(prompt_s=5.0, stream_s=4.0)
    return Row(strike=_stall(role), last=_passing(8.0), repair=_unstall, stall=limits)


def _killed(role: str) -> Row:
    return Row(strike=_kill(role), last=_passing(1.0), repair=_restart(role), serves_meanwhile=True)


def _killed_last(role: str) -> Row:
    return Row(strike=_kill(role), last=_passing(12.0), repair=_restart(role), num_pairs=1, is_away=True)


def killed_and_back(role: str) -> Row:
    """The only worker of a role dies and is replaced while the router still waits for one."""
    return Row(strike=_kill(role), last=_passing(5.0), repair=_restart(role), num_pairs=1)


def _stopped(role: str) -> Row:
    return Row(strike=_stop(role), last=_passing(STOPPED_S), repair=_continue(role))


def _full(role: str) -> Row:
    return Row(strike=_fill(role), last=_passing(EXHAUSTED_S), repair=_free)


ROWS = {
    "client-hang-up": Row(strike=_hang_up, clean_within_s=AT_ONCE_S),
    "client-cancel": Row(strike=_abort, clean_within_s=AT_ONCE_S),
    "deadline": Row(
        strike=_nothing, last=_passing(2.2), request_timeout_s=2.0, opens_late=True, clean_within_s=AT_ONCE_S
    ),
    "router-killed": Row(strike=_kill_router, last=_passing(1.0), repair=_restart_router),
    "prefill-killed": _killed("prefill"),
    "prefill-killed-last": _killed_last("prefill"),
    "decode-killed": _killed("decode"),
    "decode-killed-last": _killed_last("decode"),
    "router-stopped": Row(strike=_stop_router, last=_passing(STOPPED_S), repair=_continue_router, opens_late=True),
    "prefill-stopped": _stopped("prefill"),
    "decode-stopped": _stopped("decode"),
    "prefill-stalled": _stalled("prefill"),
    "decode-stalled": _stalled("decode"),
    "prefill-link-cut": Row(strike=_cut("prefill")),
    "decode-link-cut": Row(strike=_cut("decode")),
    "transport-error": Row(strike=_spoil(loss_rate=1.0), last=_until_it_shows, repair=_sound_reads),
    "late-write": Row(strike=_write_late, before=_give_up_reads),
    "digest-mismatch": Row(strike=_spoil(corruption_rate=1.0), last=_until_it_shows, repair=_sound_reads),
    "handshake-refusal": Row(
        strike=_come_back_as_another, last=_until_refused, repair=_come_back_as_before, serves_meanwhile=True
    ),
    "prefill-pool-full": _full("prefill"),
    "decode-pool-full": _full("decode"),
}
"""Those of the controller need one: see `test_controller_faults`."""
assert LEASE_S < STOPPED_S
