"""The noise against its definition in plain Python integers, and its distribution."""

import math

import numpy as np
import pytest
import torch

from engine.noise import GumbelNoise, row_keys

pytestmark = pytest.mark.torch

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def _mix32(value: int) -> int:
    value ^= value >> 16
    value = value * 0x21F0AAAD & MASK32
    value ^= value >> 15
    value = value * 0xD35A2D97 & MASK32
    return value ^ value >> 15


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK64
    return value ^ value >> 31


def reference_noise(seed: int, child: int, position: int, token: int) -> float:
    """As the module's docstring defines it."""
    key = _splitmix64(_splitmix64(_splitmix64(seed) ^ child) ^ position)
    hashed = _mix32((_mix32(token) ^ key & MASK32) * (key >> 32 | 1) & MASK32)
    uniform = min(float(np.float32(np.float32(hashed & 0x7FFFFFFF) + np.float32(0.5))) / 2**31, 1 - 2**-24)
    return -math.log(-math.log1p(-uniform))


def _keys(seed: list[int], child: list[int], position: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return row_keys(
        np.array(seed, dtype=np.uint64), np.array(child, dtype=np.int32), np.array(position, dtype=np.int32)
    )


def test_noise_equals_its_definition_for_any_counter() -> None:
    counters = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (MASK64, 7, 4095), (123456789 << 30, 3, 100_000)]
    seeds, children, positions = (list(column) for column in zip(*counters, strict=True))
    rows = GumbelNoise(300, torch.device("cpu")).rows(_keys(seeds, children, positions))
    wanted = [[reference_noise(*counter, token) for token in range(300)] for counter in counters]
    torch.testing.assert_close(rows, torch.tensor(wanted), atol=2e-5, rtol=1e-5)


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    keys = _keys([7] * 40, [0] * 40, list(range(40)))
    rows = GumbelNoise(5000, torch.device("cpu")).rows(keys)
    assert bool(torch.isfinite(rows).all())
    assert float(rows.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(rows.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    correlation = torch.corrcoef(rows)
    assert float((correlation - torch.eye(40)).abs().max()) < 0.08
