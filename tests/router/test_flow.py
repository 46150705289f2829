"""The request state machine. Goal: RQ-1, TX-2 and RQ-2 whatever arrives in whatever order.

Method: single cases, and random sequences of messages (of this and of older attempts), losses, stop strings, time and
cancellation, against a small independent record of who holds what and which tokens were delivered.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    PdclusterError,
    RequestCancelledError,
    StalledError,
    WorkerLostError,
)
from core.ids import Attempt, Epoch, LeaseId, RequestId, WorkerId
from core.messages import (
    Cancel,
    Credit,
    Offer,
    Prefill,
    PullDone,
    Refused,
    Release,
    Renew,
    RequestMessage,
    Submit,
    Tokens,
    TokenUpdate,
)
from core.request import TERMINAL_STATES, FinishReason, Request, RequestState, SamplingParams
from router.actions import DEFAULT_STALL_LIMITS, Deliver, Fail, Finish, FlowAction, Send, StallLimits
from router.flow import ATTEMPTS_MAX, RESELECT_WAIT_S, RequestFlow
from router.select import Pair, WorkerLife

DECODE, PREFILL = WorkerId("decode-0"), WorkerId("prefill-0")
PAIR = Pair(decode=WorkerLife(worker=DECODE, epoch=Epoch(1)), prefill=WorkerLife(worker=PREFILL, epoch=Epoch(1)))
ID = RequestId("r-0")


def make_flow(num_children: int = 1) -> RequestFlow:
    sampling = SamplingParams(max_tokens=8)
    request = Request(request_id=ID, token_ids=(1,) * 33, sampling=sampling, num_children=num_children, deadline_s=600)
    return RequestFlow(request, 0.0)


def credit(attempt: int = 0, held: int = 0) -> Credit:
    return Credit(request_id=ID, attempt=Attempt(attempt), num_held_blocks=held, num_demanded_blocks=2, ttl_s=5)


def offer(attempt: int = 0, *, is_final: bool = True, epoch: int = 1) -> Offer:
    return Offer(
        request_id=ID,
        attempt=Attempt(attempt),
        worker=PREFILL,
        epoch=Epoch(epoch),
        lease_id=LeaseId(attempt),
        lease_ttl_s=30,
        first_block_index=0,
        block_ids=(),
        digests=(),
        is_final=is_final,
    )


def pull_done(attempt: int = 0) -> PullDone:
    return PullDone(
        request_id=ID,
        attempt=Attempt(attempt),
        lease_id=LeaseId(attempt),
        num_blocks=2,
        num_bytes=1,
        transfer_s=0,
        read_s=0,
    )


def tokens(
    first: int, count: int = 1, *, attempt: int = 0, child: int = 0, reason: FinishReason | None = None
) -> Tokens:
    update = TokenUpdate(child=child, first_index=first, token_ids=(7,) * count, finish_reason=reason)
    return Tokens(request_id=ID, attempt=Attempt(attempt), updates=(update,))


def refused(kind: str, attempt: int = 0) -> Refused:
    return Refused(request_id=ID, attempt=Attempt(attempt), kind=kind, reason="no")  # type: ignore[arg-type]


def start() -> RequestFlow:
    flow = make_flow()
    flow.assign(PAIR, 0.0)
    return flow


def sent(actions: list[FlowAction]) -> list[tuple[str, str]]:
    return [(a.worker, type(a.message).__name__) for a in actions if isinstance(a, Send)]


def error_of(actions: list[FlowAction]) -> PdclusterError:
    assert isinstance(actions[-1], Fail)
    return actions[-1].error


def test_messages_go_where_they_belong_when_all_is_well() -> None:
    flow = make_flow()
    assert sent(flow.assign(PAIR, 0.0)) == [(DECODE, "Submit")]
    assert sent(flow.handle(DECODE, credit(), 1.0)) == [(PREFILL, "Prefill")]
    relayed = offer(is_final=False)
    assert flow.handle(PREFILL, relayed, 2.0) == [Send(worker=DECODE, message=relayed)]
    assert flow.state == RequestState.PREFILLING
    renew = Renew(request_id=ID, attempt=Attempt(0), lease_id=LeaseId(0))
    assert flow.handle(DECODE, renew, 2.5) == [Send(worker=PREFILL, message=renew)]
    assert sent(flow.handle(PREFILL, offer(), 3.0)) == [(DECODE, "Offer")]
    assert sent(flow.handle(DECODE, pull_done(), 4.0)) == [(PREFILL, "Release")]
    assert isinstance(flow.handle(DECODE, tokens(0), 5.0)[0], Deliver)
    actions = flow.handle(DECODE, tokens(1, reason="length"), 6.0)
    assert isinstance(actions[0], Deliver) and actions[1:] == [Finish()]
    assert flow.facts.first_token_s == 5.0 and flow.is_ended


@pytest.mark.parametrize(
    "bad",
    [
        tokens(2),
        tokens(0),
        tokens(1, child=1),
        tokens(1, child=-1),
        tokens(1, reason="error"),
        tokens(1, reason="cancelled"),
    ],
)
def test_request_fails_when_the_stream_has_a_gap_a_duplicate_or_a_stranger(bad: Tokens) -> None:
    flow = start()
    flow.handle(DECODE, credit(held=2), 0.0)
    flow.handle(DECODE, tokens(0), 0.0)
    actions = flow.handle(DECODE, bad, 0.0)
    assert error_of(actions).http_status == 500 and sent(actions) == [(DECODE, "Cancel")]


def test_tokens_after_a_stop_string_are_ignored_when_other_children_run() -> None:
    flow = make_flow(num_children=2)
    flow.assign(PAIR, 0.0)
    flow.handle(DECODE, credit(held=2), 0.0)
    flow.handle(DECODE, tokens(0, child=1), 0.0)
    assert flow.end_child(1) == []
    assert flow.handle(DECODE, tokens(1, child=1), 0.0) == []
    assert flow.handle(DECODE, tokens(2, child=1, reason="length"), 0.0) == []
    actions = flow.handle(DECODE, tokens(0, child=0, reason="stop"), 0.0)
    assert actions[1:] == [Finish()]


def test_decode_is_cancelled_when_every_child_ended_by_a_stop_string() -> None:
    flow = start()
    flow.handle(DECODE, credit(held=2), 0.0)
    flow.handle(DECODE, tokens(0), 0.0)
    actions = flow.end_child(0)
    assert sent(actions) == [(DECODE, "Cancel")] and actions[-1] == Finish()


@pytest.mark.parametrize(
    "old", [credit(), offer(), pull_done(), tokens(0), refused("transfer_failed"), refused("invalid")], ids=repr
)
def test_nothing_happens_when_a_message_is_of_an_older_attempt(old: RequestMessage) -> None:
    flow = start()
    flow.handle(DECODE, refused("transfer_failed"), 0.0)
    flow.assign(PAIR, 1.0)
    before = (flow.state, flow.next_deadline())
    assert flow.handle(DECODE, old, 2.0) == [] and flow.handle(PREFILL, old, 2.0) == []
    assert (flow.state, flow.next_deadline()) == before


def test_nothing_happens_when_an_offer_is_of_another_epoch() -> None:
    flow = start()
    flow.handle(DECODE, credit(), 0.0)
    assert flow.handle(PREFILL, offer(epoch=0), 0.0) == []


def test_attempt_grows_and_both_are_cancelled_when_a_phase_stalls() -> None:
    flow = start()
    flow.handle(DECODE, credit(), 0.0)
    actions = flow.expire(flow.next_deadline())
    assert sent(actions) == [(DECODE, "Cancel"), (PREFILL, "Cancel")]
    assert flow.attempt == 1 and flow.state is RequestState.SELECTED and flow.failed == {DECODE: 1, PREFILL: 1}


def test_request_fails_when_the_stream_stalls_after_a_token() -> None:
    flow = start()
    flow.handle(DECODE, credit(held=2), 0.0)
    flow.handle(DECODE, tokens(0), 10.0)
    nothing = Tokens(request_id=ID, attempt=Attempt(0), updates=())
    assert flow.handle(DECODE, nothing, 10.0 + DEFAULT_STALL_LIMITS.stream_s - 1) == []
    assert flow.expire(10.0 + DEFAULT_STALL_LIMITS.stream_s - 1) == []
    assert isinstance(error_of(flow.expire(10.0 + DEFAULT_STALL_LIMITS.stream_s)), StalledError)


def test_limits_of_progress_are_those_given_when_a_prompt_or_a_stream_stalls() -> None:
    request = make_flow().request
    flow = RequestFlow(request, 0.0, StallLimits(prompt_s=3.0, stream_s=2.0))
    flow.assign(PAIR, 0.0)
    assert flow.next_deadline() == 3.0
    flow.handle(DECODE, credit(held=2), 1.0)
    assert flow.next_deadline() == 4.0
    flow.handle(DECODE, tokens(0), 3.0)
    assert flow.next_deadline() == 5.0


def test_wait_is_longer_by_the_time_that_the_router_slept() -> None:
    """Its own deadline is not: nobody waits for the client."""
    flow = start()
    flow.slept(400.0)
    assert flow.expire(DEFAULT_STALL_LIMITS.prompt_s + 1) == []
    assert isinstance(error_of(flow.expire(600.0)), DeadlineExceededError)


def test_deadline_is_the_reason_when_a_worker_sees_it_first() -> None:
    flow = start()
    assert isinstance(error_of(flow.handle(DECODE, refused("overloaded"), 600.0)), DeadlineExceededError)


def test_both_workers_let_go_and_the_reader_is_told_when_a_request_is_aborted() -> None:
    flow = start()
    flow.handle(DECODE, credit(), 0.0)
    actions = flow.abort()
    assert sent(actions) == [(DECODE, "Cancel"), (PREFILL, "Cancel")]
    assert isinstance(error_of(actions), RequestCancelledError)
    assert flow.state is RequestState.CANCELLED and flow.abort() == flow.cancel() == []


def test_both_workers_are_to_blame_when_blocks_did_not_get_from_one_to_the_other() -> None:
    """A prefill worker that is stopped shows as a lapsed credit at the decode worker."""
    for kind in ("transfer_failed", "credit_lapsed", "unknown_peer"):
        flow = start()
        flow.handle(DECODE, refused(kind), 0.0)
        assert set(flow.failed) == {DECODE, PREFILL}
    flow = start()
    flow.handle(DECODE, refused("draining"), 0.0)
    assert set(flow.failed) == {DECODE}


def test_retry_gives_up_with_the_first_reason_when_no_pair_comes() -> None:
    flow = start()
    flow.worker_lost(PAIR.decode, 0.0)
    assert not flow.needs_pair(0.0) and flow.needs_pair(1.0)
    assert flow.no_pair("decode") == []
    assert isinstance(error_of(flow.expire(RESELECT_WAIT_S + 1)), WorkerLostError)


@pytest.mark.parametrize(("kind", "error"), [("overloaded", OverloadedError), ("invalid", InvalidRequestError)])
def test_no_retry_when_decode_will_not_take_it(kind: str, error: type[PdclusterError]) -> None:
    actions = start().handle(DECODE, refused(kind), 0.0)
    assert isinstance(error_of(actions), error) and sent(actions) == []


def test_prefill_overload_is_retried() -> None:
    flow = start()
    flow.handle(DECODE, credit(), 0.0)
    assert sent(flow.handle(PREFILL, refused("overloaded"), 0.0)) == [(DECODE, "Cancel")]
    assert flow.attempt == 1


def test_loss_of_prefill_is_nothing_when_the_blocks_are_pulled() -> None:
    flow = start()
    for source, message in ((DECODE, credit()), (PREFILL, offer()), (DECODE, pull_done())):
        flow.handle(source, message, 0.0)
    assert PAIR.prefill is not None and flow.worker_lost(PAIR.prefill, 0.0) == []
    assert flow.state is RequestState.DECODING


class Record:
    """What an observer of the actions knows, independent of the flow."""

    def __init__(self, num_children: int) -> None:
        self.held: set[tuple[WorkerId, int]] = set()
        self.next_index = [0] * num_children
        self.sent_index = [0] * num_children
        """Tokens that the decode worker sent, those after a stop string included."""
        self.ended: set[int] = set()
        """Children that the decode worker ended in the current attempt."""
        self.num_terminal = 0
        self.num_submits = 0

    def note(self, actions: list[FlowAction]) -> None:
        assert not (actions and self.num_terminal), "actions after the end"
        for action in actions:
            if isinstance(action, Deliver):
                for update in action.updates:
                    assert update.first_index == self.next_index[update.child], "RQ-1: gap or duplicate"
                    self.next_index[update.child] += len(update.token_ids)
            elif isinstance(action, Send):
                self._sent(action)
            else:
                self.num_terminal += 1
        assert self.num_terminal <= 1

    def _sent(self, action: Send) -> None:
        message = action.message
        if isinstance(message, Submit | Prefill):
            assert not any(self.next_index), "a retry after a delivered token"
            self.held.add((action.worker, message.attempt))
            self.num_submits += isinstance(message, Submit)
        elif isinstance(message, Cancel | Release):
            self.held.discard((action.worker, message.attempt))


COMMANDS = [
    "assign", "credit", "credit", "held", "offer", "final", "final", "done", "done", "renew",
    "token", "token", "token", "end", "end", "gap", "stop", "lose decode", "lose decode", "lose prefill", "time",
    "cancel",
    "decode transfer_failed", "decode overloaded", "prefill transfer_failed", "prefill overloaded", "decode draining",
]  # fmt: skip

GOOD = ["assign", "credit", "offer", "final", "done", "token", "token"]
"""What happens before anything goes wrong."""


@settings(max_examples=100)
@given(
    commands=st.lists(st.tuples(st.sampled_from(COMMANDS), st.integers(0, 1), st.integers(0, 9)), max_size=20),
    num_good=st.integers(0, len(GOOD)),
    num_children=st.integers(1, 2),
    ending=st.sampled_from(["cancel", "time"]),
)
def test_invariants_hold_when_anything_happens_in_any_order(
    commands: list[tuple[str, int, int]], num_good: int, num_children: int, ending: str
) -> None:
    flow, record, now = make_flow(num_children), Record(num_children), 0.0
    for command, child, age in [*((good, 0, 9) for good in GOOD[:num_good]), *commands]:
        now += 0.3  # longer than any delay before a retry
        if age % 2 and flow.needs_pair(now):
            record.note(flow.assign(PAIR, now))
        attempt = max(0, flow.attempt - 1) if age < 3 else flow.attempt
        record.note(perform(flow, record, command, child % num_children, attempt, now))
        if command == "cancel" or flow.is_ended:
            assert not record.held, f"held after the end: {record.held}"
    if ending == "cancel":
        record.note(flow.cancel())
    for _ in range(2 * ATTEMPTS_MAX):
        now = max(now, flow.next_deadline())
        record.note(flow.expire(now))
        if flow.needs_pair(now):
            record.note(flow.assign(PAIR, now))
    record.note(flow.expire(now + 1000))
    assert flow.is_ended and not record.held and record.num_submits <= ATTEMPTS_MAX
    assert record.num_terminal == (0 if flow.state is RequestState.CANCELLED else 1)


def perform(flow: RequestFlow, record: Record, command: str, child: int, attempt: int, now: float) -> list[FlowAction]:
    """One input. What a worker says about the current attempt changes what it holds."""
    if command == "assign":
        return flow.assign(PAIR, now) if flow.needs_pair(now) else []
    if command == "time":
        return flow.expire(now)
    if command == "cancel":
        return flow.cancel()
    if command == "stop":
        return flow.end_child(child) if record.next_index[child] else []
    if command.startswith("lose"):
        life = PAIR.decode if command == "lose decode" else PAIR.prefill
        assert life is not None
        record.held = {(worker, a) for worker, a in record.held if worker != life.worker}
        return flow.worker_lost(life, now)
    first, *rest = command.split()
    if rest:
        worker = DECODE if first == "decode" else PREFILL
        if (worker, attempt) not in record.held:
            return []
        record.held.discard((worker, attempt))
        return flow.handle(worker, refused(rest[0], attempt), now)
    source, message = worker_message(record, command, child, attempt)
    is_heard = attempt == flow.attempt and flow.state not in (RequestState.SELECTED, *TERMINAL_STATES)
    actions = flow.handle(source, message, now)
    if isinstance(message, Tokens) and is_heard and not any(isinstance(action, Fail) for action in actions):
        record.sent_index[child] += 1
        if command == "end":
            record.ended.add(child)
        if len(record.ended) == len(record.next_index):
            record.held.discard((DECODE, attempt))
    return actions


def worker_message(record: Record, command: str, child: int, attempt: int) -> tuple[WorkerId, RequestMessage]:
    index = record.sent_index[child]
    reason: FinishReason | None = "length" if command == "end" else None
    return {
        "credit": (DECODE, credit(attempt)),
        "held": (DECODE, credit(attempt, held=2)),
        "offer": (PREFILL, offer(attempt, is_final=False)),
        "final": (PREFILL, offer(attempt)),
        "done": (DECODE, pull_done(attempt)),
        "renew": (DECODE, Renew(request_id=ID, attempt=Attempt(attempt), lease_id=LeaseId(attempt))),
        "token": (DECODE, tokens(index, attempt=attempt, child=child)),
        "end": (DECODE, tokens(index, attempt=attempt, child=child, reason=reason)),
        "gap": (DECODE, tokens(index + 1, attempt=attempt, child=child)),
    }[command]
