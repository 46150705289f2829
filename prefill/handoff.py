"""One prompt's hand-off at the prefill side: what has become final, under which lease, and the offers that say so.

    entries of the     0        num_held        final                num_demanded
    prompt's demand    [ decode has )[ offered so far )[ still to compute )
                                      <---------- the lease ------------->

Pure. Knows nothing about the engine or the transport.
"""

from dataclasses import dataclass, field

from core.ids import Attempt, BlockDigest, BlockId, Epoch, LeaseId, RequestId, RouterId, WorkerId
from core.messages import Offer
from core.request import AttemptKey
from engine.scheduler import Sequence
from kvtransfer.plan import DemandEntry


@dataclass(eq=False, slots=True, kw_only=True)
class Handoff:
    """State of one try at one prompt; lives until the last block is offered (the lease lives longer)."""

    request_id: RequestId
    attempt: Attempt
    router: RouterId
    sequence: Sequence
    num_held: int
    entries: list[DemandEntry]
    """The demand of the prompt (`kvtransfer.plan`)."""
    received_s: float
    deadline_s: float
    lease_id: LeaseId | None = None
    started_s: float | None = None
    block_ids: list[BlockId] = field(default_factory=list)
    digests: list[BlockDigest] = field(default_factory=list)

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(request_id=self.request_id, attempt=self.attempt)

    @property
    def num_offered(self) -> int:
        """Entries up to which everything is offered or held by the reader."""
        return self.num_held + len(self.block_ids)

    @property
    def num_demanded(self) -> int:
        return len(self.entries)

    def final_entries(self, num_blocks: int) -> list[DemandEntry]:
        """Entries to offer once `num_blocks` full blocks of the prompt are computed."""
        rest = self.entries[self.num_offered :]
        return [(group, index) for group, index in rest if index < num_blocks]

    def append(self, block_ids: list[BlockId], digests: list[BlockDigest]) -> None:
        """Blocks that have become final, in order of the prompt."""
        assert len(block_ids) == len(digests) and self.num_offered + len(block_ids) <= self.num_demanded
        self.block_ids += block_ids
        self.digests += digests

    def offer(self, *, worker: WorkerId, epoch: Epoch, lease_ttl_s: float, num_cached_blocks: int, now: float) -> Offer:
        """The cumulative offer as of now."""
        assert self.lease_id is not None and self.started_s is not None
        return Offer(
            request_id=self.request_id,
            attempt=self.attempt,
            worker=worker,
            epoch=epoch,
            lease_id=self.lease_id,
            lease_ttl_s=lease_ttl_s,
            first_block_index=self.num_held,
            block_ids=tuple(self.block_ids),
            digests=tuple(self.digests),
            is_final=self.num_offered == self.num_demanded,
            queue_s=self.started_s - self.received_s,
            prefill_s=now - self.started_s,
            num_cached_blocks=num_cached_blocks,
        )
