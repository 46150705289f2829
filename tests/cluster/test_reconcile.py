"""The decision of the control loop: it converges from any state, gives each start a new epoch, and can give up.

Method of the property tests: a model of a runtime that obeys `cluster.runtime.Runtime` (start and stop are
idempotent) is put into an arbitrary state, together with an arbitrary record; decisions are applied to it, once or
twice each.
"""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cluster.reconcile import (
    BACKOFF_MIN_S,
    STABLE_S,
    START_FAILURES_MAX,
    START_TIMEOUT_S,
    Action,
    Decision,
    MemberId,
    MemberState,
    StartRouter,
    StartWorker,
    Stop,
    Target,
    decide,
)
from cluster.runtime import MemberRole, Observed
from core.config import ClusterConfig
from core.ids import Epoch, WorkerId

CONFIG = ClusterConfig.model_validate(
    {"schema_version": 1, "name": "test", "model": {"path": "m"}, "kv": {"device_blocks": 64}}
)
TARGET = Target(config=CONFIG, model_path=Path("m"))
PREFILL = WorkerId("prefill-0")
MEMBERS = TARGET.members()
STRANGER = WorkerId("prefill-7")


class FakeProcesses:
    """What runs: (id, epoch) -> whether it listens. Starting and stopping are idempotent."""

    def __init__(self, running: dict[tuple[MemberId, Epoch], bool] | None = None) -> None:
        self.running = dict(running or {})
        self.started: list[tuple[MemberId, Epoch]] = []

    def observe(self) -> list[Observed]:
        roles: dict[MemberId, MemberRole] = {STRANGER: "prefill", **MEMBERS}
        return [
            Observed(id=name, role=roles[name], epoch=epoch, alive=True, endpoint="e" if listens else None)
            for (name, epoch), listens in self.running.items()
        ]

    def apply(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case StartWorker(spec=spec):
                    self._start(spec.id, spec.epoch)
                case StartRouter(spec=spec):
                    self._start(spec.id, spec.epoch)
                case Stop(id=name, epoch=epoch):
                    self.running.pop((name, epoch), None)

    def listen_all(self) -> None:
        self.running = dict.fromkeys(self.running, True)

    def _start(self, name: MemberId, epoch: Epoch) -> None:
        if (name, epoch) not in self.running:
            self.running[name, epoch] = False
            self.started.append((name, epoch))


epochs = st.integers(1, 6).map(Epoch)
processes = st.dictionaries(st.tuples(st.sampled_from([STRANGER, *MEMBERS]), epochs), st.booleans(), max_size=8)
states = st.builds(
    MemberState,
    epoch=st.integers(0, 6).map(Epoch),
    phase=st.sampled_from(["absent", "starting", "ready"]),
    since_s=st.floats(-1000, 0),
    retry_at_s=st.floats(-1000, 30),
    num_restarts=st.integers(0, 5),
    num_start_failures=st.integers(0, START_FAILURES_MAX - 2),
)
records = st.dictionaries(st.sampled_from(list(MEMBERS)), states)


def settle(running: FakeProcesses, record: dict[MemberId, MemberState], now: float) -> tuple[Decision, float]:
    """Decide and apply until nothing is left to do; every process that is started listens at once."""
    decision = decide(TARGET, record, running.observe(), now)
    for _ in range(20):
        running.apply(decision.actions)
        running.listen_all()
        now += 5.0
        decision = decide(TARGET, decision.record, running.observe(), now)
    return decision, now


@given(running=processes, record=records)
def test_every_member_runs_exactly_once_when_loop_goes_on_from_any_state(
    running: dict[tuple[MemberId, Epoch], bool], record: dict[MemberId, MemberState]
) -> None:
    fake = FakeProcesses(running)
    decision, _ = settle(fake, record, 0.0)
    assert decision.actions == ()
    assert decision.state == "ready"
    assert sorted(name for name, _ in fake.running) == sorted(MEMBERS)
    assert all(decision.record[name].epoch == epoch for name, epoch in fake.running)


@given(running=processes, record=records, now=st.floats(0, 1000))
def test_result_is_the_same_when_actions_are_applied_twice(
    running: dict[tuple[MemberId, Epoch], bool], record: dict[MemberId, MemberState], now: float
) -> None:
    """CL-1."""
    once, twice = FakeProcesses(running), FakeProcesses(running)
    decision = decide(TARGET, record, once.observe(), now)
    once.apply(decision.actions)
    twice.apply(decision.actions)
    twice.apply(decision.actions)
    assert once.running == twice.running and once.started == twice.started
    again = decide(TARGET, decision.record, once.observe(), now)
    assert again.actions == ()


@given(running=processes, record=records)
def test_each_start_has_a_newer_epoch_when_members_are_restarted(
    running: dict[tuple[MemberId, Epoch], bool], record: dict[MemberId, MemberState]
) -> None:
    fake = FakeProcesses(running)
    decision, now = settle(fake, record, 0.0)
    fake.running.clear()
    settle(fake, decision.record, now)
    seen: dict[MemberId, Epoch] = {name: state.epoch for name, state in record.items()}
    for member_id, epoch in running:
        seen[member_id] = max(epoch, seen.get(member_id, Epoch(0)))
    for member_id, epoch in fake.started:
        assert epoch > seen.get(member_id, Epoch(0))
        seen[member_id] = epoch


def test_running_members_are_adopted_when_the_record_is_lost() -> None:
    fake = FakeProcesses({(name, Epoch(4)): True for name in MEMBERS})
    decision = decide(TARGET, {}, fake.observe(), 0.0)
    assert decision.actions == ()
    assert {state.epoch for state in decision.record.values()} == {Epoch(4)}


def test_restart_waits_longer_when_a_member_ends_again_and_again() -> None:
    fake = FakeProcesses()
    decision, now = settle(fake, {}, 0.0)
    waits = []
    for _ in range(3):
        fake.running.pop((PREFILL, decision.record[PREFILL].epoch))
        decision = decide(TARGET, decision.record, fake.observe(), now)
        assert (
            decision.actions == ()
            and decision.state == "degraded"
            and decision.reason == "prefill-0: the process ended"
        )
        waits.append(decision.record[PREFILL].retry_at_s - now)
        now += waits[-1]
        decision = decide(TARGET, decision.record, fake.observe(), now)
        assert len(decision.actions) == 1
        fake.apply(decision.actions)
        fake.listen_all()
        decision = decide(TARGET, decision.record, fake.observe(), now)
        assert decision.state == "ready"
    assert waits == [BACKOFF_MIN_S, 2 * BACKOFF_MIN_S, 4 * BACKOFF_MIN_S]
    stable = decide(TARGET, decision.record, fake.observe(), now + STABLE_S)
    assert stable.record[PREFILL].num_restarts == 0


def test_cluster_fails_with_the_reason_when_a_member_never_listens() -> None:
    fake = FakeProcesses()
    decision, now = decide(TARGET, {}, [], 0.0), 0.0
    fake.apply(decision.actions)
    for _ in range(60):
        observed = [
            Observed(id=one.id, role=one.role, epoch=one.epoch, alive=False, problem="no such model")
            if one.id == PREFILL
            else one
            for one in fake.observe()
        ]
        decision = decide(TARGET, decision.record, observed, now)
        fake.apply(decision.actions)
        fake.listen_all()
        now += 1.0
    assert decision.state == "failed"
    assert decision.reason == f"prefill-0 failed to start {START_FAILURES_MAX} times: no such model"
    assert len([1 for name, _ in fake.started if name == PREFILL]) == START_FAILURES_MAX


def test_member_is_stopped_and_counted_when_it_does_not_listen_in_time() -> None:
    fake = FakeProcesses()
    decision = decide(TARGET, {}, fake.observe(), 0.0)
    fake.apply(decision.actions)
    early = decide(TARGET, decision.record, fake.observe(), START_TIMEOUT_S - 1)
    assert early.actions == ()
    late = decide(TARGET, decision.record, fake.observe(), START_TIMEOUT_S)
    assert {action.id for action in late.actions if isinstance(action, Stop)} == set(MEMBERS)
    assert late.record[PREFILL].num_start_failures == 1


def test_no_prefill_worker_is_wanted_when_mode_is_colocated() -> None:
    config = ClusterConfig.model_validate({**CONFIG.model_dump(), "mode": "colocated", "prefill": {"workers": 0}})
    assert list(Target(config=config, model_path=Path("m")).members()) == ["decode-0", "router-0"]
