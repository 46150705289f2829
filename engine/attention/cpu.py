"""Batched attention: sequences that decode are gathered and attended to in groups, prefill chunks one by one.

    tokens of a plan:   [decode d0 d1 d2 ... )[chunk of s0      )[chunk of s1      )
    pieces:             [group    )[group    )[piece            )[piece            )

A group is as many neighbouring one-token sequences as fit GATHER_BYTES_MAX, so that gathered keys and values stay in
the processor's cache between gathering and use. Query heads that share a KV head become query rows of one product
(decode), or KV heads become the batch (prefill), so that keys and values are never repeated in memory.

With `exact`, query rows are padded to a multiple of ROW_UNIT and keys to a multiple of KEY_UNIT: the kernel then runs
the same operations on a row whatever else is in the call (see docs/experiments.md), and masked keys add exact zeros.
Written for the CPU's kernel; it runs unchanged on other devices. Knows nothing about weights.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.kv.cache import KvCache
from engine.step import IntArray, StepPlan

GATHER_BYTES_MAX = 3 << 19
"""Of one group's keys and values as float32, on a CPU."""
ROW_UNIT = 4
KEY_UNIT = 512
"""Key positions that torch's CPU kernel handles at once."""
NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One call of the attention kernel per layer."""

    first: int
    """First token in the plan."""
    end: int
    is_group: bool
    """Sequences of one token each; else one prefill chunk."""
    rows: tuple[torch.Tensor, ...]
    """Per layer, of `KvCache.part_rows`."""
    stored: torch.Tensor
    """Scratch for the gathered parts as they are stored."""
    gathered: torch.Tensor
    """The same in the dtype of the queries; the same memory when the dtypes are equal."""
    keys: torch.Tensor
    """View of `gathered` as the kernel wants it: [sequences, kv heads, keys, head dim] for a group,
    [kv heads, group, keys, head dim] for a chunk."""
    values: torch.Tensor
    mask: torch.Tensor | None
    """Added to the scores: [sequences, 1, 1, keys] of a group, [1, 1, queries, keys] of a chunk. None: plain causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMetadata:
    """A plan, cut into pieces."""

    slot_rows: tuple[torch.Tensor, ...]
    """Per layer, of `KvCache.slot_rows`."""
    pieces: tuple[Piece, ...]


