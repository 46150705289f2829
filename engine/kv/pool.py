"""The block pool: which blocks are free, cached or used, and which block holds which hash.

    allocate          cache               release
    free ------> used ------> used+hash ----------> cached ---- allocate (evicts, oldest first) ---> used
      ^___________| release of a block without hash    |________ acquire (hit) ___________________> used

KV-1: every block is exactly one of free, cached, used. KV-2: a hashed block is full and its hash is written once.
Owned by the step thread. Knows nothing about requests, bytes or peers.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.books import Claim, check_references
from core.hashing import group_hash
from core.ids import BlockDigest, BlockHash, BlockId
from core.layout import Windows, needed_blocks
from core.messages import KvUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrefix:
    """Where computing a sequence can begin."""

    num_blocks: int
    """Full blocks that need not be computed."""
    blocks: Mapping[tuple[int, int], BlockId]
    """By (group, index): at least the needed ones."""


class BlockPool:
    """`num_blocks` blocks with references, an index by hash, and least-recently-used eviction of cached blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._digests: dict[BlockId, BlockDigest] = {}
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._free: list[BlockId] = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self.num_evictions = 0
        self.num_returns = 0
        """How often a used block became available."""

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out: free plus cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def usage(self) -> KvUsage:
        return KvUsage(
            blocks_total=self.num_blocks,
            blocks_free=len(self._free),
            blocks_cached=len(self._cached),
            blocks_used=self.num_used,
        )

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks, each referenced once and without hash, or None (and no change) when there are not enough."""
        if count > self.num_available:
            return None
        blocks: list[BlockId] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _unused = self._cached.popitem(last=False)
                self._forget(block)
                self.num_evictions += 1
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def fits(self, prefix: Sequence[BlockId], count: int) -> bool:
        """Whether `count` blocks could be allocated after `prefix` was acquired."""
        return count <= self.num_available - sum(self._references[block] == 0 for block in prefix)

    def acquire(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each block, cached or used. A free block is a broken invariant."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._cached, f"KV-1: acquired free block {block}"
                del self._cached[block]
            self._references[block] += 1

    def known_prefix(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the longest known prefix of `hashes`. References nothing."""
        blocks: list[BlockId] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find_prefix(
        self,
        hashes: Sequence[BlockHash],
        windows: Windows,
        block_size: int,
        *,
        held: Mapping[tuple[int, int], BlockId],
        num_held: int,
    ) -> FoundPrefix:
        """The longest beginning of `hashes` after which computing can go on, `num_held` blocks at least.

        Of each group of layers the blocks that its window reaches must be here, or among those `held` by (group,
        index). References nothing.
        """
        blocks = dict(held)
        runs = [0] * len(windows)  # per group: known blocks without a gap up to here
        num_blocks = num_held
        for index, block_hash in enumerate(hashes):
            end, can_go_on = index + 1, True
            for group, window in enumerate(windows):
                entry = (group, index)
                known = blocks.get(entry) if index < num_held else self._by_hash.get(group_hash(block_hash, group))
                if known is None:
                    runs[group] = 0
                    if window is None:  # whatever comes later needs this block
                        return FoundPrefix(num_blocks=num_blocks, blocks=blocks)
                else:
                    blocks[entry] = known
                    runs[group] += 1
                if window is not None:
                    can_go_on &= runs[group] >= len(needed_blocks(window, end * block_size, block_size))
            if can_go_on and end > num_held:
                num_blocks = end
        return FoundPrefix(num_blocks=num_blocks, blocks=blocks)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One reference less for each block. Tails become evictable before heads, so prefixes live longest."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"KV-1: released block {block} that nobody holds"
            self._references[block] -= 1
            if self._references[block] == 0:
                self.num_returns += 1
                if self._hashes[block] is None:
                    self._digests.pop(block, None)
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def cache(self, block: BlockId, block_hash: BlockHash) -> None:
        """Make a full, used block findable by its hash. A second copy of a known hash stays without one (KV-2)."""
        assert self._references[block] > 0, f"KV-2: cached block {block} that nobody holds"
        known = self._hashes[block]
        assert known is None or known == block_hash, f"KV-2: block {block} would change its hash"
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def set_digest(self, block: BlockId, digest: BlockDigest) -> None:
        """Remember the digest of a full block for as long as its content lives."""
        self._digests[block] = digest

    def digest(self, block: BlockId) -> BlockDigest | None:
        return self._digests.get(block)

    def clear_cached(self) -> None:
        """Forget every cached block; used blocks keep theirs."""
        for block in self._cached:
            self._forget(block)
            self._free.append(block)
        self._cached.clear()

    def _forget(self, block: BlockId) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
        self._digests.pop(block, None)

    def check_claims(self, claims: Iterable[Claim]) -> None:
        """KV-1: the pool counts exactly the references that its users say they have: no leak, no double release."""
        check_references(self._references, claims)

    def check(self) -> None:
        """Assert KV-1 and KV-2 over the whole pool; for tests and the idle hook."""
        free, cached = set(self._free), set(self._cached)
        used = {BlockId(index) for index, number in enumerate(self._references) if number > 0}
        hashed = {block_hash: BlockId(index) for index, block_hash in enumerate(self._hashes) if block_hash is not None}
        blocks = {BlockId(index) for index in range(self.num_blocks)}
        assert len(free) == len(self._free), f"KV-1: a block is free twice: {sorted(self._free)}"
        twice = (free & cached) | (free & used) | (cached & used)
        assert not twice, f"KV-1: blocks are in two states: {sorted(twice)}"
        assert free | cached | used == blocks, f"KV-1: blocks are in no state: {sorted(blocks - free - cached - used)}"
        marked = free & set(hashed.values())
        assert not marked, f"KV-2: free blocks have a hash: {sorted(marked)}"
        unmarked = cached - set(hashed.values())
        assert not unmarked, f"KV-1: cached blocks have no hash: {sorted(unmarked)}"
        assert hashed == self._by_hash, "KV-2: the blocks' hashes and the index by hash differ"
        stray = set(self._digests) & free
        assert not stray, f"KV-2: free blocks have a digest: {sorted(stray)}"
