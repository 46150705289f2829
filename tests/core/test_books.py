"""References that a pool counts against the claims of those who hold them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.books import PROBLEMS_MAX, Claim, check_references, find_problems
from core.ids import BlockId
from core.process import process_facts


def claim(holder: str, *blocks: int) -> Claim:
    return Claim(holder, [BlockId(block) for block in blocks])


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=5))
def test_books_agree_when_every_claim_was_counted(held: list[list[int]]) -> None:
    references = [sum(blocks.count(block) for blocks in held) for block in range(6)]
    check_references(references, [claim(f"holder {i}", *blocks) for i, blocks in enumerate(held)])


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=5), st.integers(0, 5), st.sampled_from([-1, 1]))
def test_block_is_named_when_one_reference_is_too_many_or_too_few(held: list[list[int]], block: int, by: int) -> None:
    """KV-1."""
    references = [sum(blocks.count(index) for blocks in held) for index in range(6)]
    references[block] += by
    with pytest.raises(AssertionError, match=f"KV-1: block {block} has {references[block]} references"):
        check_references(references, [claim(f"holder {i}", *blocks) for i, blocks in enumerate(held)])


def test_holders_are_named_when_the_books_differ() -> None:
    with pytest.raises(AssertionError) as caught:
        check_references([1, 1, 0], [claim("lease 4", 0), claim("row 2", 0, 2)])
    assert str(caught.value) == (
        "KV-1: block 0 has 1 references and is held by lease 4 x1, row 2 x1; "
        "block 1 has 1 references and is held by nobody; "
        "block 2 has 0 references and is held by row 2 x1"
    )


def test_block_outside_the_pool_is_a_problem() -> None:
    with pytest.raises(AssertionError, match="KV-1: block 7 does not exist and is held by row 0 x1"):
        check_references([0, 0], [claim("row 0", 7)])


def test_message_is_bounded_when_many_blocks_are_wrong() -> None:
    with pytest.raises(AssertionError, match=r"\(and 92 more blocks\)") as caught:
        check_references([1] * (PROBLEMS_MAX + 92), [])
    assert str(caught.value).count("held by nobody") == PROBLEMS_MAX


def test_every_problem_is_told_when_several_checks_fail() -> None:
    def broken(text: str) -> None:
        raise AssertionError(text)

    problems = find_problems([lambda: broken("KV-1: x"), lambda: None, lambda: broken("RQ-2: y"), lambda: broken("")])
    assert problems[:2] == ("KV-1: x", "RQ-2: y")
    assert len(problems) == 3 and "failed without saying why" in problems[2]


def test_bug_in_a_check_is_not_a_problem_of_the_books() -> None:
    def bug() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        find_problems([bug])


def test_open_file_shows_in_the_facts_of_the_process() -> None:
    before = process_facts()
    with open(__file__):
        during = process_facts()
    assert before["resident_mib"] > 1 and before["threads"] >= 1
    assert during["file_descriptors"] == before["file_descriptors"] + 1
    assert process_facts()["file_descriptors"] == before["file_descriptors"]
