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

from engine.kv.cache import KvCache
from engine.step import StepPlan

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
    num_sequences: int
    """Sequences of one token each, or 1 for a prefill chunk."""
    num_keys: int
    """Key positions per sequence to attend to, the masked ones included."""
    rows: torch.Tensor
    """int64[layers, 2 * blocks] of `KvCache.part_rows`."""
    mask: torch.Tensor | None
    """Added to the scores: [sequences, 1, 1, keys] of a group, [1, 1, queries, keys] of a chunk. None: plain causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMetadata:
    """A plan, cut into pieces."""

    slot_rows: torch.Tensor
    """int64[layers, 2, T] of `KvCache.slot_rows`."""
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
        slots = torch.from_numpy(plan.slots).to(self._cache.device)
        return CpuMetadata(slot_rows=self._cache.slot_rows(slots), pieces=tuple(pieces))

    def _groups(self, counts: np.ndarray, num_blocks: np.ndarray) -> Iterator[tuple[int, int]]:
        """Half-open ranges of sequences that make one piece: at most twice as many padded blocks as real ones."""
        block_bytes = 2 * self._block_size * self._kv_heads * self._head_dim * 4
        first, widest, total = 0, 0, 0
        for index in range(len(counts)):
            blocks = int(num_blocks[index])
            width = max(widest, blocks)
            padded = width * (index + 1 - first)
            joins = counts[index] == 1 and counts[first] == 1 and padded <= 2 * (total + blocks)
            if index > first and not (joins and padded * block_bytes <= self._bytes_max):
                yield first, index
                first, width, total = index, blocks, 0
            widest, total = width, total + blocks
        yield first, len(counts)

    def _rows(self, plan: StepPlan, first: int, end: int, num_blocks: int) -> torch.Tensor:
        table = plan.block_tables[first:end, :num_blocks].astype(np.int64)
        table = np.pad(table, ((0, 0), (0, num_blocks - table.shape[1])))
        return self._cache.part_rows(torch.from_numpy(table.reshape(-1)).to(self._cache.device))

    def _group_piece(self, plan: StepPlan, first: int, end: int, num_blocks: int, dtype: torch.dtype) -> Piece:
        num_keys = num_blocks * self._block_size
        hidden = np.arange(num_keys) >= plan.context_lengths[first:end, None]
        return Piece(
            first=int(plan.query_start[first]),
            end=int(plan.query_start[end]),
            num_sequences=end - first,
            num_keys=num_keys,
            rows=self._rows(plan, first, end, num_blocks),
            mask=self._mask(hidden, dtype).view(end - first, 1, 1, num_keys),
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
        rows = self._rows(plan, index, index + 1, num_blocks)
        return Piece(first=first, end=end, num_sequences=1, num_keys=num_keys, rows=rows, mask=mask)

    def _mask(self, hidden: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        where = torch.from_numpy(hidden).to(self._cache.device)
        return torch.zeros(hidden.shape, dtype=dtype, device=where.device).masked_fill_(where, NEVER)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: CpuMetadata
    ) -> torch.Tensor:
        self._cache.write(metadata.slot_rows[layer], keys, values)
        outputs = []
        for piece in metadata.pieces:
            part = queries[piece.first : piece.end]
            gathered = self._gather(piece.rows[layer], queries.dtype)
            if piece.end - piece.first == piece.num_sequences:
                outputs.append(self._attend_group(part, gathered, piece))
            else:
                outputs.append(self._attend_chunk(part, gathered, piece))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _gather(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[2 * blocks, values per part] in `dtype`, valid until the next call."""
        stored = self._buffer(self._cache.dtype, len(rows))
        torch.index_select(self._cache.parts, 0, rows, out=stored)
        return stored if dtype == self._cache.dtype else self._buffer(dtype, len(rows)).copy_(stored)

    def _buffer(self, dtype: torch.dtype, num_parts: int) -> torch.Tensor:
        buffer = self._scratch.get(dtype)
        if buffer is None or len(buffer) < num_parts:
            buffer = torch.empty(num_parts, self._cache.parts.shape[1], dtype=dtype, device=self._cache.device)
            self._scratch[dtype] = buffer
        return buffer[:num_parts]

    def _attend_group(self, queries: torch.Tensor, gathered: torch.Tensor, piece: Piece) -> torch.Tensor:
        count, group = piece.num_sequences, self._group
        kv = gathered.view(2, count, piece.num_keys, self._kv_heads, self._head_dim).transpose(2, 3)
        queries = queries.reshape(count, self._kv_heads, group, self._head_dim)
        if self._exact and group % ROW_UNIT:
            queries = F.pad(queries, (0, 0, 0, ROW_UNIT - group % ROW_UNIT))
        output = F.scaled_dot_product_attention(queries, kv[0], kv[1], attn_mask=piece.mask)
        return output[:, :, :group].reshape(count, -1)

    def _attend_chunk(self, queries: torch.Tensor, gathered: torch.Tensor, piece: Piece) -> torch.Tensor:
        count, mask = len(queries), piece.mask
        keys, values = (
            part[: piece.num_keys]
            .transpose(0, 1)
            .unsqueeze(1)
            .expand(self._kv_heads, self._group, piece.num_keys, self._head_dim)
            for part in gathered.view(2, -1, self._kv_heads, self._head_dim)
        )
        if mask is not None and mask.shape[2] > count:
            queries = F.pad(queries, (0, 0, 0, 0, 0, mask.shape[2] - count))
        grouped = queries.view(-1, self._kv_heads, self._group, self._head_dim).permute(1, 2, 0, 3)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None)
        return output.permute(2, 0, 1, 3)[:count].reshape(count, -1)
