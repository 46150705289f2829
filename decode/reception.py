"""A request on its way in at the decode worker: what `decode.intake` keeps for it, and what comes out when it is ready.

Knows nothing about when blocks are promised, read or given back.
"""

import math
from dataclasses import dataclass, field

from core.ids import BlockHash, BlockId, RouterId
from core.messages import Offer, Submit
from core.request import AttemptKey
from kvtransfer.session import PullSession


@dataclass(eq=False, slots=True, kw_only=True)
class Reception:
    """One try at one request until it is ready to decode, and after a failure until its destinations are quiescent."""

    submit: Submit
    router: RouterId
    keys: list[BlockHash]
    """Of the demand's entries."""
    block_indexes: list[int]
    """Of the demand's entries: which of the prompt's blocks of tokens they belong to."""
    hashes: list[BlockHash]
    """Of the prompt's full blocks."""
    received_s: float
    deadline_s: float
    held: list[BlockId] = field(default_factory=list)
    """Leading demanded blocks that were here already, referenced as of the credit."""
    session: PullSession | None = None
    targets: list[BlockId] = field(default_factory=list)
    num_reserved: int = 0
    offer: Offer | None = None
    """The latest offer, kept while no blocks could be bound for it."""
    renew_at_s: float = math.inf
    """When to renew the lease of that offer."""
    read_deadline_s: float = math.inf
    """When the reads under way are hopeless."""
    offered_final_s: float | None = None
    num_bytes: int = 0
    read_s: float = 0.0

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(request_id=self.submit.request_id, attempt=self.submit.attempt)

    @property
    def name(self) -> str:
        """For messages to people."""
        return f"{self.submit.request_id} attempt {self.submit.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A request whose demanded blocks are all here; the references of `blocks` go to the receiver."""

    submit: Submit
    router: RouterId
    hashes: list[BlockHash]
    """Of the prompt's full blocks."""
    num_blocks: int
    """Leading full blocks that need not be computed."""
    blocks: list[BlockId]
    """One for each of `needed_entries(windows, num_blocks)`."""
    received_s: float
