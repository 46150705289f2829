"""Scaled traces keep the shape of theirs, and prompts share what their block ids say, each compared with a plain
rendering of the same.
"""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from cluster.sim.trace import (
    MOONCAKE_BLOCK_SIZE,
    RequestTable,
    TracedRequest,
    prompt_tokens,
    read_azure,
    read_trace,
    scaled,
)
from core.errors import TraceError
from tests.cluster.sim.traces import AZURE, MOONCAKE, random_trace, trace_of

# ---- scaling ---------------------------------------------------------------------------------------------------------


def sharing(requests: list[TracedRequest]) -> list[list[int]]:
    """For every block of every request: the first place (request, block) that has it. Says all about sharing, and
    nothing about ids."""
    first: dict[int, int] = {}
    count, shape = 0, []
    for one in requests:
        shape.append([first.setdefault(block, count + i) for i, block in enumerate(one.blocks)])
        count += len(one.blocks)
    return shape


@pytest.mark.parametrize("seed", [0, 1])
def test_repeats_have_the_shape_of_the_trace_and_blocks_of_their_own(seed: int) -> None:
    trace = random_trace(seed)
    requests = list(scaled(trace, num_requests=100, seed=3).requests)
    parts = [requests[0:30], requests[30:60], requests[60:90], requests[90:]]
    seen: set[int] = set()
    for part in parts:
        plain = list(trace.requests)[: len(part)]
        assert sharing(part) == sharing(plain)
        lengths = [(one.num_prompt_tokens, one.num_output_tokens) for one in part]
        assert lengths == [(one.num_prompt_tokens, one.num_output_tokens) for one in plain]
        own = {block for one in part for block in one.blocks}
        assert not own & seen
        seen |= own
        assert [one.arrival_s - part[0].arrival_s for one in part] == pytest.approx([one.arrival_s for one in plain])
    assert parts[0] == list(trace.requests)
    assert [one.index for one in requests] == list(range(100))


def test_repeats_follow_each_other_after_gaps_of_the_trace_that_the_seed_chooses() -> None:
    trace = random_trace(4)
    arrivals = [one.arrival_s for one in trace.requests]
    gaps = {round(late - early, 9) for early, late in pairwise(arrivals)}

    def pauses(seed: int) -> list[float]:
        times = [one.arrival_s for one in scaled(trace, num_requests=300, seed=seed).requests]
        assert times == sorted(times)
        return [round(times[i] - times[i - 1], 9) for i in range(30, 300, 30)]

    assert set(pauses(1)) <= gaps and len(set(pauses(1))) > 3
    assert pauses(1) == pauses(1) != pauses(2)


def test_requests_come_as_much_faster_as_asked() -> None:
    trace = random_trace(4)
    fast = scaled(trace, rate=2.5, num_requests=12, seed=0)
    first = list(trace.requests)[:12]
    assert [one.blocks for one in fast.requests] == [one.blocks for one in first]
    assert [one.arrival_s for one in fast.requests] == pytest.approx([one.arrival_s / 2.5 for one in first])
    slow = scaled(trace, rate=0.5, seed=0)
    assert [one.arrival_s for one in slow.requests] == [one.arrival_s * 2 for one in trace.requests]


def test_ids_of_repeats_stay_apart_when_they_are_hashes() -> None:
    huge = trace_of((0.0, 8, 1, (2**63 - 1, 5)), (1.0, 8, 1, (2**63 - 1, 2**62)))
    requests = list(scaled(huge, num_requests=6, seed=0).requests)
    assert len({block for one in requests for block in one.blocks}) == 9
    assert [sharing(requests[i : i + 2]) for i in (0, 2, 4)] == [[[0, 1], [0, 3]]] * 3


def test_one_request_repeats_without_a_gap_to_choose() -> None:
    requests = list(scaled(trace_of((1.5, 5, 1, (0, 1))), num_requests=3, seed=0).requests)
    assert [(one.arrival_s, one.blocks) for one in requests] == [(1.5, (0, 1)), (1.5, (2, 3)), (1.5, (4, 5))]


@pytest.mark.parametrize(("rate", "count"), [(0.0, 1), (-1.0, 1), (math.inf, 1), (math.nan, 1), (1.0, 0), (1.0, 10**8)])
def test_scale_that_makes_no_trace_is_refused(rate: float, count: int) -> None:
    with pytest.raises(TraceError, match=f"made: cannot be made {rate} times as fast with {count} requests"):
        scaled(random_trace(0), rate=rate, num_requests=count, seed=0)


