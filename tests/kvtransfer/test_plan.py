"""The demand against a naive reading of what attention looks at (TX-3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.layout import FULL_ATTENTION, Windows
from kvtransfer.plan import demand, num_full_blocks

WINDOWS = st.lists(st.none() | st.integers(1, 70), min_size=1, max_size=4).map(tuple)


def _attended(num_prompt_tokens: int, window: int | None, block_size: int) -> set[int]:
    """Blocks with a position that some query of the tail attends to, the tail's own block left out."""
    tail = num_full_blocks(num_prompt_tokens, block_size) * block_size
    seen: set[int] = set()
    for query in range(tail, num_prompt_tokens):
        first = 0 if window is None else max(0, query - window + 1)
        seen |= {position // block_size for position in range(first, tail)}
    return seen


@given(length=st.integers(1, 300), block_size=st.integers(1, 40), windows=WINDOWS)
def test_demand_is_what_the_tail_attends_to(length: int, block_size: int, windows: Windows) -> None:
    entries = demand(length, windows, block_size)
    assert entries == sorted(set(entries), key=lambda entry: (entry[1], entry[0]))
    for group, window in enumerate(windows):
        assert {index for entry_group, index in entries if entry_group == group} == _attended(
            length, window, block_size
        )


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (1500, 93)])
def test_full_attention_demands_every_full_block_before_the_last_token(length: int, blocks: int) -> None:
    assert demand(length, FULL_ATTENTION, 16) == [(0, index) for index in range(blocks)]


def test_window_makes_the_demand_smaller() -> None:
    full, mixed = demand(1500, (None, None), 16), demand(1500, (None, 64), 16)
    assert (len(full), len(mixed)) == (186, 97)
    assert [index for group, index in mixed if group == 1] == [89, 90, 91, 92]
