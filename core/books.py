"""Books: what the owners of state say that they hold, and whether they agree with each other.

A claim is one holder's statement that it has one reference to each of some blocks. A pool's reference counts and the
claims of everybody who may hold its blocks are two accounts of the same thing, kept by different code: a leak, a block
given back twice or a forgotten holder is a difference between them. Knows nothing about who the holders are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from core.ids import BlockId

PROBLEMS_MAX = 8
"""Blocks that one message names; the rest are counted."""

Check = Callable[[], None]
"""Asserts something, with the number of the invariant first in the message."""


class Claim(NamedTuple):
    """One reference of `holder` to each block; a block named twice is two references."""

    holder: str
    """For messages to people."""
    blocks: Sequence[BlockId]


def check_references(references: Sequence[int], claims: Iterable[Claim]) -> None:
    """KV-1: every reference that a pool counts is somebody's. `references[b]`: what the pool counts for block b."""
    listed = list(claims)
    counts: Counter[int] = Counter()
    for claim in listed:
        counts.update(claim.blocks)
    expected = {block: number for block, number in enumerate(references) if number}
    if dict(counts) != expected:
        blocks = sorted({*counts, *expected})
        wrong = [block for block in blocks if counts[block] != expected.get(block, 0)]
        named = "; ".join(_explain(block, references, listed) for block in wrong[:PROBLEMS_MAX])
        more = f" (and {len(wrong) - PROBLEMS_MAX} more blocks)" if len(wrong) > PROBLEMS_MAX else ""
        raise AssertionError(f"KV-1: {named}{more}")


def _explain(block: int, references: Sequence[int], claims: Iterable[Claim]) -> str:
    holders = [f"{claim.holder} x{n}" for claim in claims if (n := list(claim.blocks).count(BlockId(block)))]
    said = f"held by {', '.join(holders)}" if holders else "held by nobody"
    if not 0 <= block < len(references):
        return f"block {block} does not exist and is {said}"
    return f"block {block} has {references[block]} references and is {said}"


def find_problems(checks: Iterable[Check]) -> tuple[str, ...]:
    """What each check found, one entry for each that failed."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except AssertionError as error:
            problems.append(str(error) or f"{check!r} failed without saying why")
    return tuple(problems)
