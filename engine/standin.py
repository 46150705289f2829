"""A runner that costs no arithmetic: its KV is the token ids themselves, its next token a hash of the context read back
through the block table.

A wrong, stale, missing or misplaced block therefore changes the answer, as it would with a model, while planner, pool,
transfer and workers run for real. `expected_tokens` gives the right answer without any KV. Imports no torch.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from core.layout import BlockLayout, GroupLayout
from core.request import SamplingParams
from engine.step import FloatArray, StepOutput, StepPlan


def standin_layout(block_size: int) -> BlockLayout:
    """Layout of the stand-in's blocks: one layer, one head of one float32: 8 bytes a position."""
    group = GroupLayout(kind="full", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    return BlockLayout(block_size=block_size, groups=(group,))


class StandinRunner:
    """Deterministic tokens below `vocab_size`, as a function of context, seed and child."""

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._kv = np.full((num_blocks, 2, block_size), 0xFFFFFFFF, dtype=np.uint32)

    def byte_view(self) -> memoryview:
        """The KV bytes, one contiguous run per block."""
        return self._kv.reshape(-1).view(np.uint8).data

    def execute(self, plan: StepPlan) -> StepOutput:
        self.num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        blocks, offsets = plan.slots[0] // self.block_size, plan.slots[0] % self.block_size
        self._kv[blocks, 0, offsets] = plan.token_ids
        self._kv[blocks, 1, offsets] = plan.positions
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
        table = plan.block_tables[0, row, : -(-length // self.block_size)]
        context = self._kv[table, 0].reshape(-1)[:length]
        positions = self._kv[table, 1].reshape(-1)[:length]
        misplaced = int(np.count_nonzero(positions != np.arange(length, dtype=np.uint32)))
        noise = plan.sampling.temperature[index] > 0
        seed = int(plan.sampling.seed[index]) if noise else 0
        child = int(plan.sampling.child[index]) if noise else 0
        return _token(context, misplaced, seed, child, self.vocab_size)


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
) -> list[int]:
    """What a correct cluster on stand-in runners answers to `prompt`."""
    tokens = list(prompt)
    output: list[int] = []
    noise = sampling.temperature > 0
    while len(output) < sampling.max_tokens:
        context = np.asarray(tokens, dtype=np.uint32)
        token = _token(context, 0, sampling.seed if noise else 0, child if noise else 0, vocab_size)
        output.append(token)
        tokens.append(token)
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            break
    return output
