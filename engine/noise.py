"""Counter-based noise (RQ-3): the Gumbel number of (seed, child, position, token id), on every device, in every batch.

    key   = splitmix64 chained over seed, child, position                    uint64, on the host, one per row
    hash  = mix32((mix32(token id) ^ low half of key) * (high half | 1))     32-bit integers, wrapping
    u     = (31 low bits of hash + 1/2) / 2^31                               float32, at most 1 - 2^-24
    noise = -log(-log1p(-u))

`mix32` is xor-shift 16, * 0x21F0AAAD, xor-shift 15, * 0xD35A2D97, xor-shift 15. Integers are equal everywhere; the two
logarithms may differ by one unit in the last place between devices. Knows nothing about logits.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from engine.step import IntArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def row_keys(seed: NDArray[np.uint64], child: IntArray, position: IntArray) -> NDArray[np.uint64]:
    """One key per row; wrapping arithmetic."""
    keys = _splitmix64(seed)
    keys = _splitmix64(keys ^ child.astype(np.uint64))
    return _splitmix64(keys ^ position.astype(np.uint64))


def _splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = values + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _mix32(values: torch.Tensor) -> torch.Tensor:
    """In place, int32 (wraps as unsigned would; the mask makes the shift logical)."""
    values ^= (values >> 16) & 0xFFFF
    values *= _signed(0x21F0AAAD)
    values ^= (values >> 15) & 0x1FFFF
    values *= _signed(0xD35A2D97)
    values ^= (values >> 15) & 0x1FFFF
    return values


class GumbelNoise:
    """Noise over a vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._tokens = _mix32(torch.arange(vocab_size, dtype=torch.int32, device=device))

    def rows(self, keys: NDArray[np.uint64]) -> torch.Tensor:
        """float32[B, vocab size] for B keys."""
        halves = torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy()).to(self._tokens.device)
        hashes = _mix32((self._tokens ^ halves[:, :1]).mul_(halves[:, 1:] | 1))
        uniform = (hashes & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_UNIFORM)
        return uniform.neg_().log1p_().neg_().log_().neg_()
