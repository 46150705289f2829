"""The block pool against a model made of plain dictionaries.

Goal: KV-1 and KV-2 hold after any sequence of operations. Method: a Hypothesis state machine whose model knows, per
block, how many references are out and which hash it carries; after every rule `check()` runs and the counts are
compared.
"""

import hashlib

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.hashing import group_hash
from core.ids import BlockHash, BlockId
from core.layout import Windows, needed_entries
from engine.kv.pool import BlockPool

NUM_BLOCKS = 6
GROUP_KEYS = ["b3863fa578420546", "46656973c9ae320f"]
"""SHA-256 of 32 zero bytes, "group", and 1 or 2 as u32 LE; first 8 bytes."""


def _hash(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(bytes([number])).digest())


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[BlockId] = []
        self.hashes: dict[BlockId, BlockHash] = {}

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        for block in blocks or []:
            assert block not in self.held, "an allocated block was still held"
            self.hashes.pop(block, None)
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 4))
    def cache(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block in self.hashes:
            return
        self.pool.cache(block, _hash(number))
        if _hash(number) not in self.hashes.values():
            self.hashes[block] = _hash(number)

    @rule(numbers=st.lists(st.integers(0, 4), max_size=3, unique=True))
    def acquire_prefix(self, numbers: list[int]) -> None:
        blocks = self.pool.known_prefix([_hash(n) for n in numbers])
        available = self.pool.num_available
        idle = [block for block in blocks if block not in self.held]
        assert self.pool.fits(blocks, available - len(idle)) and not self.pool.fits(blocks, available - len(idle) + 1)
        self.pool.acquire(blocks)
        assert self.pool.num_available == available - len(idle)
        by_hash = {h: b for b, h in self.hashes.items()}
        expected = []
        for number in numbers:
            if _hash(number) not in by_hash:
                break
            expected.append(by_hash[_hash(number)])
        assert blocks == expected
        self.held += blocks

    @rule()
    def clear_cached(self) -> None:
        self.pool.clear_cached()
        self.hashes = {b: h for b, h in self.hashes.items() if b in self.held}

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        usage = self.pool.usage()
        assert usage.blocks_used == len(set(self.held))
        assert usage.blocks_cached == len(set(self.hashes) - set(self.held))
        assert usage.blocks_free + usage.blocks_cached + usage.blocks_used == usage.blocks_total == NUM_BLOCKS


TestPool = PoolMachine.TestCase


def test_oldest_cached_block_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for number, block in enumerate(blocks):
        pool.cache(block, _hash(number))
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.known_prefix([_hash(0), _hash(1), _hash(2)]) == blocks[:2]


def test_digest_is_forgotten_when_the_content_is() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.cache(blocks[0], _hash(0))
    pool.set_digest(blocks[0], 7)  # type: ignore[arg-type]
    pool.release(blocks)
    assert pool.digest(blocks[0]) == 7
    assert pool.allocate(1) == blocks
    assert pool.digest(blocks[0]) is None


def test_changing_a_hash_is_a_broken_invariant() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.cache(blocks[0], _hash(0))
    with pytest.raises(AssertionError, match="KV-2"):
        pool.cache(blocks[0], _hash(1))


@given(
    known=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9))),
    windows=st.lists(st.none() | st.integers(1, 14), min_size=1, max_size=3).map(tuple),
    num_held=st.integers(0, 4),
)
def test_prefix_is_the_longest_after_which_computing_can_go_on(
    known: set[tuple[int, int]], windows: Windows, num_held: int
) -> None:
    block_size, hashes = 4, [_hash(index) for index in range(10)]
    pool = BlockPool(64)
    where: dict[tuple[int, int], BlockId] = {}
    held: dict[tuple[int, int], BlockId] = {}
    for group, index in sorted(known):
        if group < len(windows) and index >= num_held:
            (where[group, index],) = pool.allocate(1) or []
            pool.cache(where[group, index], group_hash(hashes[index], group))
    for entry in needed_entries(windows, num_held, block_size):
        (held[entry],) = pool.allocate(1) or []
    there = where | held
    lengths = [n for n in range(num_held, 11) if there.keys() >= set(needed_entries(windows, n, block_size))]
    found = pool.find_prefix(hashes, windows, block_size, held=held, num_held=num_held)
    assert found.num_blocks == max(lengths)
    for entry in needed_entries(windows, found.num_blocks, block_size):
        assert found.blocks[entry] == there[entry]


def test_groups_of_one_block_have_keys_of_their_own() -> None:
    """The encoding is part of the hash scheme: these bytes must never change."""
    keys = [group_hash(BlockHash(bytes(32)), group) for group in range(3)]
    assert keys[0] == bytes(32)
    assert [key.hex()[:16] for key in keys[1:]] == GROUP_KEYS
