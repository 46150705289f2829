"""Records of a run as the numbers of a result file, under the key names of `vllm bench serve`.

Throughput counts complete requests only, percentiles interpolate linearly, spreads are of the population. The meaning
of every key is in docs/bench.md. Knows nothing about how the records came to be.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.bench.record import RequestRecord

QUANTILE_STEPS = 100
FAILURE_DETAILS_MAX = 10
SLO_METRICS = ("ttft", "tpot", "e2el")

Numbers = dict[str, Any]
"""A part of a result file: names to numbers, lists, or further parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Upper bounds in milliseconds that a request must meet to be good, by `ttft`, `tpot`, `e2el`."""

    limits_ms: Mapping[str, float]

    def are_met(self, record: RequestRecord) -> bool:
        """By a complete request; one with a single token has no TPOT to miss."""
        seconds = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
        return all(seconds[name] <= limit / 1000 for name, limit in self.limits_ms.items())


def summarise(
    records: Sequence[RequestRecord],
    duration_s: float,
    objectives: Objectives | None = None,
    percentiles: Sequence[float] = (50, 90, 99),
) -> Numbers:
    """The numbers of one run that took `duration_s`. Latencies are of complete requests; None when there are none."""
    complete = [record for record in records if record.is_complete]
    num_input = sum(record.num_prompt_tokens for record in complete)
    num_output = sum(record.num_output_tokens for record in complete)
    good = [r for r in complete if objectives.are_met(r)] if objectives else []
    peak_tokens, peak_requests = _peaks(complete)
    numbers: Numbers = {
        "duration": duration_s,
        "completed": len(complete),
        "failed": len(records) - len(complete),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(complete) / duration_s,
        "request_goodput": len(good) / duration_s if objectives else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        "slo_attainment": len(good) / len(records) if objectives and records else None,
        **_failures(records),
    }
    for name, seconds in latencies(complete).items():
        numbers |= spread(name, seconds, percentiles)
    return numbers


def latencies(complete: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds of every sample of each latency."""
    return {
        "ttft": [record.ttft_s for record in complete],
        "tpot": [tpot for record in complete if (tpot := record.tpot_s) is not None],
        "itl": [gap for record in complete for gap in record.itls_s],
        "e2el": [record.e2el_s for record in complete],
        "client_queue_time": [record.queue_s for record in complete],
    }


def spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> Numbers:
    """mean_, median_, std_ and percentiles of `<name>_ms`, and 101 quantiles from least to greatest for its curve.

    Without any values: None, and no quantiles.
    """
    keys = [
        f"{stat}_{name}_ms" for stat in ("mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles))
    ]
    if not seconds:
        return {**dict.fromkeys(keys), f"{name}_quantiles_ms": []}
    values = np.array(seconds) * 1000
    found = [values.mean(), np.median(values), values.std(), *(np.percentile(values, one) for one in percentiles)]
    numbers: Numbers = dict(zip(keys, map(float, found), strict=True))
    ranks = np.linspace(0, 100, QUANTILE_STEPS + 1)
    numbers[f"{name}_quantiles_ms"] = np.percentile(values, ranks).tolist()
    return numbers


def details(records: Sequence[RequestRecord]) -> Numbers:
    """One entry per request, in order of sending; null where a failed request has no such number."""
    return {
        "input_lens": [r.num_prompt_tokens for r in records],
        "output_lens": [r.num_output_tokens for r in records],
        "start_times": [r.started_s for r in records],
        "ttfts": [r.ttft_s if r.is_complete else None for r in records],
        "itls": [r.itls_s if r.is_complete else [] for r in records],
        "latencies": [r.e2el_s if r.is_complete else None for r in records],
        "queue_times": [r.queue_s for r in records],
        "errors": ["" if r.failure is None else f"{r.failure}: {r.detail}" for r in records],
    }


def ratios(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, float | None]:
    """Second over first of the numbers that two servers are compared by; None where one of them is 0."""
    names = ("request_throughput", "output_throughput", "total_token_throughput")
    keys = (*names, *(f"median_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")))
    return {key: second[key] / first[key] if first[key] and second[key] else None for key in keys}


def median_ratios(rounds: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The median over the rounds of each ratio; None unless every round has it."""
    medians: dict[str, float | None] = {}
    for key in rounds[0]:
        values = [value for numbers in rounds if (value := numbers[key]) is not None]
        medians[key] = float(np.median(values)) if len(values) == len(rounds) else None
    return medians


def _failures(records: Sequence[RequestRecord]) -> Numbers:
    failed = [(record.failure, record.detail) for record in records if record.failure is not None]
    return {
        "failures_by_reason": {str(reason): count for reason, count in sorted(Counter(r for r, _ in failed).items())},
        "failure_details": [f"{reason}: {detail}" for reason, detail in failed[:FAILURE_DETAILS_MAX]],
    }


def _peaks(complete: Sequence[RequestRecord]) -> tuple[float, int]:
    """Most chunks with tokens, and most requests under way at some time, within one second counted from the start."""
    if not complete:
        return 0.0, 0
    begin = min(record.started_s for record in complete)
    size = math.ceil(max(record.token_times_s[-1] for record in complete) - begin) + 1
    tokens, active = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for record in complete:
        np.add.at(tokens, (np.array(record.token_times_s) - begin).astype(np.int64), 1)
        active[int(record.started_s - begin) : int(record.token_times_s[-1] - begin) + 1] += 1
    return float(tokens.max()), int(active.max())