def test_two_hundred_thousand_requests_stay_small() -> None:
    requests = scaled(read_trace(MOONCAKE), num_requests=200_000, seed=0).requests
    assert isinstance(requests, RequestTable)
    num_blocks = len(requests.block_ids)
    columns = [value for value in vars(requests).values() if isinstance(value, np.ndarray)]
    assert len(requests) == 200_000 and num_blocks > 4_000_000
    assert sum(column.nbytes for column in columns) <= 8 * num_blocks + 32 * 200_001


# ---- prompts ---------------------------------------------------------------------------------------------------------


def plain_tokens(request: TracedRequest, vocab_size: int, seed: int) -> tuple[int, ...]:
    """As `prompt_tokens`, one token at a time, in numbers without an end."""

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    tokens = []
    for i in range(request.num_prompt_tokens):
        block, offset = divmod(i, request.block_size) if request.blocks and request.block_size else (0, i)
        name, kind = (request.blocks[block], 0) if request.blocks else (request.index, 1)
        stream = mix(mix(mix(seed % 2**64) ^ kind) ^ name)
        tokens.append((mix((stream + 0x9E3779B97F4A7C15 * (offset + 1)) % 2**64) >> 32) * vocab_size >> 32)
    return tuple(tokens)


@pytest.mark.parametrize("vocab_size", [2, 101, 151_936])
@pytest.mark.parametrize("seed", [0, 7, -1])
def test_tokens_are_the_hash_that_is_written_down(vocab_size: int, seed: int) -> None:
    for one in random_trace(3, 8).requests:
        expected = plain_tokens(one, vocab_size, seed)
        found = prompt_tokens(one, vocab_size=vocab_size, seed=seed)
        assert found == expected and all(type(token) is int and 0 <= token < vocab_size for token in found)
    for one in read_azure(AZURE).requests[:3]:
        assert prompt_tokens(one, vocab_size=vocab_size, seed=seed) == plain_tokens(one, vocab_size, seed)


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(left), len(right)))


def test_prompts_share_the_blocks_that_the_trace_says() -> None:
    every = list(read_trace(MOONCAKE).requests)
    second = Counter(one.blocks[1] for one in every if len(one.blocks) > 1)
    requests = every[:5] + [one for one in every[5:] if len(one.blocks) > 1 and second[one.blocks[1]] > 1]
    prompts = [prompt_tokens(one, vocab_size=32_000, seed=1) for one in requests]
    shared = set()
    for one, prompt in zip(requests, prompts, strict=True):
        assert len(prompt) == one.num_prompt_tokens
        for other, other_prompt in zip(requests, prompts, strict=True):
            if one is not other:
                num_blocks = common(one.blocks, other.blocks)
                assert common(prompt, other_prompt) // MOONCAKE_BLOCK_SIZE == num_blocks
                shared.add(num_blocks)
    assert 1 in shared and max(shared) > 20 and len(shared) > 3


def test_prompts_share_nothing_when_nothing_is_known_of_them() -> None:
    requests = list(read_azure(AZURE).requests)
    prompts = [prompt_tokens(one, vocab_size=32_000, seed=1) for one in requests]
    assert [len(prompt) for prompt in prompts] == [one.num_prompt_tokens for one in requests]
    grams = [prompt[i : i + 4] for prompt in prompts for i in range(0, len(prompt) - 3, 4)]
    assert len(set(grams)) == len(grams)
    named = TracedRequest(
        arrival_s=0, num_prompt_tokens=4, num_output_tokens=1, blocks=(requests[5].index,), block_size=4
    )
    assert prompt_tokens(named, vocab_size=32_000, seed=1) != prompts[5][:4]


def test_tokens_depend_on_the_seed_and_use_the_whole_vocabulary() -> None:
    one = TracedRequest(arrival_s=0, num_prompt_tokens=50_000, num_output_tokens=1)
    first, second = (np.array(prompt_tokens(one, vocab_size=100, seed=seed)) for seed in (1, 2))
    assert np.mean(first == second) == pytest.approx(0.01, abs=0.003)
    counts = np.bincount(first, minlength=100)
    assert len(counts) == 100 and 400 < counts.min() <= counts.max() < 600
