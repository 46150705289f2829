"""Batched attention: sequences that decode are gathered and attended to in groups, prefill chunks one by one.

    tokens of a plan:   [decode d0 d1 d2 ... )[chunk of s0      )[chunk of s1      )
    pieces:             [group    )[group    )[piece            )[piece            )

A group is as many neighbouring one-token sequences as fit GATHER_BYTES_MAX, so that gathered keys and values stay in
the processor's cache between gathering and use. Query heads that share a KV head become query rows of one product
(decode), or KV heads become the batch (prefill), so that keys and values are never repeated in memory.

With `exact`, query rows are padded to a multiple of ROW_UNIT and keys to a multiple of KEY_UNIT: the kernel then runs
the same operations on a row whatever else is in the call (see docs/experiments.md), and masked keys add exact zeros.

Layers with a window gather from the first block that the piece's first token needs; with `exact` from the multiple of
KEY_UNIT before it, so that the kernel cuts the keys at the same positions however a prompt is chunked:

    keys:    0        KEY_UNIT       2 * KEY_UNIT    3 * KEY_UNIT
    piece:            [ not needed )[ window and chunk )[ padding )

Masked places are filled with the sequence's own last block, never with another's: a masked number adds nothing, but
what is no number would (0 * NaN). Groups of layers with the same window share everything but the block ids. Written for
the CPU's kernel; it runs unchanged on other devices. Knows nothing about weights.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from core.layout import GroupLayout
from engine.kv.cache import KvCache
from engine.step import IntArray, StepPlan

GATHER_BYTES_MAX = 3 << 19
"""Of one group's keys and values as float32, on a CPU."""
ROW_UNIT = 4
KEY_UNIT = 512
"""Key positions that torch's CPU kernel handles at once."""
NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Sequences that one call of the kernel handles, and the blocks that it gathers for each of them."""

    first: int
    """First sequence in the plan."""
    end: int
    starts: IntArray
    """Per sequence, the index of the first block gathered, in its block table."""
    num_blocks: int
    needed: IntArray
    """Per sequence, the index of the first block that its tokens attend to."""
    ends: IntArray
    """Per sequence, the index after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One call of the attention kernel per layer."""

    first: int
    """First token in the plan."""
    end: int
    is_group: bool
    """Sequences of one token each; else one prefill chunk."""
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
class GroupMetadata:
    """A plan, cut into pieces for one group of layers."""

    slot_rows: tuple[torch.Tensor, ...]
    """Per place, of `KvCache.slot_rows`."""
    pieces: tuple[Piece, ...]
    part_rows: tuple[tuple[torch.Tensor, ...], ...]
    """Per piece and place, of `KvCache.part_rows`."""


class CpuAttention:
    """See the module. Owns scratch memory: one call at a time."""

    def __init__(self, cache: KvCache, *, num_heads: int, exact: bool, scale: float | None = None) -> None:
        """scale: of the scores; None: 1 / sqrt(head dim)."""
        _, _, _, self._block_size, self._kv_heads, self._head_dim = cache.tensor.shape
        self._cache = cache
        self._group = num_heads // self._kv_heads
        self._exact = exact
        self._scale = scale
        self._block_unit = KEY_UNIT // math.gcd(KEY_UNIT, self._block_size) if exact else 1
        self._bytes_max = GATHER_BYTES_MAX if cache.device.type == "cpu" else 1 << 62
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> tuple[GroupMetadata, ...]:
        by_window: dict[int | None, tuple[list[Span], tuple[Piece, ...]]] = {}
        groups = []
        for index, group in enumerate(self._cache.layout.groups):
            if group.window not in by_window:
                spans = list(self._spans(plan, group))
                pieces = tuple(self._piece(plan, span, group.window, dtype) for span in spans)
                by_window[group.window] = spans, pieces
            spans, pieces = by_window[group.window]
            slots = torch.from_numpy(plan.slots[index]).to(self._cache.device)
            groups.append(
                GroupMetadata(
                    slot_rows=self._cache.slot_rows(slots),
                    pieces=pieces,
                    part_rows=tuple(self._part_rows(plan.block_tables[index], span) for span in spans),
                )
            )
        return tuple(groups)

    def _spans(self, plan: StepPlan, group: GroupLayout) -> Iterator[Span]:
        """The plan's sequences in order, neighbours of one token together."""
        counts = np.diff(plan.query_start)
        unit = self._block_unit
        positions = (plan.context_lengths - counts).tolist()
        firsts = [group.needed_blocks(position, self._block_size).start for position in positions]
        needed = np.array(firsts, dtype=np.int32)
        starts = needed // unit * unit
        ends = -(-plan.context_lengths // self._block_size)
        num_blocks = -(-ends // unit) * unit - starts
        for first, end in self._neighbours(counts, num_blocks):
            part = slice(first, end)
            yield Span(
                first=first,
                end=end,
                starts=starts[part],
                num_blocks=int(num_blocks[part].max()),
                needed=needed[part],
                ends=ends[part],
            )

    def _neighbours(self, counts: IntArray, num_blocks: IntArray) -> Iterator[tuple[int, int]]:
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

    def _part_rows(self, tables: IntArray, span: Span) -> tuple[torch.Tensor, ...]:
        """tables: [S, M] of one group. In the place of what is not needed, a sequence's own last block is gathered, and
        masked: another's may be the target of a read at this moment, and hold what is no number.
        """
        columns = span.starts[:, None] + np.arange(span.num_blocks)
        is_needed = (span.needed[:, None] <= columns) & (columns < span.ends[:, None])
        columns = np.where(is_needed, columns, span.ends[:, None] - 1)
        block_ids = np.take_along_axis(tables[span.first : span.end], columns, axis=1).astype(np.int64)
        return self._cache.part_rows(torch.from_numpy(block_ids.reshape(-1)).to(self._cache.device))

    def _piece(self, plan: StepPlan, span: Span, window: int | None, dtype: torch.dtype) -> Piece:
        first, end = int(plan.query_start[span.first]), int(plan.query_start[span.end])
        count = span.end - span.first
        is_group = end - first == count
        stored, gathered = self._buffers(2 * count * span.num_blocks, dtype)
        mask = self._group_mask(plan, span, window) if is_group else self._chunk_mask(plan, span, window)
        num_keys = span.num_blocks * self._block_size
        if is_group:
            heads = gathered.view(2, count, num_keys, self._kv_heads, self._head_dim).transpose(2, 3)
        else:
            if not self._exact:
                num_keys = int(plan.context_lengths[span.first]) - int(span.starts[0]) * self._block_size
            heads = gathered.view(2, -1, self._kv_heads, self._head_dim)[:, :num_keys].transpose(1, 2).unsqueeze(2)
            heads = heads.expand(2, self._kv_heads, self._group, num_keys, self._head_dim)
        return Piece(
            first=first,
            end=end,
            is_group=is_group,
            stored=stored,
            gathered=gathered,
            keys=heads[0],
            values=heads[1],
            mask=None if mask is None else self._to_mask(mask, dtype),
        )

    def _group_mask(self, plan: StepPlan, span: Span, window: int | None) -> NDArray[np.bool_]:
        """Which keys are hidden, [sequences, 1, 1, keys]."""
        contexts = plan.context_lengths[span.first : span.end, None]
        positions = span.starts[:, None] * self._block_size + np.arange(span.num_blocks * self._block_size)
        hidden = positions >= contexts
        if window is not None:
            hidden |= positions < contexts - window
        return hidden[:, None, None]

    def _chunk_mask(self, plan: StepPlan, span: Span, window: int | None) -> NDArray[np.bool_] | None:
        """Which keys are hidden, [1, 1, queries, keys]; None when the kernel's own causal mask says the same."""
        count = int(plan.query_start[span.end] - plan.query_start[span.first])
        start, context = int(span.starts[0]) * self._block_size, int(plan.context_lengths[span.first])
        is_cut = window is not None and window < count
        if not self._exact and context - start == count and not is_cut:
            return None
        queries = -(-count // ROW_UNIT) * ROW_UNIT if self._exact else count
        keys = np.arange(start, start + span.num_blocks * self._block_size if self._exact else context)
        positions = (context - count + np.arange(queries))[:, None]
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        return hidden[None, None]

    def _to_mask(self, hidden: NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
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
        self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor, metadata: tuple[GroupMetadata, ...]
    ) -> torch.Tensor:
        group, place = self._cache.layer_places[layer]
        shared = metadata[group]
        self._cache.write(shared.slot_rows[place], keys_values)
        pieces, rows = shared.pieces, shared.part_rows
        if len(pieces) == 1:
            return self._attend_piece(queries, pieces[0], rows[0][place])
        return torch.cat(
            [
                self._attend_piece(queries[piece.first : piece.end], piece, rows[index][place])
                for index, piece in enumerate(pieces)
            ]
        )

    def _attend_piece(self, queries: torch.Tensor, piece: Piece, rows: torch.Tensor) -> torch.Tensor:
        torch.index_select(self._cache.parts, 0, rows, out=piece.stored)
        if piece.gathered is not piece.stored:
            piece.gathered.copy_(piece.stored)
        return self._attend_group(queries, piece) if piece.is_group else self._attend_chunk(queries, piece)

    def _attend_group(self, queries: torch.Tensor, piece: Piece) -> torch.Tensor:
        count, group = len(queries), self._group
        queries = queries.reshape(count, self._kv_heads, group, self._head_dim)
        missing = -group % ROW_UNIT if self._exact else 0
        if missing:
            queries = F.pad(queries, (0, 0, 0, missing))
        output = F.scaled_dot_product_attention(
            queries, piece.keys, piece.values, attn_mask=piece.mask, scale=self._scale
        )
        if missing:
            output = output[:, :, :group]
        return output.reshape(count, -1)

    def _attend_chunk(self, queries: torch.Tensor, piece: Piece) -> torch.Tensor:
        count, mask = len(queries), piece.mask
        if mask is not None and mask.shape[2] > count:
            queries = F.pad(queries, (0, 0, 0, 0, 0, mask.shape[2] - count))
        grouped = queries.reshape(len(queries), self._kv_heads, self._group, self._head_dim).permute(1, 2, 0, 3)
        output = F.scaled_dot_product_attention(
            grouped, piece.keys, piece.values, attn_mask=mask, is_causal=mask is None, scale=self._scale
        )
        return output.permute(2, 0, 1, 3)[:count].reshape(count, -1)
