"""Target state x record x observed state -> actions: one step of the control loop's decision, as a pure function.

Each member (worker or router) should run exactly once, in the newest epoch ever given out. What ended is started
again in the next epoch after a back-off; a member that fails START_FAILURES_MAX times in a row before it listens is
given up, and the cluster is `failed`. Deciding again on the result of a decision changes nothing (CL-1). Knows
nothing about Ray, links or clocks: `now` is a number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cluster.runtime import MemberRole, Observed, RouterSpec, WorkerSpec
from core.config import ClusterConfig
from core.ids import Epoch, Role, RouterId, WorkerId

START_FAILURES_MAX = 3
START_TIMEOUT_S = 300.0
"""A member that does not listen by then is stopped and counts as failed."""
SILENT_S = 15.0
"""A member that listened and that nobody has heard for so long is stopped or wedged: it is replaced."""
NO_EPOCH = Epoch(0)
BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
STABLE_S = 60.0
"""A member that listened for so long starts its back-off from the beginning when it ends."""

MemberId = WorkerId | RouterId
Phase = Literal["absent", "starting", "ready", "failed"]
ClusterState = Literal["starting", "ready", "degraded", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """What the controller remembers of one member."""

    epoch: Epoch = NO_EPOCH
    """Newest epoch given out; 0: none yet."""
    phase: Phase = "absent"
    since_s: float = 0.0
    """When the phase began."""
    retry_at_s: float = 0.0
    """`absent`: not started before this time."""
    num_restarts: int = 0
    """Ends since it was last stable; sets the back-off."""
    num_start_failures: int = 0
    """Ends in a row before it listened."""
    problem: str = ""
    """Why it ended last."""


Record = Mapping[MemberId, MemberState]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    spec: WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRouter:
    spec: RouterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    id: MemberId
    epoch: Epoch


Action = StartWorker | StartRouter | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to remember, then what to do."""

    record: dict[MemberId, MemberState]
    actions: tuple[Action, ...]
    state: ClusterState
    reason: str
    """Why the cluster is degraded or failed; empty otherwise."""


def wanted_workers(config: ClusterConfig) -> dict[WorkerId, Role]:
    """Every worker with its role, prefill before decode. The order is that of the bundles that hold them."""
    workers: dict[WorkerId, Role] = {}
    workers |= {WorkerId(f"prefill-{index}"): "prefill" for index in range(config.prefill.workers)}
    workers |= {WorkerId(f"decode-{index}"): "decode" for index in range(config.decode.workers)}
    return workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What should run."""

    config: ClusterConfig
    model_path: Path

    def members(self) -> dict[MemberId, MemberRole]:
        """Every member with its role, workers first, prefill before decode."""
        members: dict[MemberId, MemberRole] = dict(wanted_workers(self.config).items())
        members |= {RouterId(f"router-{index}"): "router" for index in range(self.config.router.processes)}
        return members

    def start(self, member_id: MemberId, role: MemberRole, epoch: Epoch) -> StartWorker | StartRouter:
        """The action that starts a member."""
        config, path = self.config, self.model_path
        if role == "router":
            spec = RouterSpec(id=RouterId(member_id), epoch=epoch, config=config, model_path=path)
            return StartRouter(spec=spec)
        section = config.prefill if role == "prefill" else config.decode
        return StartWorker(
            spec=WorkerSpec(
                id=WorkerId(member_id), role=role, epoch=epoch, config=config, model_path=path,
                cpus=section.cpus, gpus=section.gpus,
            )
        )  # fmt: skip


def decide(target: Target, record: Record, observed: Sequence[Observed], now: float) -> Decision:
    """One decision. `record` is what the last decision returned (or what was read back from disk)."""
    members = target.members()
    actions: list[Action] = []
    states: dict[MemberId, MemberState] = {}
    for member_id, role in members.items():
        seen = [one for one in observed if one.id == member_id]
        state = _advance(record.get(member_id, MemberState()), seen, now)
        actions += [Stop(id=one.id, epoch=one.epoch) for one in seen if one.alive and _is_surplus(one, state)]
        if state.phase == "absent" and now >= state.retry_at_s:
            state = replace(state, epoch=Epoch(state.epoch + 1), phase="starting", since_s=now)
            actions.append(target.start(member_id, role, state.epoch))
        states[member_id] = state
    actions += [Stop(id=one.id, epoch=one.epoch) for one in observed if one.alive and one.id not in members]
    state_of_all, reason = _summarise(states)
    return Decision(record=states, actions=tuple(actions), state=state_of_all, reason=reason)


def _advance(state: MemberState, seen: Sequence[Observed], now: float) -> MemberState:
    """The member's state after what was observed of it."""
    newest = max((one.epoch for one in seen), default=NO_EPOCH)
    if newest > state.epoch:  # the record is older than what runs: adopt what runs
        state = replace(state, epoch=newest, phase="starting", since_s=now)
    if state.phase in ("absent", "failed"):
        return state
    current = next((one for one in seen if one.epoch == state.epoch), None)
    if current is None or not current.alive:
        problem = (current.problem if current else None) or "the process ended"
        return _after_end(state, problem, now)
    if current.endpoint is None:
        if state.phase == "starting" and now - state.since_s >= START_TIMEOUT_S:
            return _after_end(state, f"did not listen within {START_TIMEOUT_S:.0f} s", now)
        return state
    if state.phase == "starting":
        return replace(state, phase="ready", since_s=now, num_start_failures=0, problem="")
    if current.silent_s >= SILENT_S:
        return _after_end(state, f"it runs, but nobody has heard it for {SILENT_S:.0f} s", now)
    if state.num_restarts and now - state.since_s >= STABLE_S:
        return replace(state, num_restarts=0)
    return state


def _after_end(state: MemberState, problem: str, now: float) -> MemberState:
    failures = state.num_start_failures + (state.phase == "starting")
    backoff_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(state.num_restarts, 16))
    return replace(
        state,
        phase="failed" if failures >= START_FAILURES_MAX else "absent",
        since_s=now,
        retry_at_s=now + backoff_s,
        num_restarts=state.num_restarts + 1,
        num_start_failures=failures,
        problem=problem,
    )


def _is_surplus(one: Observed, state: MemberState) -> bool:
    """Alive, and not the process of the newest epoch that should run."""
    return one.epoch != state.epoch or state.phase in ("absent", "failed")


def _summarise(states: Mapping[MemberId, MemberState]) -> tuple[ClusterState, str]:
    for member_id, state in states.items():
        if state.phase == "failed":
            return "failed", f"{member_id} failed to start {START_FAILURES_MAX} times: {state.problem}"
    missing = [member_id for member_id, state in states.items() if state.phase != "ready"]
    if not missing:
        return "ready", ""
    ended = [f"{member_id}: {states[member_id].problem}" for member_id in missing if states[member_id].problem]
    return ("degraded", "; ".join(ended)) if ended else ("starting", "")
