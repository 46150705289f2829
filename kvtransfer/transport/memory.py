"""The in-memory transport: reads between the regions of one process, with seeded faults on a clock's time.

A stand-in for NIXL with the same contract, for tests, the simulator and clusters within one process. A read takes
effect when `poll` finds it due: only then are the source's bytes copied, as they are at that moment. Knows nothing
about what moves.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from core.clock import Clock
from core.errors import TransferFailedError
from core.ids import BlockId, WorkerId
from kvtransfer.transport.base import Peer, ReadId, ReadResult, ReadState, Region
from kvtransfer.transport.bounds import check_read, check_regions

NAME = "memory"


@dataclass(slots=True, kw_only=True)
class MemoryFaults:
    """What goes wrong, as probabilities per read. May be changed at any time."""

    delay_s: tuple[float, float] = (0.0, 0.0)
    """Bounds of the time a read takes."""
    loss_rate: float = 0.0
    """The read fails, after half of its blocks were written."""
    corruption_rate: float = 0.0
    """One bit of one block arrives flipped."""
    stale_rate: float = 0.0
    """One block arrives with the bytes of another block of the source."""
    late_write_rate: float = 0.0
    """An abandoned read writes all its targets all the same before it ends."""
    stall_rate: float = 0.0
    """The read never ends by itself, only with its peer or the transport."""


class MemoryMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer says of itself."""

    worker: str
    epoch: int
    block_bytes: int
    num_blocks: int


class MemoryFabric:
    """What the transports of one process share: who is alive, the faults and their randomness."""

    def __init__(self, clock: Clock, *, seed: int = 0, faults: MemoryFaults | None = None) -> None:
        self.clock = clock
        self.rng = random.Random(seed)
        self.faults = faults or MemoryFaults()
        self.regions: dict[Peer, Region] = {}
        self.bytes_per_s = math.inf
        """What one worker can give to all of its readers together."""
        self.is_blocked: Callable[[WorkerId, WorkerId], bool] = lambda _reader, _source: False
        """Whether reads of the first from the second stand still: a partition, or a stopped process."""
        self._busy_s: dict[Peer, float] = {}

    def due_s(self, source: Peer, num_bytes: int) -> float:
        """When a read that starts now takes effect, behind those that `source` serves already."""
        started_s = max(self.clock.now(), self._busy_s.get(source, 0.0))
        self._busy_s[source] = started_s + num_bytes / self.bytes_per_s
        return self._busy_s[source] + self.rng.uniform(*self.faults.delay_s)

    def kill(self, peer: Peer) -> None:
        """A worker dies: nobody can read from it any more, reads under way fail. Idempotent."""
        self.regions.pop(peer, None)
        self._busy_s.pop(peer, None)


@dataclass(eq=False, slots=True, kw_only=True)
class _Read:
    peer: Peer
    sources: list[BlockId]
    targets: list[BlockId]
    started_s: float
    due_s: float
    is_stalled: bool
    is_abandoned: bool = False


