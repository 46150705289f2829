"""Digests of KV blocks that live in a torch tensor, on any device: the values of `kvtransfer.integrity`.

The tensor edge of this package: the only module besides tests that imports torch. Unsigned arithmetic mod 2^64 is done
in int64, whose products and sums wrap to the same bits. Knows nothing about requests or transports.
"""

from collections.abc import Sequence

import numpy as np
import torch

from core.ids import BlockDigest, BlockId
from kvtransfer.integrity import WORD_BYTES, digest_constants, digest_keys

SCRATCH_BYTES_MAX = 64 * 1024 * 1024
"""Device memory that one batch of a digest call may take for widened words."""

_MASK = 0xFFFFFFFF


class TorchBlockDigester:
    """Digests blocks that lie one after the other in a contiguous tensor, on the tensor's device."""

    def __init__(self, pool: torch.Tensor, block_bytes: int) -> None:
        """`pool`: any shape and dtype, contiguous. Raises ValueError when `block_bytes` does not fit."""
        size_bytes = pool.numel() * pool.element_size()
        if not pool.is_contiguous() or block_bytes <= 0 or block_bytes % WORD_BYTES or size_bytes % block_bytes:
            raise ValueError(f"blocks of {block_bytes} bytes do not divide a pool of {size_bytes} bytes into words")
        num_words = block_bytes // WORD_BYTES
        self.block_bytes = block_bytes
        self._blocks = pool.view(-1).view(torch.int32).view(-1, num_words)
        self._keys = torch.from_numpy(digest_keys(num_words).view(np.int64).copy()).to(pool.device)
        self._constants = torch.from_numpy(digest_constants().view(np.int64).copy()).to(pool.device)
        self._batch_blocks = max(1, SCRATCH_BYTES_MAX // (4 * block_bytes))

    def digest(self, block_ids: Sequence[BlockId]) -> list[BlockDigest]:
        """One unsigned 64-bit digest per block; waits for the device once per batch."""
        digests: list[BlockDigest] = []
        for start in range(0, len(block_ids), self._batch_blocks):
            batch = self._digest_batch(list(block_ids[start : start + self._batch_blocks]))
            digests += [BlockDigest(value & 0xFFFFFFFFFFFFFFFF) for value in batch.tolist()]
        return digests

    def clear(self, block_ids: Sequence[BlockId]) -> None:
        """Zero blocks."""
        self._blocks[list(block_ids)] = 0

    def _digest_batch(self, block_ids: list[BlockId]) -> torch.Tensor:
        """int64[B], the digests' bits."""
        index = torch.tensor(block_ids, dtype=torch.int64, device=self._blocks.device)
        words = self._blocks.index_select(0, index).to(torch.int64) & _MASK
        high = [((words * self._keys[j]).sum(dim=1) + self._constants[j] >> 32) & _MASK for j in (0, 1)]
        return high[0] << 32 | high[1]
