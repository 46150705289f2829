"""Plans for measuring and checking a runner without a scheduler: sequences in blocks of their own, greedy.

Knows nothing about torch or pools.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.layout import GroupLayout
from engine.step import IntArray, SamplingBatch, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSequence:
    """Positions [start, end) of one sequence are to be computed."""

    token_ids: IntArray
    """At least `end` ids."""
    start: int
    end: int
    block_ids: IntArray
    """The sequence's blocks in order: [blocks] where layers form one group, [groups, blocks] in any case. What a window
    group has before the first block that `start` needs is not looked at."""
    samples: bool = True


def greedy_batch(size: int) -> SamplingBatch:
    """Sampling parameters of rows without any wish."""
    zeros, ones = np.zeros(size, dtype=np.float32), np.ones(size, dtype=np.float32)
    whole = np.zeros(size, dtype=np.int32)
    return SamplingBatch(
        temperature=zeros,
        top_k=whole,
        top_p=ones,
        min_p=zeros,
        repetition_penalty=ones,
        frequency_penalty=zeros,
        presence_penalty=zeros,
        seed=np.zeros(size, dtype=np.uint64),
        child=whole,
        position=whole,
        num_logprobs=whole - 1,
        logit_bias={},
        prompt_length=whole,
        num_tokens=whole,
    )


def build_plan(
    sequences: Sequence[ProbeSequence], block_size: int, groups: Sequence[GroupLayout] | None = None
) -> StepPlan:
    """One plan over `sequences`, in this order. groups: of the cache's layout; None: one without a window."""
    positions = [np.arange(sequence.start, sequence.end) for sequence in sequences]
    blocks = [np.atleast_2d(sequence.block_ids) for sequence in sequences]
    slots = [
        block_ids[:, place // block_size].astype(np.int64) * block_size + place % block_size
        for block_ids, place in zip(blocks, positions, strict=True)
    ]
    num_groups = 1 if groups is None else len(groups)
    used = [-(-sequence.end // block_size) for sequence in sequences]
    tables = np.zeros((num_groups, len(sequences), max(used)), dtype=np.int32)
    for row, (sequence, block_ids, count) in enumerate(zip(sequences, blocks, used, strict=True)):
        assert len(block_ids) == num_groups, f"blocks of {len(block_ids)} groups for a layout of {num_groups}"
        for index in range(num_groups):
            first = groups[index].needed_blocks(sequence.start, block_size).start if groups else 0
            tables[index, row, first:count] = block_ids[index, first:count]
    sample_rows = np.flatnonzero([sequence.samples for sequence in sequences]).astype(np.int32)
    return StepPlan(
        rows=np.arange(len(sequences), dtype=np.int32),
        token_ids=np.concatenate([sequence.token_ids[sequence.start : sequence.end] for sequence in sequences]),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots, axis=1),
        query_start=np.cumsum([0, *(len(place) for place in positions)], dtype=np.int32),
        context_lengths=np.array([sequence.end for sequence in sequences], dtype=np.int32),
        block_tables=tables,
        sample_rows=sample_rows,
        sampling=greedy_batch(len(sample_rows)),
        history=None,
    )


def one_sequence_plan(
    token_ids: IntArray, start: int, end: int, block_size: int, groups: Sequence[GroupLayout] | None = None
) -> StepPlan:
    """Positions [start, end) of a sequence in blocks 0, 1, 2, ...: its first of every group, its second, and so on."""
    num_groups = 1 if groups is None else len(groups)
    num_blocks = -(-end // block_size)
    block_ids = np.arange(num_blocks * num_groups, dtype=np.int32).reshape(num_blocks, num_groups).T
    sequence = ProbeSequence(token_ids=token_ids, start=start, end=end, block_ids=block_ids)
    return build_plan([sequence], block_size, groups)
