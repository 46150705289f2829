"""A runner that costs no arithmetic: its KV is the token ids themselves, its next token a hash of the context read back
through the block table.

A wrong, stale, missing or misplaced block therefore changes the answer, as it would with a model, while planner, pool,
transfer and workers run for real. `expected_tokens` gives the right answer without any KV. Imports no torch.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.layout import FULL_ATTENTION, BlockLayout, GroupLayout, Windows
from core.request import SamplingParams
from engine.step import FloatArray, StepOutput, StepPlan

GROUP_TAG = 1 << 24
"""Tells the groups' positions apart in the stand-in's KV."""
SPOILED = 1 << 30
UintArray = NDArray[np.uint32]


def standin_layout(block_size: int, windows: Windows = FULL_ATTENTION) -> BlockLayout:
    """Layout of the stand-in's blocks: per group one layer, one head of one float32: 8 bytes a position."""
    groups = tuple(
        GroupLayout(
            kind="full" if window is None else "window",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype="float32",
            window=window,
        )
        for window in windows
    )
    return BlockLayout(block_size=block_size, groups=groups)


class StandinRunner:
    """Deterministic tokens below `vocab_size`, as a function of context, seed and child."""

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int, windows: Windows = FULL_ATTENTION) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.windows = windows
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._kv = np.full((num_blocks, 2, block_size), 0xFFFFFFFF, dtype=np.uint32)

    def byte_view(self) -> memoryview:
        """The KV bytes, one contiguous run per block."""
        return self._kv.reshape(-1).view(np.uint8).data

    def execute(self, plan: StepPlan) -> StepOutput:
        self.num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        for group in range(len(self.windows)):
            blocks, offsets = plan.slots[group] // self.block_size, plan.slots[group] % self.block_size
            self._kv[blocks, 0, offsets] = plan.token_ids
            self._kv[blocks, 1, offsets] = plan.positions + group * GROUP_TAG
        self._spoil_what_was_computed_from_wrong_blocks(plan)
        tokens = np.array([self._sample(plan, i) for i in range(len(plan.sample_rows))], dtype=np.int32)
        count = plan.sampling.num_logprobs
        if not len(count) or count.max() < 0:
            return StepOutput(token_ids=tokens)
        width = max(int(count.max()), 0)
        top_ids = (tokens[:, None] + np.arange(width, dtype=np.int32)) % self.vocab_size
        top_logprobs: FloatArray = np.tile(-0.5 - np.arange(width, dtype=np.float32), (len(tokens), 1))
        return StepOutput(
            token_ids=tokens,
            logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
            top_ids=top_ids.astype(np.int32),
            top_logprobs=top_logprobs,
        )

    def _sample(self, plan: StepPlan, index: int) -> int:
        row = int(plan.sample_rows[index])
        length = int(plan.context_lengths[row])
        parts = [self._read(plan, row, group, length, length) for group in range(len(self.windows))]
        context = np.concatenate([tokens for tokens, _misplaced in parts])
        misplaced = sum(misplaced for _tokens, misplaced in parts)
        noise = plan.sampling.temperature[index] > 0
        seed = int(plan.sampling.seed[index]) if noise else 0
        child = int(plan.sampling.child[index]) if noise else 0
        return _token(context, misplaced, seed, child, self.vocab_size)

    def _read(self, plan: StepPlan, row: int, group: int, first_query: int, length: int) -> tuple[UintArray, int]:
        """What the last queries of a sequence attend to in a group, [visible], and how much of it lies wrong.

        first_query: 1 + position of the first of them.
        """
        window = self.windows[group]
        start = 0 if window is None else max(0, first_query - window)
        table = plan.block_tables[group, row, start // self.block_size : -(-length // self.block_size)]
        skipped = start % self.block_size
        count = length - start
        tokens = self._kv[table, 0].reshape(-1)[skipped : skipped + count]
        positions = self._kv[table, 1].reshape(-1)[skipped : skipped + count]
        right = np.arange(start, length, dtype=np.uint32) + np.uint32(group * GROUP_TAG)
        return tokens, int(np.count_nonzero(positions != right))

    def _spoil_what_was_computed_from_wrong_blocks(self, plan: StepPlan) -> None:
        """As a model would: keys and values of a chunk whose attention read wrong blocks are wrong themselves."""
        samples = set(plan.sample_rows.tolist())
        for row in range(plan.num_sequences):
            first, end = plan.query_start[row : row + 2].tolist()
            length = int(plan.context_lengths[row])
            if row in samples and end - first == 1:
                continue
            for group in range(len(self.windows)):
                if self._read(plan, row, group, length - (end - first) + 1, length)[1]:
                    slots = plan.slots[:, first:end]
                    self._kv[slots // self.block_size, 0, slots % self.block_size] ^= SPOILED


def _token(context: np.ndarray, misplaced: int, seed: int, child: int, vocab_size: int) -> int:
    digest = hashlib.sha256(context.astype("<u4").tobytes() + struct.pack("<IQI", misplaced, seed, child)).digest()
    return int.from_bytes(digest[:4], "little") % vocab_size


def expected_tokens(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    child: int = 0,
    eos_token_ids: frozenset[int] = frozenset(),
    windows: Windows = FULL_ATTENTION,
) -> list[int]:
    """What a correct cluster on stand-in runners answers to `prompt`."""
    tokens = list(prompt)
    output: list[int] = []
    noise = sampling.temperature > 0
    while len(output) < sampling.max_tokens:
        visible = [tokens if window is None else tokens[-window:] for window in windows]
        context = np.concatenate([np.asarray(part, dtype=np.uint32) for part in visible])
        token = _token(context, 0, sampling.seed if noise else 0, child if noise else 0, vocab_size)
        output.append(token)
        tokens.append(token)
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            break
    return output