class CpuAttention:
    """See the module. Owns scratch memory: one call at a time."""

    def __init__(self, cache: KvCache, *, num_heads: int, exact: bool) -> None:
        _, _, _, self._block_size, self._kv_heads, self._head_dim = cache.tensor.shape
        self._cache = cache
        self._group = num_heads // self._kv_heads
        self._exact = exact
        self._block_unit = KEY_UNIT // math.gcd(KEY_UNIT, self._block_size) if exact else 1
        self._bytes_max = GATHER_BYTES_MAX if cache.device.type == "cpu" else 1 << 62
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> CpuMetadata:
        counts = np.diff(plan.query_start)
        num_blocks = -(-plan.context_lengths // (self._block_size * self._block_unit)) * self._block_unit
        pieces = []
        for first, end in self._groups(counts, num_blocks):
            if counts[first] == 1:
                pieces.append(self._group_piece(plan, first, end, int(num_blocks[first:end].max()), dtype))
            else:
                pieces.append(self._chunk_piece(plan, first, int(num_blocks[first]), dtype))
        slots = torch.from_numpy(plan.slots[0]).to(self._cache.device)
        return CpuMetadata(slot_rows=self._cache.slot_rows(slots), pieces=tuple(pieces))

    def _groups(self, counts: IntArray, num_blocks: IntArray) -> Iterator[tuple[int, int]]:
        """Half-open ranges of sequences that make one piece: at most half as many masked blocks as real ones."""
        block_bytes = 2 * self._block_size * self._kv_heads * self._head_dim * 4
        first, widest, total = 0, 0, 0
        for index in range(len(counts)):
            blocks = int(num_blocks[index])
            width = max(widest, blocks)
            padded = width * (index + 1 - first)
            joins = counts[index] == 1 and counts[first] == 1 and 2 * padded <= 3 * (total + blocks)
            if index > first and not (joins and padded * block_bytes <= self._bytes_max):
                yield first, index
                first, width, total = index, blocks, 0
            widest, total = width, total + blocks
        yield first, len(counts)

    def _rows(self, plan: StepPlan, first: int, end: int, num_blocks: int) -> tuple[torch.Tensor, ...]:
        table = plan.block_tables[0, first:end, :num_blocks].astype(np.int64)
        table = np.pad(table, ((0, 0), (0, num_blocks - table.shape[1])))
        return self._cache.part_rows(torch.from_numpy(table.reshape(-1)).to(self._cache.device))

    def _group_piece(self, plan: StepPlan, first: int, end: int, num_blocks: int, dtype: torch.dtype) -> Piece:
        count, num_keys = end - first, num_blocks * self._block_size
        hidden = np.arange(num_keys) >= plan.context_lengths[first:end, None]
        stored, gathered = self._buffers(2 * count * num_blocks, dtype)
        heads = gathered.view(2, count, num_keys, self._kv_heads, self._head_dim).transpose(2, 3)
        return Piece(
            first=int(plan.query_start[first]),
            end=int(plan.query_start[end]),
            is_group=True,
            rows=self._rows(plan, first, end, num_blocks),
            stored=stored,
            gathered=gathered,
            keys=heads[0],
            values=heads[1],
            mask=self._mask(hidden, dtype).view(count, 1, 1, num_keys),
        )

    def _chunk_piece(self, plan: StepPlan, index: int, num_blocks: int, dtype: torch.dtype) -> Piece:
        first, end = plan.query_start[index : index + 2].tolist()
        context, count = int(plan.context_lengths[index]), end - first
        num_keys = num_blocks * self._block_size if self._exact else context
        mask = None
        if self._exact or context > count:
            queries = -(-count // ROW_UNIT) * ROW_UNIT if self._exact else count
            hidden = np.arange(num_keys) > (context - count + np.arange(queries))[:, None]
            mask = self._mask(hidden, dtype).view(1, 1, queries, num_keys)
        stored, gathered = self._buffers(2 * num_blocks, dtype)
        heads = gathered.view(2, -1, self._kv_heads, self._head_dim)[:, :num_keys].transpose(1, 2).unsqueeze(2)
        heads = heads.expand(2, self._kv_heads, self._group, num_keys, self._head_dim)
        rows = self._rows(plan, index, index + 1, num_blocks)
        return Piece(
            first=first,
            end=end,
            is_group=False,
            rows=rows,
            stored=stored,
            gathered=gathered,
            keys=heads[0],
            values=heads[1],
            mask=mask,
        )

    def _mask(self, hidden: NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
        where = torch.from_numpy(hidden).to(self._cache.device)
        return torch.zeros(hidden.shape, dtype=dtype, device=where.device).masked_fill_(where, NEVER)

    def _buffers(self, num_parts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch [num_parts, values per part] in the cache's dtype and in `dtype`, shared by all pieces of a plan."""
        stored = self._buffer(num_parts, self._cache.dtype)
        return stored, stored if dtype == self._cache.dtype else self._buffer(num_parts, dtype)

    def _buffer(self, num_parts: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = self._scratch.get(dtype)
        if buffer is None or len(buffer) < num_parts:
            buffer = torch.empty(num_parts, self._cache.parts.shape[1], dtype=dtype, device=self._cache.device)
            self._scratch[dtype] = buffer
        return buffer[:num_parts]

    def attend(
        self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor, metadata: CpuMetadata
    ) -> torch.Tensor:
        self._cache.write(metadata.slot_rows[layer], keys_values)
        pieces = metadata.pieces
        if len(pieces) == 1:
            return self._attend_piece(layer, queries, pieces[0])
        return torch.cat([self._attend_piece(layer, queries[piece.first : piece.end], piece) for piece in pieces])

    def _attend_piece(self, layer: int, queries: torch.Tensor, piece: Piece) -> torch.Tensor:
        torch.index_select(self._cache.parts, 0, piece.rows[layer], out=piece.stored)
        if piece.gathered is not piece.stored:
            piece.gathered.copy_(piece.stored)
        return self._attend_group(queries, piece) if piece.is_group else self._attend_chunk(queries, piece)

    def _attend_group(self, queries: torch.Tensor, piece: Piece) -> torch.Tensor:
        count, group = len(queries), self._group
        queries = queries.reshape(count, self._kv_heads, group, self._head_dim)
        missing = -group % ROW_UNIT if self._exact else 0
        if missing:
            queries = F.pad(queries, (0, 0, 0, missing))
        output = F.scaled_dot_product_attention(queries, piece.keys, piece.values, attn_mask=piece.mask)
        if missing:
            output = output[:, :, :group]
        return output.reshape(count, -1)

    def _attend_chunk(self, queries: torch.Tensor, piece: Piece) -> torch.Tensor:
        count, mask = len(queries), piece.mask
        if mask is not None and mask.shape[2] > count:
            queries = F.pad(queries, (0, 0, 0, 0, 0, mask.shape[2] - count))
        grouped = queries.reshape(len(queries), self._kv_heads, self._group, self._head_dim).permute(1, 2, 0, 3)
        output = F.scaled_dot_product_attention(
            grouped, piece.keys, piece.values, attn_mask=mask, is_causal=mask is None
        )
        return output.permute(2, 0, 1, 3)[:count].reshape(count, -1)
