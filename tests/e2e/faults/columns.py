"""The columns of the fault matrix: how a request is brought to each point of its way and held there.

Each closes gates before the request starts, says when the request is there, and is left by opening all gates. Knows
nothing about what goes wrong there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.request import RequestState
from tests.e2e.faults.stage import FaultStage

TOKENS_BEFORE = 4
GATE = "column"
SLOW_S = 1e5
"""A read that takes so long is held."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column."""

    close: Callable[[FaultStage], None]
    is_there: Callable[[FaultStage], bool]


def open_all(stage: FaultStage) -> None:
    """Let the request go on."""
    gates = stage.gates
    gates.selects = True
    gates.num_steps.update(prefill=float("inf"), decode=float("inf"))
    gates.finish.set()
    stage.fills.free(GATE)
    stage.cluster.fabric.faults.delay_s = (0.0, 0.0)
    for worker in stage.cluster.of_role("decode"):
        for read in stage.cluster.transport(worker)._reads.values():
            if SLOW_S <= read.due_s < math.inf:
                read.due_s = stage.clock.now()


def _flow(stage: FaultStage) -> Any:
    assert stage.run is not None
    return stage.run.flow


def _has_no_pair(stage: FaultStage) -> bool:
    """Its first attempt is made to fail, and nobody is chosen for the next."""
    flow = _flow(stage)
    if flow.state is RequestState.CREDITED and stage.gates.selects:
        stage.gates.selects = False
        flow._phase_deadline = stage.service.clock.now()
    return bool(flow.attempt == 1 and flow.needs_pair(stage.service.clock.now()))


def _fill(role: str) -> Callable[[FaultStage], None]:
    def close(stage: FaultStage) -> None:
        for worker in stage.cluster.of_role(role):
            stage.fills.fill(worker, GATE)

    return close


def _limit(role: str, num_steps: int) -> Callable[[FaultStage], None]:
    def close(stage: FaultStage) -> None:
        stage.gates.num_steps[role] = num_steps

    return close


def _waits_for_credit(stage: FaultStage) -> bool:
    return sum(stage.cluster.decode(w)._intake.num_waiting for w in stage.cluster.of_role("decode")) == 1


def _waits_for_prefill(stage: FaultStage) -> bool:
    return sum(stage.cluster.scheduler(w).num_waiting for w in stage.cluster.of_role("prefill")) == 1


def _has_some_chunks(stage: FaultStage) -> bool:
    is_prefilling = _flow(stage).state is RequestState.PREFILLING
    return is_prefilling and stage.gates.num_steps["prefill"] == 0 and not _num_reads(stage)


def _num_reads(stage: FaultStage) -> int:
    reads = (stage.cluster.transport(w)._reads.values() for w in stage.cluster.of_role("decode"))
    return sum(not read.is_abandoned for some in reads for read in some)


def _slow_reads(stage: FaultStage) -> None:
    stage.cluster.fabric.faults.delay_s = (SLOW_S, SLOW_S)


def _pulls(stage: FaultStage) -> bool:
    sessions = [
        reception.session
        for worker in stage.cluster.of_role("decode")
        for reception in stage.cluster.decode(worker)._intake._active.values()
    ]
    return any(session is not None and session.in_flight == session.num_blocks for session in sessions)


def _waits_for_first_step(stage: FaultStage) -> bool:
    flow = _flow(stage)
    return flow.state is RequestState.DECODING and not flow.has_output


def _streams(stage: FaultStage) -> bool:
    return bool(_flow(stage)._children[0].next_index == TOKENS_BEFORE)


def _hold_finish(stage: FaultStage) -> None:
    stage.gates.finish.clear()


COLUMNS = {
    "selection": Column(close=_limit("prefill", 0), is_there=_has_no_pair),
    "credit": Column(close=_fill("decode"), is_there=_waits_for_credit),
    "queued": Column(close=_fill("prefill"), is_there=_waits_for_prefill),
    "chunks": Column(close=_limit("prefill", 2), is_there=_has_some_chunks),
    "pull": Column(close=_slow_reads, is_there=_pulls),
    "first-step": Column(close=_limit("decode", 0), is_there=_waits_for_first_step),
    "decode": Column(close=_limit("decode", TOKENS_BEFORE), is_there=_streams),
    "finish": Column(close=_hold_finish, is_there=lambda stage: stage.gates.num_finishes_held == 1),
}
