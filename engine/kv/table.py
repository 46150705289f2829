"""The sequence table: one row of NumPy arrays per running sequence, shared by planner and runner.

Rows are handed out and taken back; a row's block list only grows at its end while it lives (KV-3). Everything that a
plan needs is read from here with vector operations. Knows nothing about scheduling or requests.
"""

import numpy as np

from core.ids import BlockId
from core.layout import FULL_ATTENTION, Windows, needed_blocks, needed_entries
from core.request import SamplingParams
from engine.step import FloatArray, IntArray, SamplingBatch


class SequenceTable:
    """`num_rows` rows of up to `max_model_len` tokens."""

    def __init__(
        self, *, num_rows: int, max_model_len: int, block_size: int, windows: Windows = FULL_ATTENTION
    ) -> None:
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.windows = windows
        max_blocks = -(-max_model_len // block_size)
        self.tokens: IntArray = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.num_tokens: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_computed: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.prompt_length: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.samples = np.zeros(num_rows, dtype=np.bool_)
        """False for rows that only compute KV."""
        self.blocks: IntArray = np.zeros((len(windows), num_rows, max_blocks), dtype=np.int32)
        """[G, rows, blocks]; 0 where a group has no block (any more)."""
        self.num_blocks: IntArray = np.zeros(num_rows, dtype=np.int32)
        """Of each group, those that its window has passed included."""
        self.first_block: IntArray = np.zeros((len(windows), num_rows), dtype=np.int32)
        """[G, rows] index of the first block that the group still has."""
        self._columns: dict[str, FloatArray] = {
            name: np.zeros(num_rows, dtype=np.float32)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
            )
        }
        self._top_k: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._num_logprobs: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._child: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._seed = np.zeros(num_rows, dtype=np.uint64)
        self._logit_bias: dict[int, dict[int, float]] = {}
        self._penalised = np.zeros(num_rows, dtype=np.bool_)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def open_row(
        self,
        token_ids: list[int],
        *,
        prompt_length: int,
        num_computed: int,
        sampling: SamplingParams | None,
        child: int,
    ) -> int:
        """A fresh row with these tokens. The caller checked `num_free_rows` and the length."""
        row = self._free_rows.pop()
        count = len(token_ids)
        self.tokens[row, :count] = token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = num_computed
        self.prompt_length[row] = prompt_length
        self.num_blocks[row] = 0
        self.samples[row] = sampling is not None
        if sampling is not None:
            self._set_sampling(row, sampling, child)
        return row

    def _set_sampling(self, row: int, sampling: SamplingParams, child: int) -> None:
        for name, column in self._columns.items():
            column[row] = getattr(sampling, name)
        self._top_k[row] = sampling.top_k
        self._num_logprobs[row] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self._child[row] = child
        self._seed[row] = sampling.seed
        self._penalised[row] = (
            sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        )
        if sampling.logit_bias:
            self._logit_bias[row] = dict(sampling.logit_bias)

    def close_row(self, row: int) -> None:
        """Take a row back; its block list is forgotten, the blocks themselves are the caller's."""
        assert row not in self._free_rows, f"row {row} closed twice"
        self._logit_bias.pop(row, None)
        self.num_blocks[row] = 0
        self.num_tokens[row] = 0
        self.blocks[:, row] = 0
        self.first_block[:, row] = 0
        self._free_rows.append(row)

    def set_prefix(self, row: int, num_blocks: int, blocks: list[BlockId]) -> None:
        """The blocks of a fresh row's valid beginning: one for each of `needed_entries(windows, num_blocks)`."""
        for (group, index), block in zip(
            needed_entries(self.windows, num_blocks, self.block_size), blocks, strict=True
        ):
            self.blocks[group, row, index] = block
        for group, window in enumerate(self.windows):
            self.first_block[group, row] = needed_blocks(window, num_blocks * self.block_size, self.block_size).start
        self.num_blocks[row] = num_blocks

    def append_blocks(self, row: int, blocks: list[BlockId]) -> None:
        """KV-3: blocks are only added at the end. blocks: for each new index one of every group, by index."""
        start, count = int(self.num_blocks[row]), len(blocks) // len(self.windows)
        by_index = np.asarray(blocks, dtype=np.int32).reshape(count, len(self.windows))
        self.blocks[:, row, start : start + count] = by_index.T
        self.num_blocks[row] = start + count

    def pass_blocks(self, row: int) -> list[BlockId]:
        """Take out the blocks that the windows have passed, for the caller to release."""
        passed: list[BlockId] = []
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            first = int(self.first_block[group, row])
            now_first = needed_blocks(window, int(self.num_computed[row]), self.block_size).start
            if now_first > first:
                passed += [BlockId(int(block)) for block in self.blocks[group, row, first:now_first]]
                self.blocks[group, row, first:now_first] = 0
                self.first_block[group, row] = now_first
        return passed

    def row_block(self, row: int, group: int, index: int) -> BlockId:
        """The block of one group at one index, which the row must still have."""
        assert self.first_block[group, row] <= index < self.num_blocks[row], f"KV-3: row {row} has no block {index}"
        return BlockId(int(self.blocks[group, row, index]))

    def row_blocks(self, row: int) -> list[BlockId]:
        """All blocks that a row has, by index, then by group."""
        count = int(self.num_blocks[row])
        has = np.arange(count) >= self.first_block[:, row, None]
        return [BlockId(block) for block in self.blocks[:, row, :count].T[has.T].tolist()]

    def row_tokens(self, row: int) -> list[int]:
        tokens: list[int] = self.tokens[row, : self.num_tokens[row]].tolist()
        return tokens

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """One token to each of `rows` ([B], distinct)."""
        self.tokens[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def check(self) -> None:
        """KV-3: every open row has blocks for what is computed, and no block twice; closed rows hold nothing."""
        assert len(set(self._free_rows)) == len(self._free_rows), "a row is free twice"
        for row in range(self.num_rows):
            if row in self._free_rows:
                assert self.num_blocks[row] == 0 == self.num_tokens[row], f"KV-3: closed row {row} holds something"
                continue
            room = self.num_blocks[row] * self.block_size
            assert self.num_computed[row] <= min(room, self.num_tokens[row]), f"KV-3: row {row} computed past its end"
            blocks = self.row_blocks(row)
            assert len(set(blocks)) == len(blocks), f"KV-3: row {row} names a block twice"

    def sampling_batch(self, rows: IntArray) -> SamplingBatch:
        """Sampling columns of `rows`, in their order."""
        columns = {name: column[rows] for name, column in self._columns.items()}
        bias: dict[int, dict[int, float]] = {}
        if self._logit_bias:
            bias = {i: self._logit_bias[row] for i, row in enumerate(rows.tolist()) if row in self._logit_bias}
        return SamplingBatch(
            **columns,
            top_k=self._top_k[rows],
            seed=self._seed[rows],
            child=self._child[rows],
            position=self.num_tokens[rows] - self.prompt_length[rows],
            num_logprobs=self._num_logprobs[rows],
            logit_bias=bias,
            prompt_length=self.prompt_length[rows],
            num_tokens=self.num_tokens[rows],
        )

    def history(self, rows: IntArray) -> IntArray | None:
        """Token ids of `rows`, [B, longest], when any of them has a penalty."""
        if not len(rows) or not self._penalised[rows].any():
            return None
        return self.tokens[rows, : int(self.num_tokens[rows].max())]
