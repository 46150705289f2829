"""Plans for measuring and checking a runner without a scheduler: sequences in blocks of their own, greedy.

Knows nothing about torch or pools.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.step import IntArray, SamplingBatch, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSequence:
    """Positions [start, end) of one sequence are to be computed."""

    token_ids: IntArray
    """At least `end` ids."""
    start: int
    end: int
    block_ids: IntArray
    """The sequence's blocks in order."""
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


def build_plan(sequences: Sequence[ProbeSequence], block_size: int) -> StepPlan:
    """One plan over `sequences`, in this order."""
    positions = [np.arange(sequence.start, sequence.end) for sequence in sequences]
    slots = [
        sequence.block_ids[place // block_size].astype(np.int64) * block_size + place % block_size
        for sequence, place in zip(sequences, positions, strict=True)
    ]
    used = [-(-sequence.end // block_size) for sequence in sequences]
    tables = np.zeros((len(sequences), max(used)), dtype=np.int32)
    for row, (sequence, count) in enumerate(zip(sequences, used, strict=True)):
        tables[row, :count] = sequence.block_ids[:count]
    sample_rows = np.flatnonzero([sequence.samples for sequence in sequences]).astype(np.int32)
    return StepPlan(
        rows=np.arange(len(sequences), dtype=np.int32),
        token_ids=np.concatenate([sequence.token_ids[sequence.start : sequence.end] for sequence in sequences]),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots)[None],
        query_start=np.cumsum([0, *(len(place) for place in positions)], dtype=np.int32),
        context_lengths=np.array([sequence.end for sequence in sequences], dtype=np.int32),
        block_tables=tables[None],
        sample_rows=sample_rows,
        sampling=greedy_batch(len(sample_rows)),
        history=None,
    )


def one_sequence_plan(token_ids: IntArray, start: int, end: int, block_size: int) -> StepPlan:
    """Positions [start, end) of a sequence that lies in blocks 0, 1, 2, ..."""
    block_ids = np.arange(-(-end // block_size), dtype=np.int32)
    sequence = ProbeSequence(token_ids=token_ids, start=start, end=end, block_ids=block_ids)
    return build_plan([sequence], block_size)
