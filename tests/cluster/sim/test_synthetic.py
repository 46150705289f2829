"""Drawn traces: arrivals, lengths and prefixes are distributed as asked, and a seed is one trace."""

import math

import numpy as np
import pytest

from cluster.sim.synthetic import synthetic
from cluster.sim.trace import prompt_tokens
from core.errors import TraceError


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    """Gaps of a Poisson process have mean 1/rate, as great a deviation, and exceed twice the mean e^-2 of the time."""
    trace = synthetic(num_requests=20_000, rate=4.0, seed=1, prompt_len=(5, 5), output_len=(1, 1))
    gaps = np.diff([one.arrival_s for one in trace.requests])
    assert gaps.min() >= 0
    assert (gaps.mean(), gaps.std()) == (pytest.approx(0.25, rel=0.001), pytest.approx(0.25, rel=0.03))
    assert np.mean(gaps > 0.5) == pytest.approx(math.exp(-2), rel=0.05)


def test_even_arrivals_have_one_gap() -> None:
    trace = synthetic(num_requests=8, rate=4.0, seed=1, prompt_len=(5, 5), output_len=(1, 1), arrivals="even")
    assert [one.arrival_s for one in trace.requests] == pytest.approx([0.25 * i for i in range(1, 9)])


def test_lengths_are_uniform_between_both_ends() -> None:
    trace = synthetic(num_requests=5_000, rate=1.0, seed=2, prompt_len=(3, 7), output_len=(2, 4))
    assert trace.block_size is None and not any(one.blocks for one in trace.requests)
    for lengths, low, high in (
        ([one.num_prompt_tokens for one in trace.requests], 3, 7),
        ([one.num_output_tokens for one in trace.requests], 2, 4),
    ):
        counts = np.bincount(lengths, minlength=high + 1)
        assert counts[:low].sum() == 0 and len(counts) == high + 1
        assert counts[low:] == pytest.approx(5_000 / (high - low + 1), rel=0.15)


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    """Told from the tokens, not from the ids."""
    trace = synthetic(
        num_requests=60, rate=1.0, seed=3, prompt_len=(5, 40), output_len=(1, 1), num_prefixes=3, prefix_len=64
    )
    prompts = [prompt_tokens(one, vocab_size=32_000, seed=9) for one in trace.requests]
    assert len({prompt[:64] for prompt in prompts}) == 3
    assert len({prompt[64:69] for prompt in prompts}) == 60
    assert len({prompt[:16] for prompt in prompts}) == 3
    own = {len(prompt) - 64 for prompt in prompts}
    assert min(own) >= 5 and max(own) <= 40 and len(own) > 10


def test_block_has_one_place_and_one_block_before_it() -> None:
    """As in a real trace, where an id stands for all of the prompt up to it."""
    trace = synthetic(
        num_requests=60, rate=1.0, seed=3, prompt_len=(5, 90), output_len=(1, 1), num_prefixes=3, prefix_len=64
    )
    before: dict[int, tuple[int, ...]] = {}
    for one in trace.requests:
        assert len(one.blocks) == math.ceil(one.num_prompt_tokens / 16)
        for i, block in enumerate(one.blocks):
            assert before.setdefault(block, one.blocks[:i]) == one.blocks[:i]


def test_seed_is_one_trace() -> None:
    def drawn(seed: int) -> list[object]:
        trace = synthetic(
            num_requests=50, rate=1.0, seed=seed, prompt_len=(5, 40), output_len=(1, 9), num_prefixes=2, prefix_len=16
        )
        return list(trace.requests)

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_requests": 0}, "num_requests is 0"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": math.nan}, "rate is nan"),
        ({"rate": math.inf}, "rate is inf"),
        ({"prompt_len": (0, 5)}, "prompt_len is 0 to 5"),
        ({"output_len": (5, 4)}, "output_len is 5 to 4"),
        ({"num_prefixes": 2, "prefix_len": 17}, "2 prefixes of 17 tokens are no whole blocks of 16"),
        ({"num_prefixes": 2}, "2 prefixes of 0 tokens"),
        ({"prefix_len": 32}, "0 prefixes of 32 tokens"),
        ({"prefix_len": 1 << 25, "num_prefixes": 1}, "prompt_len is 5 to 5"),
    ],
)
def test_wish_that_makes_no_trace_is_refused(changes: dict[str, object], words: str) -> None:
    wish: dict[str, object] = {"num_requests": 3, "rate": 1.0, "seed": 1, "prompt_len": (5, 5), "output_len": (1, 1)}
    with pytest.raises(TraceError, match=f"synthetic trace: .*{words}"):
        synthetic(**{**wish, **changes})  # type: ignore[arg-type]
