"""The lease table against a dictionary, under any order of calls and any forward jump of the clock."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.ids import Attempt, BlockId, LeaseId, RequestId
from kvtransfer.lease import LeaseTable

TTL_S = 10.0
REQUEST, ATTEMPT = RequestId("r"), Attempt(0)


def test_renewal_keeps_the_later_deadline_when_the_clock_went_on() -> None:
    table = LeaseTable(TTL_S)
    lease = table.grant(REQUEST, ATTEMPT, 5.0)
    assert table.renew(lease.lease_id, 3.0)
    assert table.next_deadline() == 15.0
    assert table.renew(lease.lease_id, 8.0)
    assert table.next_deadline() == 18.0


def test_reap_finds_the_expired_lease_when_an_older_one_was_renewed() -> None:
    table = LeaseTable(TTL_S)
    first = table.grant(RequestId("a"), ATTEMPT, 0.0)
    second = table.grant(RequestId("b"), ATTEMPT, 1.0)
    table.extend(second.lease_id, [BlockId(4)])
    table.renew(first.lease_id, 9.0)
    assert [(lease.lease_id, lease.block_ids) for lease in table.reap(11.0)] == [(second.lease_id, (BlockId(4),))]
    assert table.num_leases == 1


def test_a_lease_stands_until_its_deadline_when_nobody_renews() -> None:
    table = LeaseTable(TTL_S)
    table.grant(REQUEST, ATTEMPT, 0.0)
    assert table.reap(9.999) == []
    assert len(table.reap(10.0)) == 1


def test_nothing_is_unpinned_twice_when_a_lease_is_released_again() -> None:
    table = LeaseTable(TTL_S)
    lease = table.grant(REQUEST, ATTEMPT, 0.0)
    assert table.extend(lease.lease_id, [BlockId(1), BlockId(2)])
    assert table.release(lease.lease_id) == [BlockId(1), BlockId(2)]
    assert table.release(lease.lease_id) == []
    assert table.release_request(REQUEST, ATTEMPT) == []
    assert not table.extend(lease.lease_id, [BlockId(3)])
    assert not table.renew(lease.lease_id, 1.0)
    assert table.num_blocks == 0


def test_another_attempt_keeps_its_lease_when_one_is_released() -> None:
    table = LeaseTable(TTL_S)
    old, new = table.grant(REQUEST, Attempt(0), 0.0), table.grant(REQUEST, Attempt(1), 0.0)
    table.release_request(REQUEST, Attempt(0))
    assert table.get(old.lease_id) is None
    assert table.get(new.lease_id) is not None


def test_ids_are_dense_from_one_when_leases_come_and_go() -> None:
    table = LeaseTable(TTL_S)
    ids = []
    for index in range(3):
        lease = table.grant(RequestId(str(index)), ATTEMPT, 0.0)
        table.release(lease.lease_id)
        ids.append(lease.lease_id)
    assert ids == [1, 2, 3]


def test_a_second_lease_of_one_attempt_is_a_broken_invariant_when_granted() -> None:
    table = LeaseTable(TTL_S)
    table.grant(REQUEST, ATTEMPT, 0.0)
    with pytest.raises(AssertionError, match="has lease 1 already"):
        table.grant(REQUEST, ATTEMPT, 1.0)


class LeaseMachine(RuleBasedStateMachine):
    """Goal: KV-4. Method: a dict of lease id -> [key, blocks, deadline] with the same calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(TTL_S)
        self.model: dict[int, tuple[tuple[str, int], list[int], float]] = {}
        self.now = 0.0
        self.next_block = 0

    def pick(self, choice: int) -> int:
        return sorted(self.model)[choice % len(self.model)]

    @rule(seconds=st.one_of(st.floats(0, 4), st.just(1e6)))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @rule(request=st.sampled_from("abcd"), attempt=st.integers(0, 1))
    def grant(self, request: str, attempt: int) -> None:
        key = (request, attempt)
        if any(key == held for held, _, _ in self.model.values()):
            return
        lease = self.table.grant(RequestId(request), Attempt(attempt), self.now)
        self.model[lease.lease_id] = (key, [], self.now + TTL_S)

    @precondition(lambda self: self.model)
    @rule(choice=st.integers(0, 9), count=st.integers(0, 3))
    def extend(self, choice: int, count: int) -> None:
        lease_id = self.pick(choice)
        blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        assert self.table.extend(LeaseId(lease_id), [BlockId(b) for b in blocks])
        self.model[lease_id][1].extend(blocks)

    @precondition(lambda self: self.model)
    @rule(choice=st.integers(0, 9))
    def renew(self, choice: int) -> None:
        lease_id = self.pick(choice)
        key, blocks, deadline = self.model[lease_id]
        assert self.table.renew(LeaseId(lease_id), self.now)
        self.model[lease_id] = (key, blocks, max(deadline, self.now + TTL_S))

    @precondition(lambda self: self.model)
    @rule(choice=st.integers(0, 9), by_request=st.booleans())
    def release(self, choice: int, by_request: bool) -> None:
        lease_id = self.pick(choice)
        (request, attempt), blocks, _ = self.model.pop(lease_id)
        if by_request:
            assert self.table.release_request(RequestId(request), Attempt(attempt)) == blocks
        else:
            assert self.table.release(LeaseId(lease_id)) == blocks

    @rule(lease_id=st.integers(1000, 1002))
    def release_unknown(self, lease_id: int) -> None:
        assert self.table.release(LeaseId(lease_id)) == []

    @rule()
    def reap(self) -> None:
        expired = {i for i, (_, _, deadline) in self.model.items() if deadline <= self.now}
        reaped = {lease.lease_id: list(lease.block_ids) for lease in self.table.reap(self.now)}
        assert reaped == {i: self.model.pop(i)[1] for i in expired}

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        assert self.table.num_leases == len(self.model)
        assert self.table.num_blocks == sum(len(blocks) for _, blocks, _ in self.model.values())
        assert self.table.next_deadline() == min((d for _, _, d in self.model.values()), default=None)


TestLeaseMachine = LeaseMachine.TestCase
