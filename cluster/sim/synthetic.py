"""A trace drawn from a seed: when requests arrive, how long they are and which of them share a prefix.

Knows nothing about files or clusters.
"""

import math
from typing import Literal

import numpy as np

from cluster.bench.workload import arrival_offsets
from cluster.sim.trace import REQUESTS_MAX, TOKENS_MAX, TableBuilder, Trace
from core.errors import TraceError

ArrivalProcess = Literal["poisson", "even"]
LengthRange = tuple[int, int]
"""Lengths are uniform between the two, both included."""


def synthetic(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    prompt_len: LengthRange,
    output_len: LengthRange,
    arrivals: ArrivalProcess = "poisson",
    num_prefixes: int = 0,
    prefix_len: int = 0,
    block_size: int = 16,
) -> Trace:
    """Requests of the seed, `rate` per second; the last arrives at num_requests / rate seconds.

    With `num_prefixes` each prompt is one of so many prefixes of `prefix_len` tokens (whole blocks), followed by
    `prompt_len` tokens of its own; without, prompts share nothing and have no blocks. Raises TraceError.
    """
    _check_load(num_requests, rate)
    _check_lengths({"prompt_len": prompt_len, "output_len": output_len}, num_prefixes, prefix_len, block_size)
    rng = np.random.default_rng(seed)
    due = arrival_offsets(num_requests, rate, 1.0 if arrivals == "poisson" else math.inf, seed)
    own_lens = rng.integers(*prompt_len, endpoint=True, size=num_requests).tolist()
    output_lens = rng.integers(*output_len, endpoint=True, size=num_requests).tolist()
    prefixes = rng.integers(max(num_prefixes, 1), size=num_requests).tolist()
    builder, prefix_blocks = TableBuilder(block_size if num_prefixes else None), prefix_len // block_size
    fresh = num_prefixes * prefix_blocks
    for arrival_s, own_len, num_output, prefix in zip(due, own_lens, output_lens, prefixes, strict=True):
        if not num_prefixes:
            builder.add(arrival_s, own_len, num_output, ())
            continue
        shared = range(prefix * prefix_blocks, (prefix + 1) * prefix_blocks)
        own = range(fresh, fresh + -(-own_len // block_size))
        fresh = own.stop
        builder.add(arrival_s, prefix_len + own_len, num_output, (*shared, *own))
    return Trace(name="synthetic", block_size=builder.block_size, requests=builder.table(is_from_first=False))


def _check_load(num_requests: int, rate: float) -> None:
    if not 0 < num_requests <= REQUESTS_MAX:
        raise _unfit(f"num_requests is {num_requests}", f"Give 1 to {REQUESTS_MAX}")
    if not 0 < rate < math.inf:
        raise _unfit(f"rate is {rate}", "Give a positive number of requests per second")


def _check_lengths(ranges: dict[str, LengthRange], num_prefixes: int, prefix_len: int, block_size: int) -> None:
    for name, (low, high) in ranges.items():
        if not 1 <= low <= high <= TOKENS_MAX - prefix_len:
            raise _unfit(f"{name} is {low} to {high}", f"Give a range within 1 to {TOKENS_MAX - prefix_len}")
    if num_prefixes < 0 or block_size < 1 or prefix_len < 0 or prefix_len % block_size:
        problem = f"{num_prefixes} prefixes of {prefix_len} tokens are no whole blocks of {block_size}"
        raise _unfit(problem, "Let prefix_len be a multiple of block_size")
    if (num_prefixes > 0) != (prefix_len > 0):
        raise _unfit(f"there are {num_prefixes} prefixes of {prefix_len} tokens", "Give both or neither")


def _unfit(problem: str, remedy: str) -> TraceError:
    return TraceError(place="synthetic trace", problem=problem, remedy=remedy)
