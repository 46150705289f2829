"""The sequence table: rows and their block lists."""

import numpy as np
import pytest

from core.ids import BlockId
from core.request import SamplingParams
from engine.kv.table import SequenceTable


def _table(num_rows: int = 3) -> SequenceTable:
    return SequenceTable(num_rows=num_rows, max_model_len=32, block_size=4)


def _open(table: SequenceTable, tokens: list[int], **sampling: float) -> int:
    params = SamplingParams(max_tokens=4, **sampling)  # type: ignore[arg-type]
    return table.open_row(tokens, prompt_length=len(tokens), num_computed=0, sampling=params, child=0)


def test_block_list_only_grows_at_its_end_while_the_row_lives() -> None:
    """KV-3."""
    table = _table()
    row = _open(table, [1, 2, 3, 4, 5])
    table.append_blocks(row, [BlockId(7), BlockId(3)])
    before = table.row_blocks(row)
    other = _open(table, [9])
    table.append_blocks(other, [BlockId(1)])
    table.append_blocks(row, [BlockId(5)])
    assert table.row_blocks(row) == [*before, BlockId(5)]
    assert table.row_blocks(other) == [BlockId(1)]


def test_row_starts_empty_when_it_was_used_before() -> None:
    table = _table(num_rows=1)
    row = _open(table, [1, 2, 3], repetition_penalty=2.0)
    table.append_blocks(row, [BlockId(2)])
    table.close_row(row)
    again = _open(table, [8])
    assert (again, table.row_blocks(again), table.row_tokens(again)) == (row, [], [8])
    assert table.history(np.array([again], dtype=np.int32)) is None


def test_closing_a_row_twice_is_a_broken_invariant() -> None:
    table = _table()
    row = _open(table, [1])
    table.close_row(row)
    with pytest.raises(AssertionError):
        table.close_row(row)


def test_history_covers_all_sampling_rows_when_one_has_a_penalty() -> None:
    table = _table()
    plain, penalised = _open(table, [1, 2, 3]), _open(table, [4, 5], presence_penalty=0.5)
    history = table.history(np.array([plain, penalised], dtype=np.int32))
    assert history is not None
    assert history.tolist() == [[1, 2, 3], [4, 5, 0]]


def test_noise_position_counts_output_tokens_only() -> None:
    table = _table()
    row = _open(table, [1, 2, 3])
    rows = np.array([row], dtype=np.int32)
    assert table.sampling_batch(rows).position.tolist() == [0]
    table.append_tokens(rows, np.array([9], dtype=np.int32))
    assert table.sampling_batch(rows).position.tolist() == [1]
    assert table.sampling_batch(rows).num_tokens.tolist() == [4]
