"""Which blocks of a prompt move: demand and supply in one place, so that they cannot disagree (TX-3).

    tokens    0                                        L-1   L
              [ block 0 )[ block 1 )[ ...  )[ last full )[ tail )
    blocks    0          held                demanded
              [ decode has them )[ supplied  )

The decode worker demands the full blocks of tokens[:L-1]; it computes the tail of 1..block_size tokens itself and
samples from it. The prefill worker supplies exactly the demanded blocks that the decode worker did not say it holds,
whatever either has cached. Knows nothing about pools, leases or workers.
"""


def num_demanded_blocks(num_prompt_tokens: int, block_size: int) -> int:
    """Full blocks that a decode worker needs before it can compute the tail of a prompt of at least one token."""
    assert num_prompt_tokens >= 1 and block_size >= 1
    return (num_prompt_tokens - 1) // block_size


def supplied_blocks(num_prompt_tokens: int, block_size: int, num_held_blocks: int) -> range:
    """Indexes within the prompt of the blocks to move, given the leading blocks that the decode worker holds (>= 0)."""
    assert num_held_blocks >= 0
    demanded = num_demanded_blocks(num_prompt_tokens, block_size)
    return range(min(num_held_blocks, demanded), demanded)
