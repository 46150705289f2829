"""What the bytes of a KV block mean, as two workers must agree on it before a block moves between them.

The layers of a model form groups: layers of one group need the same positions. A block holds `block_size` positions of
one group as one contiguous run of bytes, [layer, key/value, position, kv head, head dim]; all groups' blocks are of one
size, so that one pool, one region and one kind of read serve them all. Knows nothing about where a block lies.
"""

from typing import Literal

import msgspec

from core.ids import WeightIdentity

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
KvDtype = Literal["float32", "bfloat16"]

PROTOCOL_VERSION_MIN = 1
PROTOCOL_VERSION_MAX = 1


Windows = tuple[int | None, ...]
"""Per group of layers: how many positions attention looks back, itself included; None: to the first."""
FULL_ATTENTION: Windows = (None,)


def needed_blocks(window: int | None, num_computed: int, block_size: int) -> range:
    """Indexes of the full blocks that whoever computes position `num_computed` next must have.

    The one function from which demand, supply, admission, prefix hits and the freeing of old blocks follow.
    """
    end = num_computed // block_size
    if window is None:
        return range(end)
    return range(min(max(0, num_computed - window + 1) // block_size, end), end)


def needed_entries(windows: Windows, num_blocks: int, block_size: int) -> list[tuple[int, int]]:
    """(group, block index) of all blocks that whoever goes on after `num_blocks` full blocks must have.

    In the order in which they are computed: by block, then by group.
    """
    needed = [needed_blocks(window, num_blocks * block_size, block_size) for window in windows]
    return [(group, index) for index in range(num_blocks) for group, blocks in enumerate(needed) if index in blocks]


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One group of layers."""

    kind: Literal["full", "window"]
    """`full`: a position attends to all before it; `window`: to the `window` last ones, itself included."""
    num_layers: int
    """Places for layers in a block; the last group of a kind may leave some unused."""
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype
    window: int | None = None
    """Positions, of kind `window`."""

    def position_bytes(self) -> int:
        """Bytes of one token position over all layers of the group, keys and values."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def needed_blocks(self, num_computed: int, block_size: int) -> range:
        """See the function of that name."""
        return needed_blocks(self.window, num_computed, block_size)


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of `block_size` positions, for every group."""

    block_size: int
    groups: tuple[GroupLayout, ...]
    """At least one; all of the same `position_bytes`."""

    def block_bytes(self) -> int:
        """Bytes of one block of one group."""
        return self.block_size * self.groups[0].position_bytes()

    @property
    def windows(self) -> Windows:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    def max_tokens(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that a pool of so many blocks can compute.

        While its prompt is computed a sequence has blocks of all its positions in every group; those that its windows
        have passed are given back as it goes on.
        """
        return num_blocks // len(self.groups) * self.block_size


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
