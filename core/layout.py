"""What the bytes of a KV block mean, as two workers must agree on it before a block moves between them.

A block is one contiguous run of bytes: all layers of each group in turn, for a full-attention group as
[layer, key/value, position, kv head, head dim]. Knows nothing about where a block lies.
"""

from typing import Literal

import msgspec

from core.ids import WeightIdentity

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
KvDtype = Literal["float32", "bfloat16"]

PROTOCOL_VERSION_MIN = 1
PROTOCOL_VERSION_MAX = 1


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One group of layers whose KV has the same shape."""

    kind: Literal["full"]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype

    def position_bytes(self) -> int:
        """Bytes of one token position over all layers of the group, keys and values."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A block: `block_size` positions of every group."""

    block_size: int
    groups: tuple[GroupLayout, ...]

    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * sum(group.position_bytes() for group in self.groups)


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself before KV may move. Compared field by field; never a package version."""

    protocol_min: int = PROTOCOL_VERSION_MIN
    protocol_max: int = PROTOCOL_VERSION_MAX
    hash_scheme: str
    digest_scheme: str
    weight_identity: WeightIdentity
    layout: BlockLayout
    numerics: Literal["exact", "fast"]
    num_blocks: int
    """Size of the worker's pool; a remote block id outside [0, num_blocks) is refused."""
    transport: str
    """Name of the transport, for example `nixl` or `memory`."""
    transport_metadata: bytes
    """Opaque to everything but the transport of that name."""
