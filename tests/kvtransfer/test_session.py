"""The pull session: single rules by example, and every interleaving of offers and results by property (TX-1, TX-2)."""

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.ids import Attempt, BlockDigest, BlockId, Epoch, LeaseId, RequestId, WorkerId
from core.messages import Offer
from core.request import AttemptKey
from kvtransfer.session import LEASE_MARGIN_S, BlockPull, PullSession, SessionFailure, SessionState
from kvtransfer.transport.base import Peer

KEY = AttemptKey(request_id=RequestId("r"), attempt=Attempt(1))
PEER = Peer(worker=WorkerId("prefill-0"), epoch=Epoch(3))
FIRST, TOTAL, CREDIT_S, TTL_S = 2, 5, 4.0, 30.0


def make_session(num_blocks: int = TOTAL) -> PullSession:
    return PullSession(KEY, PEER, FIRST, num_blocks, CREDIT_S)


def make_offer(count: int, total: int = TOTAL, **changes: Any) -> Offer:
    offer = Offer(
        request_id=KEY.request_id,
        attempt=KEY.attempt,
        worker=PEER.worker,
        epoch=PEER.epoch,
        lease_id=LeaseId(9),
        lease_ttl_s=TTL_S,
        first_block_index=FIRST,
        block_ids=tuple(BlockId(100 + i) for i in range(count)),
        digests=tuple(BlockDigest(1000 + i) for i in range(count)),
        is_final=count == total,
    )
    return msgspec.structs.replace(offer, **changes)


def pulls_of(outcome: list[BlockPull] | SessionFailure) -> list[int]:
    assert isinstance(outcome, list), outcome
    assert [(p.source, p.digest) for p in outcome] == [(100 + p.index, 1000 + p.index) for p in outcome]
    return [p.index for p in outcome]


def test_only_new_blocks_are_pulled_when_offers_grow() -> None:
    session = make_session()
    session.bind([BlockId(i) for i in range(TOTAL)])
    assert pulls_of(session.on_offer(make_offer(2), 1.0)) == [0, 1]
    assert pulls_of(session.on_offer(make_offer(5), 2.0)) == [2, 3, 4]
    assert session.in_flight == 5
    session.on_verified([1, 3])
    assert session._prefix == 0
    session.on_verified([0])
    assert session._prefix == 2
    session.on_verified([2, 4])
    assert session.is_complete
    session.check()


def test_nothing_changes_when_an_offer_comes_again_or_late() -> None:
    session = make_session()
    session.on_offer(make_offer(3), 1.0)
    deadline = session.deadline_s
    assert pulls_of(session.on_offer(make_offer(3), 20.0)) == []
    assert pulls_of(session.on_offer(make_offer(2), 20.0)) == []
    assert session.deadline_s == deadline


@pytest.mark.parametrize("changes", [{"attempt": Attempt(0)}, {"epoch": Epoch(2)}, {"request_id": RequestId("q")}])
def test_nothing_changes_when_an_offer_is_of_an_older_attempt_or_epoch(changes: dict[str, Any]) -> None:
    session = make_session()
    assert pulls_of(session.on_offer(make_offer(3, **changes), 1.0)) == []
    assert session.state is SessionState.CREDITED
    assert session.deadline_s == CREDIT_S


BAD_OFFERS: dict[str, dict[str, Any]] = {
    "newer epoch": {"epoch": Epoch(4)},
    "another worker": {"worker": WorkerId("prefill-1")},
    "another start": {"first_block_index": 3},
    "fewer digests": {"digests": (BlockDigest(1000),)},
    "final too early": {"is_final": True},
    "more than demanded": {"block_ids": tuple(range(6)), "digests": tuple(range(6))},
    "no time to live": {"lease_ttl_s": 0.0},
    "endless time to live": {"lease_ttl_s": math.inf},
    "undefined time to live": {"lease_ttl_s": math.nan},
}
CHANGED_OFFERS: dict[str, dict[str, Any]] = {
    "another lease": {"lease_id": LeaseId(8)},
    "changed block": {"block_ids": (BlockId(100), BlockId(55), BlockId(102))},
    "changed digest": {"digests": (BlockDigest(1000), BlockDigest(1001), BlockDigest(5))},
}


@pytest.mark.parametrize("name", BAD_OFFERS)
def test_session_fails_when_the_first_offer_is_wrong(name: str) -> None:
    session = make_session()
    failure = session.on_offer(make_offer(3, **BAD_OFFERS[name]), 1.0)
    assert isinstance(failure, SessionFailure)
    assert (failure.kind, session.state) == ("invalid", SessionState.FAILED)
    assert "prefill-" in failure.reason


@pytest.mark.parametrize("name", CHANGED_OFFERS)
@pytest.mark.parametrize("known", [3, 4])
def test_session_fails_when_a_later_offer_contradicts(name: str, known: int) -> None:
    session = make_session()
    session.on_offer(make_offer(known), 1.0)
    assert isinstance(session.on_offer(make_offer(3, **CHANGED_OFFERS[name]), 1.0), SessionFailure)


def test_a_bad_block_is_read_once_more_when_its_first_read_was_bad() -> None:
    session = make_session()
    session.on_offer(make_offer(5), 1.0)
    session.on_verified([0, 1, 4])
    assert pulls_of(session.on_bad([2, 3], "digest")) == [2, 3]
    session.on_verified([3])
    assert not session.is_complete
    failure = session.on_bad([2], "digest again")
    assert isinstance(failure, SessionFailure)
    assert failure.kind == "transfer_failed"
    assert "block 4" in failure.reason
    assert "digest again" in failure.reason


