"""Attention as the formula says it, sequence by sequence in float32: slow, readable, the oracle of the fast one.

Knows nothing about batching or speed.
"""

from dataclasses import dataclass

import torch

from engine.kv.cache import KvCache
from engine.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMetadata:
    """The plan on the device of the cache."""

    slots: torch.Tensor
    """int64[T]"""
    sequences: tuple[tuple[int, int, torch.Tensor], ...]
    """Per sequence: first token, end token, int64[context] slots of the positions to attend to."""


class ReferenceAttention:
    """softmax(q k^T / sqrt(d)) v with a causal mask aligned at the last position."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> ReferenceMetadata:
        device, size = self._cache.device, self._cache.block_size
        sequences = []
        for index in range(plan.num_sequences):
            position = torch.arange(int(plan.context_lengths[index]))
            table = torch.from_numpy(plan.block_tables[0, index]).long()
            slots = table[position // size] * size + position % size
            first, end = plan.query_start[index : index + 2].tolist()
            sequences.append((first, end, slots.to(device)))
        return ReferenceMetadata(slots=torch.from_numpy(plan.slots[0]).to(device), sequences=tuple(sequences))

    def attend(
        self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor, metadata: ReferenceMetadata
    ) -> torch.Tensor:
        by_position = self._cache.tensor[:, layer].transpose(1, 2)  # [num_blocks, block_size, 2, kv heads, head dim]
        size = self._cache.block_size
        where = (metadata.slots // size, metadata.slots % size)
        by_position[where] = keys_values.view(len(keys_values), 2, -1, keys_values.shape[2]).to(self._cache.dtype)
        outputs = []
        for first, end, slots in metadata.sequences:
            kv = by_position[slots // size, slots % size].float()
            outputs.append(attend_one(queries[first:end].float(), kv[:, 0], kv[:, 1]))
        return torch.cat(outputs).to(queries.dtype)


def attend_one(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One sequence. queries: [n, heads, d], the last n of S positions; keys, values: [S, kv heads, d]; float32."""
    num_queries, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (keys, values))
    scores = queries.transpose(0, 1) @ keys.transpose(1, 2) / head_dim**0.5
    visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril(scores.shape[2] - num_queries)
    weights: torch.Tensor = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1).reshape(num_queries, num_heads * head_dim)
