"""The supply rule and the demand rule against a naive model of a prompt's tokens (TX-3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.plan import num_demanded_blocks, supplied_blocks


@pytest.mark.parametrize(("length", "demanded"), [(1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (1500, 93)])
def test_demand_leaves_at_least_one_token_when_the_prompt_ends_on_a_block(length: int, demanded: int) -> None:
    assert num_demanded_blocks(length, 16) == demanded


@given(length=st.integers(1, 300), block_size=st.integers(1, 64), held=st.integers(0, 400))
def test_supply_and_held_cover_demand_when_any_prefix_is_held(length: int, block_size: int, held: int) -> None:
    """Goal: TX-3. Method: full blocks of tokens[:L-1], counted one token at a time."""
    demanded = {p // block_size for p in range(length - 1) if (p // block_size + 1) * block_size <= length - 1}
    supplied = set(supplied_blocks(length, block_size, held))
    assert supplied | set(range(held)) >= demanded
    assert supplied.isdisjoint(range(held))
    assert supplied <= demanded
    tail = length - block_size * num_demanded_blocks(length, block_size)
    assert 1 <= tail <= block_size