def test_session_is_not_complete_when_all_is_verified_but_not_said_to_be_all() -> None:
    session = make_session()
    session.on_offer(make_offer(5, is_final=False), 1.0)
    session.on_verified([0, 1, 2, 3, 4])
    assert not session.is_complete
    assert pulls_of(session.on_offer(make_offer(5), 1.5)) == []
    assert session.is_complete


def test_the_lease_is_rebased_and_renewed_when_time_goes_on() -> None:
    session = make_session()
    assert (session.deadline_s, session.renew_at_s) == (CREDIT_S, math.inf)
    session.on_offer(make_offer(2), 3.0)
    assert session.deadline_s == 3.0 + TTL_S - LEASE_MARGIN_S
    assert session.renew_at_s == 13.0
    session.renewed(13.0)
    assert session.deadline_s == 13.0 + TTL_S - LEASE_MARGIN_S
    assert session.renew_at_s == 23.0
    session.cancel()
    assert session.deadline_s == math.inf


def test_targets_stay_in_flight_when_a_session_is_cancelled() -> None:
    session = make_session()
    session.on_offer(make_offer(4), 1.0)
    session.cancel()
    assert pulls_of(session.on_offer(make_offer(5), 1.0)) == []
    session.on_verified([0])
    assert pulls_of(session.on_bad([1], "lost")) == []
    assert session.in_flight == 2
    session.on_ended(2)
    assert (session.in_flight, session.state) == (0, SessionState.CANCELLED)


def test_a_result_is_a_broken_invariant_when_nothing_was_in_flight() -> None:
    session = make_session()
    session.on_offer(make_offer(2), 1.0)
    session.on_verified([0])
    with pytest.raises(AssertionError, match="not in flight"):
        session.on_verified([0])


ACTIONS = ("offer", "offer", "old_offer", "older_attempt", "verified", "verified", "bad", "cancel", "expire", "garbage")


class Model:
    """A session beside what is known of it: blocks verified, blocks being read, bad reads per block."""

    def __init__(self, seed: int, total: int) -> None:
        self.rng, self.total, self.now = random.Random(seed), total, 0.0
        self.session = PullSession(KEY, PEER, FIRST, total, CREDIT_S)
        self.verified: set[int] = set()
        self.flying: set[int] = set()
        self.bad_reads: dict[int, int] = {}
        self.offered = 0

    def step(self, action: str) -> None:
        was_open = self.session.is_open
        self.now += self.rng.random() * 0.05
        if action in ("verified", "bad"):
            self._end_reads(action, was_open)
        elif action == "cancel" and self.rng.random() < 0.2:
            self.session.cancel()
        elif action == "expire" and self.rng.random() < 0.2 and was_open:
            self.session.fail("transfer_failed", "the lease ended before every block was read")
        else:
            self._offer(action)
        assert was_open or not self.session.is_open
        self._agree()

    def _offer(self, action: str) -> None:
        total, session, now = self.total, self.session, self.now
        if action == "offer":
            self.offered = self.rng.randint(self.offered, total)
            self._take(session.on_offer(make_offer(self.offered, total), now))
        elif action == "old_offer":
            count = self.rng.randint(0, self.offered)
            self._take(session.on_offer(make_offer(count, total, is_final=False), now))
        elif action == "older_attempt":
            self._take(session.on_offer(make_offer(total, total, attempt=Attempt(0)), now))
        elif action == "garbage" and self.offered > 0 and self.rng.random() < 0.2:
            self._take(session.on_offer(make_offer(total, total, digests=(BlockDigest(1),) * total), now))

    def _end_reads(self, action: str, was_open: bool) -> None:
        if not self.flying:
            return
        indexes = self.rng.sample(sorted(self.flying), self.rng.randint(1, len(self.flying)))
        self.flying.difference_update(indexes)
        if action == "verified":
            self.verified.update(indexes if was_open else [])
            self.session.on_verified(indexes)
            return
        for index in indexes:
            self.bad_reads[index] = self.bad_reads.get(index, 0) + 1
        self._take(self.session.on_bad(indexes, "bad"))

    def _take(self, outcome: list[BlockPull] | SessionFailure) -> None:
        if isinstance(outcome, list):
            indexes = pulls_of(outcome)
            assert not self.flying & set(indexes)
            assert not self.verified & set(indexes)
            self.flying.update(indexes)

    def _agree(self) -> None:
        self.session.check()
        assert self.session.in_flight == len(self.flying)
        assert self.session._prefix == next(i for i in range(self.total + 1) if i not in self.verified)
        if self.session.is_complete:
            assert self.verified == set(range(self.total))
            assert not self.flying


@given(seed=st.integers(0, 2**32), total=st.integers(1, 6), actions=st.lists(st.sampled_from(ACTIONS), max_size=40))
def test_complete_means_verified_when_anything_interleaves(seed: int, total: int, actions: list[str]) -> None:
    """Goal: TX-1 and TX-2.

    Method: random offers (lost, repeated, reordered, shrunk, corrupt) and results in any order against a model that
    remembers which block was verified; then everything left is delivered, and the session must be complete with exactly
    the demanded set, or ended.
    """
    model = Model(seed, total)
    for action in actions:
        model.step(action)
    model.offered = total
    for action in ["offer", *["verified"] * 40]:
        model.step(action)
    session = model.session
    assert session.in_flight == 0
    assert not session.is_open
    if session.state is SessionState.FAILED and session.failure and session.failure.kind == "transfer_failed":
        assert max(model.bad_reads.values(), default=0) > 1 or "ended before" in session.failure.reason
