"""The transport seam: reading KV blocks out of another worker's memory.

A transport is used from one thread (the transfer thread). A read's destination may be written at any time between
`start_read` and the result that ends it; after `abandon`, until `poll` reports the read as ended. Knows nothing about
requests, leases or digests.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from core.ids import BlockId, Epoch, WorkerId

ReadId = NewType("ReadId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One life of a worker; a restarted worker is another peer."""

    worker: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Memory of this process that holds the block pool, registered once before `metadata` is asked for."""

    address: int
    """Start address (for in-memory transports: ignored)."""
    block_bytes: int
    num_blocks: int
    device: str
    """`cpu` or `cuda:N`."""
    view: memoryview | None
    """The bytes themselves, where the memory is the host's; None on a GPU."""

    @property
    def size_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


class ReadState(Enum):
    """How a read ended."""

    DONE = "done"
    """Every byte arrived."""
    FAILED = "failed"
    """Nothing more will be written; contents of the destinations are undefined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """The end of one read: its destination blocks will not be written any more."""

    read_id: ReadId
    state: ReadState
    reason: str
    """Empty when done."""
    seconds: float


class Transport(Protocol):
    """Reads whole blocks from registered peers into the local region."""

    name: str

    def metadata(self) -> bytes:
        """What a peer needs to read from here; contains no pickle."""
        ...

    def add_peer(self, peer: Peer, metadata: bytes, num_blocks: int, block_bytes: int) -> None:
        """Make a peer readable. Raises IncompatiblePeersError or TransferFailedError; idempotent per peer."""
        ...

    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer; reads in flight from it fail. Idempotent."""
        ...

    def start_read(self, peer: Peer, sources: list[BlockId], targets: list[BlockId]) -> ReadId:
        """Begin to copy the peer's blocks `sources` into the local blocks `targets` (pairwise).

        Raises TransferFailedError for an unknown peer and ValueError for ids outside either pool. Must be followed by
        `poll`.
        """
        ...

    def abandon(self, read_id: ReadId) -> None:
        """Ask that the read stop. `poll` still reports its end, at the latest when nothing can write any more."""
        ...

    def poll(self) -> list[ReadResult]:
        """Reads that ended since the last call; also serves peers that read from here. Never blocks for long."""
        ...

    def close(self) -> None:
        """Release everything; reads in flight are over when it returns."""
        ...
