"""The border between planning and running: what one forward pass shall do, and what it did.

Sequences live in rows of a `SequenceTable` (`engine.kv.table`), a struct of NumPy arrays that planner and runner
share; a StepPlan says which positions of which rows to compute. Imports no torch: planner, pool and table work
without it.

    one row of a plan:      0        start        start+count       tokens known
                            [ computed )[ this step )[    later      )
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of the rows that sample in this step, one entry per sampling row, in plan order. B = rows."""

    temperature: FloatArray
    """[B] 0 is greedy."""
    top_k: IntArray
    """[B] 0 keeps all."""
    top_p: FloatArray
    """[B]"""
    min_p: FloatArray
    """[B]"""
    repetition_penalty: FloatArray
    """[B] 1 is off."""
    frequency_penalty: FloatArray
    """[B]"""
    presence_penalty: FloatArray
    """[B]"""
    seed: NDArray[np.uint64]
    """[B]"""
    child: IntArray
    """[B]"""
    position: IntArray
    """[B] output index of the token to sample, the counter of the noise (0 for a request's first output token)."""
    num_logprobs: IntArray
    """[B] -1: none wanted; k >= 0: the chosen token's and the k most likely."""
    logit_bias: dict[int, dict[int, float]]
    """index into the batch -> token id -> bias; only rows that have one."""
    prompt_length: IntArray
    """[B] tokens of each row that are prompt: penalties of the output look only past it."""
    num_tokens: IntArray
    """[B] tokens known of each row, prompt and output."""

    @property
    def size(self) -> int:
        return len(self.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass over S sequences and T token positions. Rows that only prefill come after rows that decode one
    token.
    """

    rows: IntArray
    """[S] table row of each sequence."""
    token_ids: IntArray
    """[T] ids to compute, concatenated in order of `rows`."""
    positions: IntArray
    """[T] position of each id in its sequence."""
    slots: LongArray
    """[G, T] per group of layers, where each position's KV goes: block_id * block_size + offset."""
    query_start: IntArray
    """[S + 1] sequence s has token_ids[query_start[s]:query_start[s+1]]."""
    context_lengths: IntArray
    """[S] positions to attend to, this step's included: start + count."""
    block_tables: IntArray
    """[G, S, max blocks in this plan] block ids per group; entries past a row's blocks, and those of a
    window group before the first needed block, are 0 and never attended to."""
    sample_rows: IntArray
    """[B] indices into [0, S) of sequences whose last position's logits are sampled, ascending."""
    sampling: SamplingBatch
    """For sample_rows."""
    history: IntArray | None
    """[B, max num_tokens] token ids of the sampling rows, zero padded; None when no row has a penalty."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of a plan, one entry per sampling row, in the order of `sample_rows`."""

    token_ids: IntArray
    """[B] sampled ids."""
    logprobs: FloatArray | None = None
    """[B] log-probability of each sampled id (raw distribution); None when no row asked."""
    top_ids: IntArray | None = None
    """[B, K] most likely ids first, K = the largest num_logprobs of the batch; None when no row asked for any."""
    top_logprobs: FloatArray | None = None
    """[B, K]"""
    timings_s: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the step (`forward`, `sample`), for metrics."""


class Runner(Protocol):
    """Runs plans. Owns the KV cache's bytes; called from the step thread only."""

    num_blocks: int
    block_size: int

    def execute(self, plan: StepPlan) -> StepOutput:
        """One forward pass: writes KV of every planned position, samples the planned rows."""
        ...