class MemoryTransport:
    """See the module."""

    name = NAME

    def __init__(self, fabric: MemoryFabric, peer: Peer, region: Region) -> None:
        """`peer`: who this is. Raises ValueError for a region without host memory."""
        if region.view is None or region.view.nbytes != region.size_bytes:
            raise ValueError("the in-memory transport needs a view of the whole region")
        self._fabric = fabric
        self._self = peer
        self._region = region
        self._peers: dict[Peer, int] = {}
        self._reads: dict[ReadId, _Read] = {}
        self._next_id = 1
        fabric.regions[peer] = region

    @property
    def next_due_s(self) -> float | None:
        """When the first read under way takes effect, for whoever drives a manual clock."""
        return min((read.due_s for read in self._reads.values() if not read.is_stalled), default=None)

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(
            MemoryMetadata(
                worker=self._self.worker,
                epoch=self._self.epoch,
                block_bytes=self._region.block_bytes,
                num_blocks=self._region.num_blocks,
            )
        )

    def add_peer(self, peer: Peer, metadata: bytes, num_blocks: int, block_bytes: int) -> None:
        try:
            said = msgspec.msgpack.decode(metadata, type=MemoryMetadata)
        except msgspec.DecodeError as error:
            raise self._failure(peer, f"its metadata cannot be read: {error}") from error
        check_regions(
            peer,
            self._self,
            (
                ("worker", said.worker, peer.worker),
                ("epoch", said.epoch, peer.epoch),
                ("num_blocks", said.num_blocks, num_blocks),
                ("block_bytes", said.block_bytes, block_bytes),
                ("block_bytes", said.block_bytes, self._region.block_bytes),
            ),
        )
        if peer not in self._fabric.regions:
            raise self._failure(peer, "it is not there")
        self._peers[peer] = said.num_blocks

    def remove_peer(self, peer: Peer) -> None:
        self._peers.pop(peer, None)

    def start_read(self, peer: Peer, sources: list[BlockId], targets: list[BlockId]) -> ReadId:
        if peer not in self._peers:
            raise self._failure(peer, f"epoch {peer.epoch} is no peer")
        check_read(sources, targets, self._peers[peer], self._region)
        now, faults, rng = self._fabric.clock.now(), self._fabric.faults, self._fabric.rng
        read = _Read(
            peer=peer,
            sources=list(sources),
            targets=list(targets),
            started_s=now,
            due_s=self._fabric.due_s(peer, len(sources) * self._region.block_bytes),
            is_stalled=rng.random() < faults.stall_rate,
        )
        read_id = ReadId(self._next_id)
        self._next_id += 1
        self._reads[read_id] = read
        return read_id

    def abandon(self, read_id: ReadId) -> None:
        if read_id in self._reads:
            self._reads[read_id].is_abandoned = True

    def poll(self) -> list[ReadResult]:
        now = self._fabric.clock.now()
        results = []
        for read_id, read in list(self._reads.items()):
            is_reachable = read.peer in self._peers and read.peer in self._fabric.regions
            is_open = read.is_stalled or read.due_s > now
            if is_reachable and (is_open or self._fabric.is_blocked(self._self.worker, read.peer.worker)):
                continue
            del self._reads[read_id]
            reason = self._carry_out(read) if is_reachable else "the peer is gone"
            state = ReadState.FAILED if reason else ReadState.DONE
            results.append(ReadResult(read_id=read_id, state=state, reason=reason, seconds=now - read.started_s))
        return results

    def close(self) -> None:
        self._reads.clear()
        self._peers.clear()
        if self._fabric.regions.get(self._self) is self._region:
            self._fabric.kill(self._self)

    def _carry_out(self, read: _Read) -> str:
        """Write the targets as the faults have it; why the read failed, empty when it did not."""
        faults, rng = self._fabric.faults, self._fabric.rng
        if read.is_abandoned:
            if rng.random() < faults.late_write_rate:
                self._copy(read, len(read.sources))
            return "abandoned"
        if rng.random() < faults.loss_rate:
            self._copy(read, len(read.sources) // 2)
            return "lost"
        if rng.random() < faults.stale_rate:
            index = rng.randrange(len(read.sources))
            read.sources[index] = BlockId((read.sources[index] + 1) % self._peers[read.peer])
        self._copy(read, len(read.sources))
        if rng.random() < faults.corruption_rate:
            self._block(self._region, rng.choice(read.targets))[rng.randrange(self._region.block_bytes)] ^= (
                1 << rng.randrange(8)
            )
        return ""

    def _copy(self, read: _Read, num_blocks: int) -> None:
        source_region = self._fabric.regions[read.peer]
        for source, target in zip(read.sources[:num_blocks], read.targets[:num_blocks], strict=True):
            self._block(self._region, target)[:] = self._block(source_region, source)

    def _block(self, region: Region, block: BlockId) -> memoryview:
        assert region.view is not None
        return region.view.cast("B")[block * region.block_bytes : (block + 1) * region.block_bytes]

    def _failure(self, peer: Peer, reason: str) -> TransferFailedError:
        return TransferFailedError(source=peer.worker, target=self._self.worker, reason=reason)
