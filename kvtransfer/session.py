"""A pull session: the decode side's view of one hand-off, from credit to the last verified block.

    CREDITED --first offer--> PULLING --all verified, final offer seen--> COMPLETE
        \\________________________|____ expiry, bad offer, bad block twice --> FAILED
                                  |____ cancel                            --> CANCELLED

    indexes of a session     0         verified prefix          offered          num_blocks
                             [ verified )[ in flight or retried )[ not yet offered )
    entries of the demand    first_block_index + the same

Pure: offers and results of reads in, blocks to read out. It knows the local blocks only as the list `targets` that its
owner binds, and never says when they are free: that is when `in_flight` is 0 after an end. Knows nothing about pools,
transports or what a digest is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from core.ids import BlockDigest, BlockId, LeaseId
from core.messages import Offer
from core.request import AttemptKey
from kvtransfer.transport.base import Peer

LEASE_MARGIN_S = 0.5
"""The reader's view of a lease ends so much before the lease, for the time an offer or renewal is under way."""
RENEW_FRACTION = 1 / 3
"""Share of a lease's time to live after which it is renewed: two renewals may be lost."""
READ_RETRIES_MAX = 1
"""Times that a block is read again after a bad read."""


class SessionState(Enum):
    """See the module's picture."""

    CREDITED = "credited"
    PULLING = "pulling"
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPull:
    """One block to read now."""

    index: int
    """Within the session, in [0, num_blocks)."""
    source: BlockId
    """At the peer."""
    digest: BlockDigest
    """What its bytes must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailure:
    """Why a session failed. `kind` is one of `core.messages.Refused`."""

    kind: Literal["transfer_failed", "invalid"]
    reason: str


class PullSession:
    """See the module. After an end, offers change nothing and results only lower `in_flight`."""

    def __init__(
        self, key: AttemptKey, peer: Peer, first_block_index: int, num_blocks: int, credit_deadline_s: float
    ) -> None:
        """`num_blocks` >= 1 entries of the prompt's demand are to be pulled, from `first_block_index` on."""
        assert num_blocks >= 1 and first_block_index >= 0
        self.key = key
        self.peer = peer
        self.first_block_index = first_block_index
        self.num_blocks = num_blocks
        self.state = SessionState.CREDITED
        self.failure: SessionFailure | None = None
        self.lease_id: LeaseId | None = None
        """None until the first valid offer."""
        self.targets: list[BlockId] = []
        """Local blocks by index; empty until bound."""
        self._credit_deadline_s = credit_deadline_s
        self._lease_end_s = -math.inf
        self._renew_at_s = math.inf
        self._lease_ttl_s = 0.0
        self._sources: list[BlockId] = []
        self._digests: list[BlockDigest] = []
        self._is_final = False
        self._retries: dict[int, int] = {}
        self._in_flight: set[int] = set()
        self._verified: set[int] = set()
        self._prefix = 0

    @property
    def is_open(self) -> bool:
        return self.state in (SessionState.CREDITED, SessionState.PULLING)

    @property
    def is_complete(self) -> bool:
        """Every block was verified, and the peer said that these are all (TX-1)."""
        return self.state is SessionState.COMPLETE

    @property
    def in_flight(self) -> int:
        """Blocks handed out whose read has not ended: their targets may still be written."""
        return len(self._in_flight)

    @property
    def deadline_s(self) -> float:
        """When the session must be given up: the credit's end, later the rebased end of the lease; inf after an end."""
        if not self.is_open:
            return math.inf
        return self._credit_deadline_s if self.state is SessionState.CREDITED else self._lease_end_s

    @property
    def renew_at_s(self) -> float:
        """When the lease should be renewed next; inf without a lease or after an end."""
        return self._renew_at_s if self.is_open else math.inf

    def bind(self, targets: list[BlockId]) -> None:
        """Say, once, where the blocks go: one local block per index. The ids stay the caller's."""
        assert not self.targets and len(targets) == self.num_blocks
        self.targets = list(targets)

    # ---- offers ------------------------------------------------------------------------------------------------------

    def on_offer(self, offer: Offer, now: float) -> list[BlockPull] | SessionFailure:
        """Take an offer; the blocks that it adds, to be read into `targets`, or why the session has failed.

        A message of another attempt or an older epoch changes nothing (TX-2), nor does a duplicate or one that was
        overtaken.
        """
        if not self.is_open or self._is_stale(offer):
            return []
        problem = self._problem(offer)
        if problem is not None:
            return self.fail("invalid", f"offer of {offer.worker} (epoch {offer.epoch}): {problem}")
        if self.lease_id is not None and not self._is_news(offer):
            return []
        num_known = len(self._sources)
        self._accept(offer, now)
        self._settle()
        if not self.is_open:
            return []
        return self._pull(range(num_known, len(self._sources)))

    def _is_stale(self, offer: Offer) -> bool:
        if (offer.request_id, offer.attempt) != (self.key.request_id, self.key.attempt):
            return True
        return offer.worker == self.peer.worker and offer.epoch < self.peer.epoch

    def _is_news(self, offer: Offer) -> bool:
        if len(offer.block_ids) == len(self._sources):
            return offer.is_final and not self._is_final
        return len(offer.block_ids) > len(self._sources)

    def _problem(self, offer: Offer) -> str | None:
        num_offered, num_common = len(offer.block_ids), min(len(offer.block_ids), len(self._sources))
        if (offer.worker, offer.epoch) != (self.peer.worker, self.peer.epoch):
            return f"the session reads from {self.peer.worker} (epoch {self.peer.epoch})"
        if len(offer.digests) != num_offered:
            return f"{num_offered} blocks with {len(offer.digests)} digests"
        if offer.first_block_index != self.first_block_index:
            return f"starts at block {offer.first_block_index} instead of {self.first_block_index}"
        if num_offered > self.num_blocks or (offer.is_final and num_offered < self.num_blocks):
            return f"{num_offered} blocks (final: {offer.is_final}) where {self.num_blocks} are demanded"
        if not (math.isfinite(offer.lease_ttl_s) and offer.lease_ttl_s > 0):
            return f"a lease of {offer.lease_ttl_s} s"
        if self.lease_id is not None and offer.lease_id != self.lease_id:
            return f"lease {offer.lease_id} instead of {self.lease_id}"
        same = (
            list(offer.block_ids[:num_common]) == self._sources[:num_common]
            and list(offer.digests[:num_common]) == self._digests[:num_common]
        )
        return None if same else "changes blocks that were offered before"

    def _accept(self, offer: Offer, now: float) -> None:
        self.state = SessionState.PULLING
        self.lease_id = offer.lease_id
        self._sources = list(offer.block_ids)
        self._digests = list(offer.digests)
        self._is_final = self._is_final or offer.is_final
        self._lease_ttl_s = offer.lease_ttl_s
        self._rebase(now)

    # ---- results of reads --------------------------------------------------------------------------------------------

    def on_verified(self, indexes: Sequence[int]) -> None:
        """These reads ended and the bytes in `targets` have the offered digests."""
        self._end_reads(indexes)
        if not self.is_open:
            return
        self._verified.update(indexes)
        while self._prefix in self._verified:
            self._prefix += 1
        self._settle()

    def on_bad(self, indexes: Sequence[int], reason: str) -> list[BlockPull] | SessionFailure:
        """These reads ended without the right bytes: the blocks to read again, or why the session has failed."""
        self._end_reads(indexes)
        if not self.is_open:
            return []
        for index in indexes:
            self._retries[index] = self._retries.get(index, 0) + 1
            if self._retries[index] > READ_RETRIES_MAX:
                block = self.first_block_index + index
                return self.fail("transfer_failed", f"block {block} from {self.peer.worker}: {reason}")
        return self._pull(indexes)

    def on_ended(self, num_reads: int) -> None:
        """After an end of the session: so many more reads can write nothing any more."""
        assert not self.is_open and num_reads <= len(self._in_flight)
        for _ in range(num_reads):
            self._in_flight.pop()

    # ---- time and endings --------------------------------------------------------------------------------------------

    def renewed(self, now: float) -> None:
        """A Renew was sent now; it arrives within the margin, while the lease still stands."""
        if self.state is SessionState.PULLING:
            self._rebase(now)

    def fail(self, kind: Literal["transfer_failed", "invalid"], reason: str) -> SessionFailure:
        """End an open session in failure."""
        assert self.is_open
        self.state = SessionState.FAILED
        self.failure = SessionFailure(kind=kind, reason=reason)
        return self.failure

    def cancel(self) -> None:
        """Give up without a reason to report; after an end, nothing."""
        if self.is_open:
            self.state = SessionState.CANCELLED

    def check(self) -> None:
        """TX-1: complete means that every demanded block was offered, verified and is not being written."""
        assert self._prefix <= len(self._verified) <= len(self._sources) == len(self._digests) <= self.num_blocks, (
            f"TX-1: {self.key}: prefix {self._prefix}, verified {len(self._verified)}, offered {len(self._sources)}, "
            f"digests {len(self._digests)}, demanded {self.num_blocks}"
        )
        if self.is_open:
            assert not self._verified & self._in_flight, "TX-1: a verified block is being written"
            assert len(self._verified) + len(self._in_flight) == len(self._sources), (
                "TX-1: a block is not accounted for"
            )
        if self.is_complete:
            assert self._is_final and self._prefix == self.num_blocks and not self._in_flight, "TX-1: incomplete"

    def _rebase(self, now: float) -> None:
        self._lease_end_s = max(self._lease_end_s, now + self._lease_ttl_s - LEASE_MARGIN_S)
        self._renew_at_s = now + self._lease_ttl_s * RENEW_FRACTION

    def _pull(self, indexes: Sequence[int]) -> list[BlockPull]:
        self._in_flight.update(indexes)
        return [BlockPull(index=i, source=self._sources[i], digest=self._digests[i]) for i in indexes]

    def _end_reads(self, indexes: Sequence[int]) -> None:
        assert self._in_flight.issuperset(indexes), f"reads {list(indexes)} ended that were not in flight"
        self._in_flight.difference_update(indexes)

    def _settle(self) -> None:
        if self._is_final and len(self._verified) == self.num_blocks:
            self.state = SessionState.COMPLETE
