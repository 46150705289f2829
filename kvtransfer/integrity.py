"""Digests of KV blocks: 64 bits of a block's bytes, the same value from NumPy, torch, CPU and GPU.

A block is n little-endian 32-bit words x_0 .. x_(n-1). Two multilinear sums over fixed pseudo-random odd 64-bit keys,

    s_j = (c_j + sum_i x_i * k_j[i]) mod 2^64,  j = 0, 1         digest = high half of s_0, then high half of s_1

Every position has its own key and only the high halves count, so that changes of several words do not cancel: a flip of
the sign in two words, or two words or halves swapped, changes the digest but with a probability of 2^-64. The constants
c_j keep a block of zeros from having the digest 0. It finds accidents, not forgeries. Knows nothing about requests or
transports; torch tensors are digested by `kvtransfer.integrity_torch`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from core.ids import BlockDigest, BlockId

DIGEST_SCHEME = "pdcluster-multilinear-64-v1"
WORD_BYTES = 4

_GOLDEN = 0x9E3779B97F4A7C15
_CONSTANT_COUNTERS = (0, 1)
"""The keys of word i are numbers 2i + 2 and 2i + 3 of the sequence; the first two are the constants."""


class Digester(Protocol):
    """Digests blocks of the local pool, wherever its memory is."""

    block_bytes: int

    def digest(self, block_ids: Sequence[BlockId]) -> list[BlockDigest]:
        """One unsigned 64-bit digest per block, in the order of `block_ids`."""
        ...

    def clear(self, block_ids: Sequence[BlockId]) -> None:
        """Zero blocks that hold bytes nobody vouches for: attention reads masked positions, which must be finite."""
        ...


def split_mix(counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers of the SplitMix64 sequence with seed 0 at these counters, made odd. u64[...] -> u64[...]."""
    z = (counters + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@lru_cache(maxsize=8)
def digest_keys(num_words: int) -> NDArray[np.uint64]:
    """u64[2, num_words], read-only: the keys of both sums."""
    keys = split_mix(np.arange(2, 2 * num_words + 2, dtype=np.uint64).reshape(num_words, 2))
    keys = np.ascontiguousarray(keys.T)
    keys.setflags(write=False)
    return keys


def digest_constants() -> NDArray[np.uint64]:
    """u64[2]: what both sums start from."""
    return split_mix(np.array(_CONSTANT_COUNTERS, dtype=np.uint64))


class BlockDigester:
    """Digests blocks that lie one after the other in host memory. Writes only in `clear`; any thread."""

    def __init__(self, view: memoryview, block_bytes: int) -> None:
        """`view`: the pool's bytes. Raises ValueError unless `block_bytes` is a multiple of 4 and divides its size."""
        if block_bytes <= 0 or block_bytes % WORD_BYTES or view.nbytes % block_bytes:
            raise ValueError(
                f"a block of {block_bytes} bytes is no multiple of {WORD_BYTES} that divides {view.nbytes}"
            )
        self.block_bytes = block_bytes
        self._blocks = np.frombuffer(view, dtype="<u4").reshape(-1, block_bytes // WORD_BYTES)
        self._keys = digest_keys(block_bytes // WORD_BYTES)
        self._constants = digest_constants()

    def digest(self, block_ids: Sequence[BlockId]) -> list[BlockDigest]:
        """One unsigned 64-bit digest per block. Raises IndexError for an id outside the pool."""
        return [self._digest_one(block) for block in block_ids]

    def clear(self, block_ids: Sequence[BlockId]) -> None:
        self._blocks[list(block_ids)] = 0

    def _digest_one(self, block: BlockId) -> BlockDigest:
        # One einsum per block: it widens the words in cache-sized pieces and holds the GIL only between blocks.
        sums = np.einsum("i,ji->j", self._blocks[block], self._keys) + self._constants
        high = sums >> np.uint64(32)
        return BlockDigest(int(high[0]) << 32 | int(high[1]))
