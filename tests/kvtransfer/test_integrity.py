"""The digest against a plain-integer model, and the accidents it must find."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core.ids import BlockId
from kvtransfer.integrity import BlockDigester

WORDS = 48
BLOCK_BYTES = WORDS * 4
CONTENT = st.binary(min_size=BLOCK_BYTES, max_size=BLOCK_BYTES).map(lambda b: np.frombuffer(b, "<u4").tolist())
INDEX = st.integers(0, WORDS - 1)
MASK = 2**64 - 1


def digest(words: list[int]) -> int:
    view = memoryview(np.array(words, dtype="<u4").tobytes())
    return BlockDigester(view, BLOCK_BYTES).digest([BlockId(0)])[0]


def model_key(counter: int) -> int:
    z = (counter + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) | 1


def model_digest(words: list[int]) -> int:
    sums = [model_key(j) + sum(w * model_key(2 * i + 2 + j) for i, w in enumerate(words)) & MASK for j in (0, 1)]
    return sums[0] >> 32 << 32 | sums[1] >> 32


@given(words=CONTENT)
def test_digest_equals_the_scheme_when_computed_with_plain_integers(words: list[int]) -> None:
    assert digest(words) == model_digest(words)


def test_digest_has_the_recorded_value_when_words_count_up() -> None:
    """The scheme's name stands for this value on every machine."""
    assert digest(list(range(WORDS))) == 0x6E58D35F1376983C


@given(words=CONTENT, index=INDEX, bit=st.integers(0, 31))
def test_digest_changes_when_one_bit_flips(words: list[int], index: int, bit: int) -> None:
    changed = list(words)
    changed[index] ^= 1 << bit
    assert digest(changed) != digest(words)


@given(words=CONTENT, first=INDEX, second=INDEX, bit=st.integers(0, 31))
def test_digest_changes_when_the_same_bit_flips_in_two_words(
    words: list[int], first: int, second: int, bit: int
) -> None:
    assume(first != second)
    changed = list(words)
    changed[first] ^= 1 << bit
    changed[second] ^= 1 << bit
    assert digest(changed) != digest(words)


@given(words=CONTENT, first=INDEX, second=INDEX)
def test_digest_changes_when_two_words_swap(words: list[int], first: int, second: int) -> None:
    assume(words[first] != words[second])
    changed = list(words)
    changed[first], changed[second] = changed[second], changed[first]
    assert digest(changed) != digest(words)


@given(words=CONTENT, start=INDEX)
def test_digest_changes_when_the_tail_is_zeroed(words: list[int], start: int) -> None:
    assume(any(words[start:]))
    assert digest(words[:start] + [0] * (WORDS - start)) != digest(words)


@given(words=CONTENT, shift=st.integers(1, WORDS - 1))
def test_digest_changes_when_the_block_is_rotated(words: list[int], shift: int) -> None:
    rotated = words[shift:] + words[:shift]
    assume(rotated != words)
    assert digest(rotated) != digest(words)


@given(first=CONTENT, second=CONTENT)
def test_digests_follow_the_blocks_when_blocks_swap(first: list[int], second: list[int]) -> None:
    assume(first != second)
    view = memoryview(np.array(first + second, dtype="<u4").tobytes())
    digester = BlockDigester(view, BLOCK_BYTES)
    assert digester.digest([BlockId(1), BlockId(0)]) == [digest(second), digest(first)]
    assert digest(first) != digest(second)


def test_digest_is_not_zero_when_the_block_is() -> None:
    assert digest([0] * WORDS) != 0


def test_digester_sees_new_bytes_when_the_memory_changes() -> None:
    memory = bytearray(BLOCK_BYTES)
    digester = BlockDigester(memoryview(memory), BLOCK_BYTES)
    before = digester.digest([BlockId(0)])
    memory[7] ^= 1
    assert digester.digest([BlockId(0)]) != before


@pytest.mark.parametrize("block_bytes", [0, 6, 8])
def test_digester_refuses_when_blocks_do_not_divide_the_view(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        BlockDigester(memoryview(bytearray(12)), block_bytes)
