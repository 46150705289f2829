"""The NIXL transport: one-sided reads between processes over UCX (CMA, RDMA, TCP), host or CUDA memory.

One registered region, one descriptor per block (all layers together), prepared once for the local pool and once per peer, so
that a read names block indexes only. No progress thread: `poll` serves peers that read from here and must come round often
(half a millisecond while anyone reads). Over CMA the copy happens inside `start_read`, which then takes as long.

A read ends only when NIXL says so. Releasing its handle, or removing the peer, does not stop a copy that is under way: over
TCP a late reply is written all the same. So an abandoned read, and a read from a removed peer, is left to end by itself, and
the peer's registration is dropped after its last read. Knows nothing about what moves.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.errors import PdclusterError, TransferFailedError
from core.ids import BlockId
from core.clock import Clock, SystemClock
from kvtransfer.transport.base import Peer, ReadId, ReadResult, ReadState, Region
from kvtransfer.transport.bounds import check_read, check_regions

NAME = "nixl"
BACKEND = "UCX"
CLOSE_POLLS_MAX = 1000
"""Times that `close` looks whether reads under way have ended."""

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The meta package, or either of the two wheels that it would pull."""


class NixlMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer says of itself: MessagePack, so that nothing that is executed comes off the wire."""

    agent: bytes
    """NIXL's own description of agent, connection and registered memory."""
    address: int
    block_bytes: int
    num_blocks: int
    device: str


@dataclass(eq=False, slots=True, kw_only=True)
class _Remote:
    """A peer that can be read, or one that was removed while reads from it were under way."""

    agent_name: str
    num_blocks: int
    descriptors: Any
    num_reads: int = 0
    is_removed: bool = False


@dataclass(eq=False, slots=True, kw_only=True)
class _Read:
    peer: Peer
    handle: Any
    started_s: float
    end: ReadState | None = None
    """Set once the copy has ended; reported when the handle is released."""
    seconds: float = 0.0
    reason: str = ""
    is_abandoned: bool = False


class NixlTransport:
    """See the module. All calls after construction and `metadata` from one thread."""

    name = NAME

    def __init__(self, peer: Peer, region: Region, *, clock: Clock | None = None) -> None:
        """`peer`: who this is. Registers `region`, which must outlive the transport. Raises TransferFailedError."""
        self._self = peer
        self._region = region
        self._clock = clock or SystemClock()
        self._api, self._errors = _load()
        self._memory_type, self._device_id = _memory(region.device)
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        try:
            # The epoch is part of the name: a worker's next life is another agent, beside whatever is left of this one.
            self._agent = self._api.nixl_agent(_agent_name(peer), config)
            self._registration = self._agent.register_memory(
                [(region.address, region.size_bytes, self._device_id, "")], self._memory_type, [BACKEND]
            )
            self._local = self._prepare("NIXL_INIT_AGENT", region.address, region.num_blocks, region.device)
        except self._errors as error:
            raise self._failure(peer, f"NIXL cannot register the pool: {error}") from error
        self._remotes: dict[Peer, _Remote] = {}
        self._reads: dict[ReadId, _Read] = {}
        self._next_id = 1
        self._is_closed = False

    def metadata(self) -> bytes:
        region = self._region
        return msgspec.msgpack.encode(
            NixlMetadata(
                agent=self._agent.get_agent_metadata(),
                address=region.address,
                block_bytes=region.block_bytes,
                num_blocks=region.num_blocks,
                device=region.device,
            )
        )
