"""Which blocks of a prompt move: demand and supply in one place, so that they cannot disagree (TX-3).

    tokens    0                                        L-1   L
              [ block 0 )[ block 1 )[ ...  )[ last full )[ tail )
    full      d          d          d       d
    window                          d       d                        (d: demanded)

The decode worker demands what it needs to compute the tail of 1..block_size tokens itself, and samples from it: the
full blocks of tokens[:L-1], of a windowed group of layers only those that the tail's window reaches. The demand is a
list of entries, in the order in which they are computed. The prefill worker supplies exactly the entries after those
that the decode worker said it holds, whatever either has cached. Knows nothing about pools, leases or workers.
"""

from core.layout import Windows, needed_entries

DemandEntry = tuple[int, int]
"""Group of layers, and index of the block within the prompt."""


def num_full_blocks(num_prompt_tokens: int, block_size: int) -> int:
    """Full blocks in front of the tail of a prompt of at least one token."""
    assert num_prompt_tokens >= 1 and block_size >= 1
    return (num_prompt_tokens - 1) // block_size


def demand(num_prompt_tokens: int, windows: Windows, block_size: int) -> list[DemandEntry]:
    """What a decode worker needs before it can compute the tail."""
    return needed_entries(windows, num_full_blocks(num_prompt_tokens, block_size), block_size)
