"""Rotary position embedding: tables of cosines and sines, and their application to the two halves of a head.

The convention is transformers': dimension i is rotated with dimension i + head_dim / 2. Knows nothing about attention.
"""

import math

import torch

from engine.model.config import ModelConfig, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position of each pair of dimensions, scaled as the model was trained. float32[head_dim / 2]"""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _scale_llama3(frequencies, scaling)


def _scale_llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


class Rotary:
    """Tables of one theta and scaling for positions [0, max_model_len).

    They cover queries, keys and values side by side, so that one fused projection is rotated in one go: values are
    turned by no angle, which leaves their bits as they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        theta: float,
        scaling: RopeScaling | None,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        frequencies = inverse_frequencies(config.head_dim, theta, scaling)
        angles = torch.arange(max_model_len).float()[:, None] * frequencies
        self._cosines = torch.cat((angles.cos(), angles.cos()), dim=1).to(device)
        self._sines = torch.cat((-angles.sin(), angles.sin()), dim=1).to(device)
        self._half = config.head_dim // 2
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._num_heads = self._num_rotated + config.num_kv_heads

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines for `rotate`, each [T, heads + 2 * kv heads, head_dim]. positions: int64[T]"""
        shape = (len(positions), self._num_heads, 2 * self._half)
        cosines = torch.ones(shape, dtype=dtype, device=positions.device)
        sines = torch.zeros(shape, dtype=dtype, device=positions.device)
        cosines[:, : self._num_rotated] = self._cosines[positions].unsqueeze(1)
        sines[:, : self._num_rotated] = self._sines[positions].unsqueeze(1)
        return cosines, sines

    def rotate(self, heads: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """heads: [T, heads + 2 * kv heads, head_dim]; returns a fresh tensor of that shape."""
        cosines, sines = tables
        return (heads * cosines).addcmul_(heads.roll(self._half, -1), sines)
