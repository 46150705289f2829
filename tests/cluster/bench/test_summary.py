"""The numbers of a run, against hand-made values and numpy."""

import itertools
from typing import Any

import numpy as np
import pytest

from cluster.bench.record import FailureReason, RequestRecord
from cluster.bench.summary import Objectives, details, median_ratios, ratios, summarise


def record(started_s: float, times_s: list[float], num_output: int | None = None, **more: Any) -> RequestRecord:
    count = len(times_s) if num_output is None else num_output
    return RequestRecord(
        started_s=started_s, num_prompt_tokens=10, num_output_tokens=count, token_times_s=times_s, **more
    )


FAILED = RequestRecord(
    started_s=0.0, num_prompt_tokens=10, token_times_s=[0.001, 0.002], failure=FailureReason.TRUNCATED, detail="cut"
)
RECORDS = [
    record(0.0, [0.5, 0.6, 0.9]),  # TTFT 500, TPOT 200, E2EL 900
    record(1.0, [1.1, 2.1], num_output=5),  # TTFT 100, TPOT 250, E2EL 1100; two chunks, five tokens
    record(2.0, [2.2]),  # TTFT 200, no TPOT, E2EL 200
]


def test_latencies_and_throughput_are_those_worked_out_by_hand() -> None:
    numbers = summarise(RECORDS, 4.0)
    assert (numbers["completed"], numbers["failed"]) == (3, 0)
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (30, 9)
    assert numbers["request_throughput"] == 0.75
    assert numbers["output_throughput"] == 2.25
    assert numbers["total_token_throughput"] == 9.75
    assert numbers["median_ttft_ms"] == pytest.approx(200)
    assert numbers["mean_ttft_ms"] == pytest.approx(800 / 3)
    assert numbers["median_tpot_ms"] == pytest.approx(225)
    assert numbers["mean_itl_ms"] == pytest.approx((100 + 300 + 1000) / 3)
    assert numbers["p50_itl_ms"] == pytest.approx(300)
    assert numbers["median_e2el_ms"] == pytest.approx(900)
    assert numbers["request_goodput"] is None and numbers["slo_attainment"] is None


def test_failed_requests_add_nothing_to_speed_when_some_fail() -> None:
    good, mixed = summarise(RECORDS, 4.0), summarise([FAILED, *RECORDS, FAILED], 4.0)
    assert mixed["failed"] == 2
    assert mixed["failures_by_reason"] == {"truncated": 2}
    assert mixed["failure_details"] == ["truncated: cut"] * 2
    changed = {key for key in good if good[key] != mixed[key]}
    assert changed == {"failed", "failures_by_reason", "failure_details"}


def test_percentiles_are_numpys_when_there_are_many() -> None:
    rng = np.random.default_rng(4)
    records = [record(0.0, np.cumsum(rng.exponential(0.1, 20)).tolist()) for _ in range(50)]
    numbers = summarise(records, 10.0, percentiles=(1, 50, 99.5))
    ttft = np.array([r.token_times_s[0] for r in records]) * 1000
    gaps = np.array([b - a for r in records for a, b in itertools.pairwise(r.token_times_s)]) * 1000
    for name, values in (("ttft", ttft), ("itl", gaps)):
        assert numbers[f"mean_{name}_ms"] == pytest.approx(values.mean())
        assert numbers[f"std_{name}_ms"] == pytest.approx(values.std())
        for p, key in ((1, "p1"), (50, "p50"), (99.5, "p99.5")):
            assert numbers[f"{key}_{name}_ms"] == pytest.approx(np.percentile(values, p))
        curve = numbers[f"{name}_quantiles_ms"]
        assert len(curve) == 101 and curve == sorted(curve)
        assert (curve[0], curve[100]) == (pytest.approx(values.min()), pytest.approx(values.max()))


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ({"ttft": 201.0}, 2),
        ({"ttft": 500.0}, 3),
        ({"tpot": 200.1}, 2),  # one token has no TPOT to miss
        ({"e2el": 1000.0}, 2),
        ({"ttft": 500.0, "tpot": 200.1, "e2el": 500.0}, 1),
        ({"ttft": 1.0}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(limits: dict[str, float], num_good: int) -> None:
    numbers = summarise([*RECORDS, FAILED], 2.0, Objectives(limits_ms=limits))
    assert numbers["request_goodput"] == num_good / 2.0
    assert numbers["slo_attainment"] == num_good / 4, "a failed request is not good"


def test_peaks_are_per_second_from_the_first_start() -> None:
    records = [record(10.0, [10.1, 10.2, 11.5]), record(10.5, [11.1, 11.2, 11.9]), record(12.5, [12.6])]
    numbers = summarise(records, 3.0)
    assert numbers["max_output_tokens_per_s"] == 4.0
    assert numbers["max_concurrent_requests"] == 2


def test_latencies_are_absent_when_everything_failed() -> None:
    numbers = summarise([FAILED], 1.0, Objectives(limits_ms={"ttft": 1e9}))
    assert (numbers["completed"], numbers["failed"], numbers["output_throughput"]) == (0, 1, 0)
    assert (numbers["request_goodput"], numbers["slo_attainment"], numbers["p99_ttft_ms"]) == (0.0, 0.0, None)
    assert {numbers[f"{stat}_{name}_ms"] for stat in ("mean", "median", "std") for name in ("tpot", "e2el")} == {None}
    assert ratios(numbers, numbers)["median_ttft_ms"] is None
    assert numbers["ttft_quantiles_ms"] == []


def test_details_have_one_entry_per_request_when_some_failed() -> None:
    found = details([FAILED, *RECORDS])
    assert found["ttfts"][0] is None and found["ttfts"][1:] == pytest.approx([0.5, 0.1, 0.2])
    assert found["errors"] == ["truncated: cut", "", "", ""]
    assert found["output_lens"] == [0, 3, 5, 1]
    assert {len(values) for values in found.values()} == {4}


def test_ratios_are_second_over_first_and_medians_over_rounds() -> None:
    first, second = summarise(RECORDS, 4.0), summarise(RECORDS, 2.0)
    found = ratios(first, second)
    assert (found["output_throughput"], found["median_ttft_ms"]) == (2.0, 1.0)
    rounds: list[dict[str, float | None]] = [{"x": 1.0, "y": 2.0}, {"x": 5.0, "y": None}, {"x": 2.0, "y": 1.0}]
    assert median_ratios(rounds) == {"x": 2.0, "y": None}
    assert ratios(first, summarise([FAILED], 1.0))["output_throughput"] is None
