"""The iteration planner: which positions of which sequences the next forward pass computes.

Decoding rows come first (one token each), then prefills in chunks under the token budget, then admissions in order of
arrival. A sequence is admitted only if all blocks of its known tokens fit; decoding sequences grow block by block,
and when none is left the latest arrival gives up its blocks and is recomputed later. Pure: no clock, no torch, no
threads.

    plan() -> StepPlan -> Runner.execute -> StepOutput -> apply() -> progress of each sequence
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from core.books import Claim
from core.hashing import ROOT_HASH, ExtraKey, group_hash, hash_block
from core.ids import BlockHash, BlockId
from core.layout import needed_entries
from core.messages import TokenLogprobs
from core.request import FinishReason, SamplingParams
from engine.kv.pool import BlockPool
from engine.kv.table import SequenceTable
from engine.step import IntArray, StepOutput, StepPlan


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One child of a request, or the part of a prompt that a prefill worker computes. Mutable; owned by the scheduler
    between `add` and the progress that ends it (or `remove`)."""

    name: str
    """For messages to people."""
    token_ids: list[int]
    """Prompt, then output."""
    prompt_length: int
    sampling: SamplingParams | None
    """None: compute KV of `token_ids` and stop."""
    child: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    hashes: list[BlockHash] = field(default_factory=list)
    """Of leading full blocks; extended as blocks fill."""
    extra_keys: tuple[ExtraKey, ...] = ()
    num_held_blocks: int = 0
    """Leading full blocks that are valid already, as far as the layers need them."""
    held_blocks: list[BlockId] = field(default_factory=list)
    """One for each of `needed_entries(windows, num_held_blocks)`; their references belong to this sequence."""
    row: int | None = None
    num_cached_tokens: int = 0
    """Tokens that were not computed here, as of the first admission."""
    num_preemptions: int = 0
    arrival: int = -1
    """Order of arrival, given by `add`."""
    first_step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one step (or an admission that found everything cached) changed for one sequence."""

    sequence: Sequence
    num_computed: int
    """Positions whose KV is valid now."""
    token_id: int | None = None
    """The sampled token, if one was."""
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    """Set when the sequence ended; its blocks are already released."""
    is_complete: bool = False
    """A sequence without sampling has computed all of its tokens. It keeps its blocks until `remove`."""


class Scheduler:
    """Owns the waiting queue and the running rows; shares pool and table with the worker that drives it."""

    def __init__(self, *, pool: BlockPool, table: SequenceTable, max_batched_tokens: int) -> None:
        self.pool = pool
        self.table = table
        self.max_batched_tokens = max_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._planned: list[tuple[Sequence, int]] = []
        self._admission_progress: list[Progress] = []
        self._arrivals = 0
        self._too_large: tuple[Sequence, int] | None = None
        """Who did not fit, and the pool's returns then. While others run and return nothing, it is not tried again: to
        look for a long prefix in every step would cost.
        """
        self.is_short_of_blocks = False
        """The first in line did not fit at the last `plan`: nobody else should be promised blocks before it."""
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its tokens must fit the table (checked by the worker at intake)."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and release its blocks. Idempotent."""
        if sequence.row is not None:
            self._leave_row(sequence)
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            self._drop_held(sequence)

    def _drop_held(self, sequence: Sequence) -> None:
        self.pool.release(sequence.held_blocks)
        sequence.held_blocks, sequence.num_held_blocks = [], 0

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. Must be followed by `apply` before the next `plan`."""
        assert not self._planned, "plan called twice without apply"
        self.is_short_of_blocks = False
        budget = self.max_batched_tokens
        decoding = [s for s in self._running if self._remaining(s) == 1 and s.sampling is not None]
        for sequence in self._grow(decoding)[:budget]:
            self._planned.append((sequence, 1))
        budget -= len(self._planned)
        planned = {id(s) for s, _ in self._planned}
        for sequence in self._running:
            if id(sequence) not in planned and budget > 0:
                budget -= self._plan_chunk(sequence, budget)
        while budget > 0 and self._waiting and self.table.num_free_rows:
            if not self._admit(self._waiting[0]) and not self._relieve():
                self.is_short_of_blocks = True
                break
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            budget -= self._plan_chunk(sequence, budget)
        return self._build() if self._planned else None

    def _remaining(self, sequence: Sequence) -> int:
        return int(self.table.num_tokens[sequence.row] - self.table.num_computed[sequence.row])

    def _plan_chunk(self, sequence: Sequence, budget: int) -> int:
        count = min(self._remaining(sequence), budget)
        if count > 0:
            self._planned.append((sequence, count))
        return count

    def _grow(self, decoding: list[Sequence]) -> list[Sequence]:
        """Give each decoding sequence blocks for its next position; preempt the latest arrivals when none are left."""
        if not decoding:
            return []
        rows = np.fromiter((s.row for s in decoding), dtype=np.int32, count=len(decoding))
        needs = self.table.num_computed[rows] // self.table.block_size >= self.table.num_blocks[rows]
        for index in np.flatnonzero(needs):
            sequence = decoding[int(index)]
            while sequence.row is not None:
                blocks = self.pool.allocate(len(self.table.windows))
                if blocks is not None:
                    self.table.append_blocks(sequence.row, blocks)
                    break
                self._preempt(max(self._running, key=lambda s: s.arrival))
        return [s for s in decoding if s.row is not None]

    def _preempt(self, sequence: Sequence) -> None:
        """Give up the blocks of a running sequence; it waits in front of all later arrivals and is computed again."""
        self._running.remove(sequence)
        self._leave_row(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        index = sum(1 for s in self._waiting if s.arrival < sequence.arrival)
        self._waiting.insert(index, sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self.pool.release(self.table.row_blocks(sequence.row))
        self.table.close_row(sequence.row)
        sequence.row = None

    def _admit(self, sequence: Sequence) -> bool:
        """Give the sequence a row and all blocks of its known tokens, or change nothing and return False."""
        if self._running and self._too_large == (sequence, self.pool.num_returns):
            return False
        block_size, num_tokens = self.table.block_size, len(sequence.token_ids)
        num_blocks = -(-num_tokens // block_size)
        num_cacheable = num_tokens // block_size if sequence.sampling is None else (num_tokens - 1) // block_size
        self._extend_hashes(sequence, num_cacheable * block_size)
        found = self.pool.find_prefix(
            sequence.hashes[:num_cacheable],
            self.table.windows,
            block_size,
            held=dict(zip(self._entries(sequence.num_held_blocks), sequence.held_blocks, strict=True)),
            num_held=sequence.num_held_blocks,
        )
        prefix = [found.blocks[entry] for entry in self._entries(found.num_blocks)]
        num_fresh = (num_blocks - found.num_blocks) * len(self.table.windows)
        if not self.pool.fits(prefix, num_fresh):
            self._too_large = sequence, self.pool.num_returns
            return False
        self.pool.acquire(prefix)
        fresh = self.pool.allocate(num_fresh)
        assert fresh is not None, "KV-1: the blocks that fit are not there"
        self._drop_held(sequence)
        num_computed = found.num_blocks * block_size
        sequence.row = self.table.open_row(
            sequence.token_ids,
            prompt_length=sequence.prompt_length,
            num_computed=num_computed,
            sampling=sequence.sampling,
            child=sequence.child,
        )
        self.table.set_prefix(sequence.row, found.num_blocks, prefix)
        self.table.append_blocks(sequence.row, fresh)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = num_computed
        if num_computed and sequence.sampling is None:
            self._admission_progress.append(self._kv_progress(sequence))
        return True

    def _relieve(self) -> bool:
        """When nothing runs and the first in line does not fit, later arrivals give up the blocks they hold (to be
        recomputed) until it does.
        """
        if self._running:
            return False
        first, *others = self._waiting
        for other in reversed(others):
            if other.held_blocks:
                self._drop_held(other)
                if self._admit(first):
                    return True
        return False

    def _build(self) -> StepPlan:
        table, block_size = self.table, self.table.block_size
        rows = np.fromiter((s.row for s, _ in self._planned), dtype=np.int32, count=len(self._planned))
        counts = np.fromiter((c for _, c in self._planned), dtype=np.int32, count=len(self._planned))
        starts = table.num_computed[rows]
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        positions = np.repeat(starts - query_start[:-1], counts) + np.arange(query_start[-1], dtype=np.int32)
        row_of_token = np.repeat(rows, counts)
        blocks = table.blocks[:, row_of_token, positions // block_size].astype(np.int64)
        slots = blocks * block_size + positions % block_size
        context = starts + counts
        samples = (context == table.num_tokens[rows]) & table.samples[rows]
        sample_rows = np.flatnonzero(samples).astype(np.int32)
        return StepPlan(
            rows=rows,
            token_ids=table.tokens[row_of_token, positions],
            positions=positions.astype(np.int32),
            slots=slots,
            query_start=query_start,
            context_lengths=context.astype(np.int32),
            block_tables=table.blocks[:, rows, : int(-(-int(context.max()) // block_size))],
            sample_rows=sample_rows,
            sampling=table.sampling_batch(rows[sample_rows]),
            history=table.history(rows[sample_rows]),
        )

    def apply(self, plan: StepPlan, output: StepOutput) -> list[Progress]:
        """Take a step's result in: positions become valid, full blocks findable, tokens known, sequences ended."""
        planned, self._planned = self._planned, []
        old = self.table.num_computed[plan.rows]
        self.table.num_computed[plan.rows] = plan.context_lengths
        sampled_rows: IntArray = plan.rows[plan.sample_rows]
        self.table.append_tokens(sampled_rows, output.token_ids)
        crossed = old // self.table.block_size != plan.context_lengths // self.table.block_size
        for index in np.flatnonzero(crossed):
            self._cache_full_blocks(planned[int(index)][0], int(old[index]), int(plan.context_lengths[index]))
        for sequence, _count in planned:
            assert sequence.row is not None
            self.pool.release(self.table.pass_blocks(sequence.row))
        progress: list[Progress] = []
        sampled = {int(s): i for i, s in enumerate(plan.sample_rows)}
        for number, (sequence, _count) in enumerate(planned):
            if number in sampled:
                progress.append(self._token_progress(sequence, output, sampled[number]))
            elif sequence.sampling is None:
                progress.append(self._kv_progress(sequence))
        return progress

    def take_admission_progress(self) -> list[Progress]:
        """Progress of sequences without sampling that found blocks cached at their admission."""
        progress, self._admission_progress = self._admission_progress, []
        return [p for p in progress if p.sequence.row is not None]

    def _kv_progress(self, sequence: Sequence) -> Progress:
        return Progress(
            sequence=sequence,
            num_computed=int(self.table.num_computed[sequence.row]),
            is_complete=self._remaining(sequence) == 0,
        )

    def _token_progress(self, sequence: Sequence, output: StepOutput, index: int) -> Progress:
        assert sequence.sampling is not None and sequence.row is not None
        token_id = int(output.token_ids[index])
        sequence.token_ids.append(token_id)
        num_computed = int(self.table.num_computed[sequence.row])
        finish_reason = _finish_reason(sequence, token_id)
        if finish_reason is not None:
            self.remove(sequence)
        return Progress(
            sequence=sequence,
            num_computed=num_computed,
            token_id=token_id,
            logprobs=_logprobs(sequence.sampling, output, index),
            finish_reason=finish_reason,
        )

    def _cache_full_blocks(self, sequence: Sequence, old: int, new: int) -> None:
        block_size = self.table.block_size
        first, last = old // block_size, new // block_size
        self._extend_hashes(sequence, last * block_size)
        assert sequence.row is not None
        for index in range(first, last):
            for group in range(len(self.table.windows)):
                key = group_hash(sequence.hashes[index], group)
                self.pool.cache(self.table.row_block(sequence.row, group, index), key)

    def _entries(self, num_blocks: int) -> list[tuple[int, int]]:
        return needed_entries(self.table.windows, num_blocks, self.table.block_size)

    def _extend_hashes(self, sequence: Sequence, num_tokens: int) -> None:
        block_size = self.table.block_size
        while (len(sequence.hashes) + 1) * block_size <= num_tokens:
            index = len(sequence.hashes)
            parent = sequence.hashes[-1] if index else ROOT_HASH
            tokens = sequence.token_ids[index * block_size : (index + 1) * block_size]
            sequence.hashes.append(hash_block(parent, tokens, () if index else sequence.extra_keys))

    def sequences(self) -> Iterator[Sequence]:
        """Everybody who runs or waits."""
        yield from self._running
        yield from self._waiting

    def claims(self) -> Iterator[Claim]:
        """Every reference to a block that a running or waiting sequence has."""
        for sequence in self._running:
            assert sequence.row is not None, f"KV-3: {sequence.name} runs without a row"
            yield Claim(f"row {sequence.row} of {sequence.name}", self.table.row_blocks(sequence.row))
        for sequence in self._waiting:
            yield Claim(f"waiting {sequence.name}", sequence.held_blocks)

    def check(self) -> None:
        """Assert that pool, table and queues agree; for tests and the idle hook."""
        self.pool.check()
        self.table.check()
        rows = [s.row for s in self._running]
        assert None not in rows and len(set(rows)) == len(rows), f"KV-3: running sequences share a row: {rows}"
        assert self.table.num_rows - self.table.num_free_rows == len(rows), "KV-3: a row is open and nobody's"
        for sequence in self._running:
            row = sequence.row
            assert self.table.num_computed[row] <= self.table.num_blocks[row] * self.table.block_size, (
                f"KV-3: {sequence.name} has KV beyond its blocks"
            )
            assert self.table.num_tokens[row] == len(sequence.token_ids), (
                f"KV-3: {sequence.name}: table and tokens differ"
            )
        for sequence in self._waiting:
            assert sequence.row is None, f"KV-3: {sequence.name} waits and runs"


def _finish_reason(sequence: Sequence, token_id: int) -> FinishReason | None:
    sampling = sequence.sampling
    assert sampling is not None
    if token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in sequence.eos_token_ids):
        return "stop"
    if len(sequence.token_ids) - sequence.prompt_length >= sampling.max_tokens:
        return "length"
    return None


def _logprobs(sampling: SamplingParams, output: StepOutput, index: int) -> TokenLogprobs | None:
    count = sampling.num_logprobs
    if count is None or output.logprobs is None:
        return None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    if count > 0 and output.top_ids is not None and output.top_logprobs is not None:
        top_ids = tuple(output.top_ids[index, :count].tolist())
        top_logprobs = tuple(output.top_logprobs[index, :count].tolist())
    return TokenLogprobs(logprob=float(output.logprobs[index]), top_ids=top_ids, top_logprobs=top_logprobs)
