"""Planted faults in the books of both workers and of the router: `check` finds each at once, and names it.

Without a fault the same course passes: that is what every other test with the `Pair` harness shows, which checks after
each step.
"""

from collections.abc import Callable

import pytest

from core.books import find_problems
from core.clock import ManualClock
from core.ids import Attempt, RequestId, RouterId
from core.messages import Audit, Audited
from core.request import Request, SamplingParams
from decode.live import LiveRequest
from decode.reception import Reception
from engine.scheduler import Sequence
from kvtransfer.lease import Lease
from router.admission import Admission
from tests.e2e.conftest import ROUTER, Pair

Plant = Callable[[Pair], object]


def _pull(pair: Pair) -> None:
    """A request whose blocks are leased on one side and being read on the other."""
    pair.fabric.faults = type(pair.fabric.faults)(delay_s=(5.0, 5.0))
    pair.submit("r", list(range(30)))
    for _ in range(20):
        pair.step()
        pair.clock.advance(0.01)
    assert pair.prefill.status().num_leases == 1 and pair.decode.books()["receptions"] == 1


def _lease(pair: Pair) -> Lease:
    return next(iter(pair.prefill._leases._leases.values()))


def _reception(pair: Pair) -> Reception:
    return next(iter(pair.decode._intake._active.values()))


def _end_session(pair: Pair) -> None:
    session = _reception(pair).session
    assert session is not None
    session.cancel()


def _forget_deadline(pair: Pair) -> None:
    _reception(pair).deadline_s = float("inf")


def _queue_nobody(pair: Pair) -> None:
    pair.decode._scheduler.add(Sequence(name="stray", token_ids=[1], prompt_length=1, sampling=None))


def _rename_target(pair: Pair) -> None:
    reception = _reception(pair)
    reception.targets = reception.targets[::-1]


def _lose_peer(pair: Pair) -> None:
    pair.decode._intake._peers.clear()


def _let_deadline_pass(pair: Pair) -> None:
    _reception(pair).deadline_s = pair.clock.now() - 1.0


def _forget_quarantine(pair: Pair) -> None:
    """The reads of a request that was given up go on, and nobody remembers their targets."""
    pair.decode._intake.cancel(RequestId("r"))
    pair.decode.check()
    pair.decode._intake._abandoned.clear()


def _free_quarantine(pair: Pair) -> None:
    """Targets are given back while reads may still write to them."""
    pair.decode._intake.cancel(RequestId("r"))
    (reception,) = pair.decode._intake._abandoned.values()
    pair.decode._pool.release(reception.targets)
    reception.targets = []


PLANTS: dict[str, tuple[str, Plant]] = {
    "leaked block": ("KV-1: block", lambda pair: pair.decode._pool.allocate(1)),
    "pin without a lease": ("KV-1: block", lambda pair: pair.prefill._pool.acquire(_lease(pair).block_ids)),
    "lease without its pins": ("KV-1: block", lambda pair: pair.prefill._pool.release(_lease(pair).block_ids)),
    "lease forgotten": ("KV-4", lambda pair: pair.prefill._leases._leases.clear()),
    "block released twice": ("KV-1: block", lambda pair: pair.decode._pool.release(_reception(pair).targets[:1])),
    "sequence of nobody": ("RQ-1: scheduled for no live request", _queue_nobody),
    "targets that the reads do not know": ("TX-1", _rename_target),
    "wait for a peer that is gone": ("RQ-2: .* reads from", _lose_peer),
    "wait past its deadline": ("RQ-2: .* past its deadline", _let_deadline_pass),
    "quarantine forgotten": ("TX-1: .* waits for 0 blocks, the puller reads", _forget_quarantine),
    "quarantine given back too early": ("TX-1: .* quarantined without targets", _free_quarantine),
    "reception forgotten": ("TX-1", lambda pair: pair.decode._intake._active.clear()),
    "session ended in silence": ("TX-1", _end_session),
    "request without an end": ("RQ-2", _forget_deadline),
    "block in two places": ("KV-1", lambda pair: pair.decode._pool._free.append(pair.decode._pool._free[0])),
}


@pytest.mark.parametrize("name", PLANTS)
def test_check_finds_it_when_the_books_are_wrong(name: str, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    _pull(pair)
    pair.decode.check()
    pair.prefill.check()
    expected, plant = PLANTS[name]
    plant(pair)
    with pytest.raises(AssertionError, match=expected):
        pair.decode.check()
        pair.prefill.check()


def test_every_owner_reports_when_several_books_are_wrong(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    _pull(pair)
    _forget_deadline(pair)
    pair.decode._pool.allocate(1)
    _queue_nobody(pair)
    numbers = [problem.partition(":")[0] for problem in find_problems(pair.decode.checks())]
    assert sorted(numbers) == ["KV-1", "RQ-1", "RQ-2"]


def test_prompt_that_nobody_computes_any_more_is_found(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(**{"prefill.max_batched_tokens": 4})
    pair.submit("r", list(range(30)))
    for _ in range(3):
        pair.step()
    (handoff,) = pair.prefill._handoffs.values()
    pair.prefill._scheduler.remove(handoff.sequence)
    with pytest.raises(AssertionError, match="RQ-1: the hand-off of r attempt 0 is not computed any more"):
        pair.prefill.check()


def test_audit_answers_with_the_problem_instead_of_failing(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.decode._pool.allocate(1)
    pair.decode.handle(ROUTER, Audit(number=7), 0.0)
    ((router, answer),) = pair.decode.take_outbound()
    assert router == RouterId("router-0") and isinstance(answer, Audited)
    assert answer.number == 7 and answer.problems[0].startswith("KV-1: block")
    assert answer.books["blocks_used"] == 1


def test_ended_request_that_is_still_listed_is_found(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    request = Request(request_id=RequestId("r"), token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    pair.decode._live[request.request_id] = LiveRequest(
        request=request, attempt=Attempt(0), router=ROUTER, ready_s=0.0, deadline_s=1.0
    )
    with pytest.raises(AssertionError, match="RQ-1"):
        pair.decode.check()


def test_ticket_that_is_not_given_back_is_found() -> None:
    admission = Admission(clock=ManualClock(), max_requests=4, max_queued_prompt_tokens=100)
    ticket = admission.reserve(num_children=2, num_prompt_tokens=5)
    admission.check()
    admission.tickets.discard(ticket)
    with pytest.raises(AssertionError, match="RQ-1"):
        admission.check()
