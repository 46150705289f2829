"""What every transport refuses before it moves a byte: regions that do not fit, and block ids outside them.

Knows nothing about any transport.
"""

from collections.abc import Sequence

from core.errors import IncompatiblePeersError
from core.ids import BlockId
from kvtransfer.transport.base import Peer, Region


def check_regions(source: Peer, target: Peer, pairs: Sequence[tuple[str, object, object]]) -> None:
    """Raise IncompatiblePeersError for the first (field, value at the source, value at the target) that differs."""
    for field, source_value, target_value in pairs:
        if source_value != target_value:
            raise IncompatiblePeersError(
                source=source.worker,
                target=target.worker,
                field=field,
                source_value=source_value,
                target_value=target_value,
            )


def check_read(sources: Sequence[BlockId], targets: Sequence[BlockId], num_source_blocks: int, region: Region) -> None:
    """Raise ValueError for an empty or unequal read, ids outside either pool, or a target that is named twice."""
    if not sources or len(sources) != len(targets):
        raise ValueError(f"a read of {len(sources)} blocks into {len(targets)}")
    for what, ids, num_blocks in (("source", sources, num_source_blocks), ("target", targets, region.num_blocks)):
        if min(ids) < 0 or max(ids) >= num_blocks:
            outside = next(block for block in ids if not 0 <= block < num_blocks)
            raise ValueError(f"{what} block {outside} is outside [0, {num_blocks})")
    if len(set(targets)) != len(targets):
        raise ValueError("a target block is named twice")
