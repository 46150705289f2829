"""Attention as the formula says it, sequence by sequence in float32: slow, readable, the oracle of the fast one.

Knows nothing about batching or speed.
"""

from dataclasses import dataclass

import torch

from engine.kv.cache import KvCache
from engine.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSequence:
    """One sequence of a plan, for one group of layers."""

    first: int
    """First token in the plan."""
    end: int
    slots: torch.Tensor
    """int64[S] of the last S positions: those that its first token attends to, and all after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMetadata:
    """The plan on the device of the cache, one entry per group of layers."""

    slots: torch.Tensor
    """int64[G, T]"""
    sequences: tuple[tuple[ReferenceSequence, ...], ...]


class ReferenceAttention:
    """softmax(q k^T * scale) v with a causal mask aligned at the last position, cut off at a layer's window."""

    def __init__(self, cache: KvCache, *, scale: float | None = None) -> None:
        """scale: of the scores; None: 1 / sqrt(head dim)."""
        self._cache = cache
        self._scale = cache.tensor.shape[-1] ** -0.5 if scale is None else scale
        self._windows = [group.window for group in cache.layout.groups]

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> ReferenceMetadata:
        groups = range(len(self._windows))
        return ReferenceMetadata(
            slots=torch.from_numpy(plan.slots).to(self._cache.device),
            sequences=tuple(
                tuple(self._sequence(plan, group, index) for index in range(plan.num_sequences)) for group in groups
            ),
        )

    def _sequence(self, plan: StepPlan, group: int, index: int) -> ReferenceSequence:
        size, window = self._cache.block_size, self._windows[group]
        first, end = plan.query_start[index : index + 2].tolist()
        context = int(plan.context_lengths[index])
        start = 0 if window is None else max(0, context - (end - first) - window + 1)
        position = torch.arange(start, context)
        table = torch.from_numpy(plan.block_tables[group, index]).long()
        slots = table[position // size] * size + position % size
        return ReferenceSequence(first=first, end=end, slots=slots.to(self._cache.device))

    def attend(
        self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor, metadata: ReferenceMetadata
    ) -> torch.Tensor:
        group, place = self._cache.layer_places[layer]
        by_position = self._cache.tensor[:, place].transpose(1, 2)  # [num_blocks, block_size, 2, kv heads, head dim]
        size = self._cache.block_size
        where = (metadata.slots[group] // size, metadata.slots[group] % size)
        by_position[where] = keys_values.view(len(keys_values), 2, -1, keys_values.shape[2]).to(self._cache.dtype)
        outputs = []
        for sequence in metadata.sequences[group]:
            kv = by_position[sequence.slots // size, sequence.slots % size].float()
            own = queries[sequence.first : sequence.end].float()
            outputs.append(attend_one(own, kv[:, 0], kv[:, 1], self._scale, self._windows[group]))
        return torch.cat(outputs).to(queries.dtype)


def attend_one(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """One sequence. queries: [n, heads, d], the last n of S positions; keys, values: [S, kv heads, d]; float32."""
    num_queries, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (keys, values))
    scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * scale
    key = torch.arange(len(keys[0]), device=scores.device)
    query = key[len(key) - num_queries :, None]
    visible = key <= query if window is None else (key <= query) & (key > query - window)
    weights: torch.Tensor = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1).reshape(num_queries, num_heads * head_dim)
