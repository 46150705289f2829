"""Leases: the prefill side's promises not to free or overwrite blocks before release or deadline (KV-4).

Pure: the table says which blocks to unpin, its owner holds the pins, one for each (lease, block). Deadlines are of this
process's clock and never leave it; the reader gets a time to live and rebases it. Knows nothing about pools or
messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from core.books import Claim
from core.ids import Attempt, BlockId, LeaseId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One lease as it is now; a later change makes another value."""

    lease_id: LeaseId
    request_id: RequestId
    attempt: Attempt
    block_ids: tuple[BlockId, ...]
    """In the order they were added; each once."""
    deadline_s: float


class LeaseTable:
    """All leases of one worker's life. At most one per (request, attempt)."""

    def __init__(self, ttl_s: float) -> None:
        """`ttl_s`: time to live of a grant and of a renewal, in seconds."""
        assert ttl_s > 0
        self.ttl_s = ttl_s
        self._next_id = 1
        self._leases: dict[LeaseId, Lease] = {}
        self._by_attempt: dict[tuple[RequestId, Attempt], LeaseId] = {}
        self._num_blocks = 0

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        """Pins that the leases stand for: a block in two leases counts twice."""
        return self._num_blocks

    def get(self, lease_id: LeaseId) -> Lease | None:
        return self._leases.get(lease_id)

    def grant(self, request_id: RequestId, attempt: Attempt, now: float) -> Lease:
        """A new lease without blocks. The attempt must not have one."""
        key = (request_id, attempt)
        assert key not in self._by_attempt, f"{request_id} attempt {attempt} has lease {self._by_attempt[key]} already"
        lease = Lease(
            lease_id=LeaseId(self._next_id),
            request_id=request_id,
            attempt=attempt,
            block_ids=(),
            deadline_s=now + self.ttl_s,
        )
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        self._by_attempt[key] = lease.lease_id
        return lease

    def latest_attempt(self, request_id: RequestId) -> Attempt | None:
        """The newest attempt of a request that has a lease."""
        return max((attempt for request, attempt in self._by_attempt if request == request_id), default=None)

    def belongs(self, lease_id: LeaseId, request_id: RequestId, attempt: Attempt) -> bool:
        """The lease stands and is this attempt's. Ids begin again with every life of a worker."""
        return self._by_attempt.get((request_id, attempt)) == lease_id

    def extend(self, lease_id: LeaseId, block_ids: Sequence[BlockId]) -> bool:
        """Add blocks that the caller has pinned. False when the lease has ended: then the pins stay the caller's."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        blocks = (*lease.block_ids, *block_ids)
        assert len(set(blocks)) == len(blocks), f"a block is twice in lease {lease_id}"
        self._leases[lease_id] = replace(lease, block_ids=blocks)
        self._num_blocks += len(block_ids)
        return True

    def renew(self, lease_id: LeaseId, now: float) -> bool:
        """Move the deadline to `now` + ttl, never backwards. False when the lease has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        self._leases[lease_id] = replace(lease, deadline_s=max(lease.deadline_s, now + self.ttl_s))
        return True

    def release(self, lease_id: LeaseId) -> list[BlockId]:
        """End a lease; the blocks to unpin, [] when it has ended already."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        del self._by_attempt[lease.request_id, lease.attempt]
        self._num_blocks -= len(lease.block_ids)
        return list(lease.block_ids)

    def release_request(self, request_id: RequestId, attempt: Attempt) -> list[BlockId]:
        """End the lease of exactly this attempt, if there is one; the blocks to unpin."""
        lease_id = self._by_attempt.get((request_id, attempt))
        return [] if lease_id is None else self.release(lease_id)

    def reap(self, now: float) -> list[Lease]:
        """End every lease whose deadline has come; the caller unpins their blocks.

        Scans all: renewals make the order of insertion differ from the order of expiry.
        """
        expired = [lease for lease in self._leases.values() if lease.deadline_s <= now]
        for lease in expired:
            self.release(lease.lease_id)
        return expired

    def next_deadline(self) -> float | None:
        """The earliest deadline, None without leases."""
        return min((lease.deadline_s for lease in self._leases.values()), default=None)

    def claims(self) -> Iterator[Claim]:
        """Every pin that the leases stand for."""
        for lease in self._leases.values():
            yield Claim(f"lease {lease.lease_id} of {lease.request_id} attempt {lease.attempt}", lease.block_ids)

    def check(self) -> None:
        """KV-4: the table's counts and indexes say the same as its leases."""
        by_attempt = {(lease.request_id, lease.attempt): lease_id for lease_id, lease in self._leases.items()}
        assert by_attempt == self._by_attempt, "KV-4: leases and their index by attempt differ"
        assert self._num_blocks == sum(len(lease.block_ids) for lease in self._leases.values()), "KV-4: pin count"
        assert all(0 < lease_id < self._next_id for lease_id in self._leases), "KV-4: lease ids"
