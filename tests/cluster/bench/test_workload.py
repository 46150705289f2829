"""Prompts and arrival times: lengths, shared prefixes, seeds, and the distribution of gaps."""

import math

import numpy as np
import pytest

from cluster.bench.workload import Workload, arrival_offsets, arrivals_within, make_prompts, make_warm_ups


def test_prompts_have_the_stated_lengths_and_ids_when_random() -> None:
    workload = Workload(num_prompts=50, input_len=40, output_len=7, token_id_min=5, token_id_max=9, seed=3)
    prompts = make_prompts(workload)
    assert [len(p.content) for p in prompts] == [p.num_tokens for p in prompts] == [40] * 50
    assert {p.num_output_tokens for p in prompts} == {7}
    assert {i for p in prompts for i in p.content} == {5, 6, 7, 8, 9}


def test_lengths_cover_the_range_when_there_is_a_ratio() -> None:
    prompts = make_prompts(Workload(num_prompts=500, input_len=10, output_len=10, range_ratio=0.5, seed=1))
    assert {p.num_tokens for p in prompts} == set(range(5, 16))
    assert {p.num_output_tokens for p in prompts} == set(range(5, 16))


def test_no_length_is_zero_when_the_ratio_is_large() -> None:
    prompts = make_prompts(Workload(num_prompts=300, input_len=1, output_len=1, range_ratio=0.99))
    assert min(p.num_tokens for p in prompts) == min(p.num_output_tokens for p in prompts) == 1


def test_prompts_share_prefixes_evenly_when_asked() -> None:
    workload = Workload(dataset="shared-prefix", num_prompts=12, input_len=4, prefix_len=20, num_prefixes=3, seed=2)
    prompts = make_prompts(workload)
    prefixes = [p.content[:20] for p in prompts]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len({p.content[20:] for p in prompts}) == 12
    assert prefixes != sorted(prefixes, key=prefixes.index), "prefixes are mixed, not one after the other"


def test_text_has_one_word_per_token_when_the_server_takes_text() -> None:
    (prompt,) = make_prompts(Workload(num_prompts=1, input_len=30, form="text"))
    assert isinstance(prompt.content, str) and len(prompt.content.split(" ")) == prompt.num_tokens == 30


def test_seed_and_round_decide_everything() -> None:
    workload = Workload(num_prompts=5, seed=11)
    assert make_prompts(workload) == make_prompts(workload)
    assert make_prompts(workload, 1) != make_prompts(workload)
    assert make_prompts(Workload(num_prompts=5, seed=12)) != make_prompts(workload)
    warm = {p.content for p in make_warm_ups(workload, 5)}
    assert not warm & {p.content for index in range(3) for p in make_prompts(workload, index)}
    assert arrival_offsets(9, 2.0, 1.0, 11) == arrival_offsets(9, 2.0, 1.0, 11) != arrival_offsets(9, 2.0, 1.0, 11, 1)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_vary_as_burstiness_says(burstiness: float, variation: float) -> None:
    offsets = np.array(arrival_offsets(40_000, 10.0, burstiness, seed=5))
    gaps = np.diff(offsets)
    assert offsets[-1] == pytest.approx(4000)
    assert (gaps >= 0).all() and gaps.mean() == pytest.approx(0.1, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_arrivals_are_a_poisson_process_when_burstiness_is_one() -> None:
    gaps = np.diff(arrival_offsets(40_000, 1.0, 1.0, seed=6))
    for limit in (0.1, 0.5, 1.0, 2.0):
        assert (gaps < limit).mean() == pytest.approx(1 - math.exp(-limit), abs=0.01)


def test_gaps_are_even_when_burstiness_is_infinite_and_zero_when_the_rate_is() -> None:
    assert arrival_offsets(4, 2.0, math.inf, seed=0) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert arrival_offsets(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_rates_are_refused_when_not_positive(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        arrival_offsets(3, rate, burstiness, seed=0)


@pytest.mark.parametrize(("rate", "seconds"), [(0.11, 15.0), (0.05, 15.0), (3.0, 2.0)])
def test_rounds_together_have_the_whole_load_when_arrivals_are_random(rate: float, seconds: float) -> None:
    rounds = [arrivals_within(rate, seconds, 3, index) for index in range(200)]
    assert sum(map(len, rounds)) == round(rate * seconds * 200)
    assert max(map(len, rounds)) - min(map(len, rounds)) <= 1
    due = np.concatenate(rounds)
    assert due.min() >= 0 and due.max() < seconds and abs(due.mean() / seconds - 0.5) < 0.1
    assert all(offsets == sorted(offsets) for offsets in rounds) and rounds[0] != rounds[1]
