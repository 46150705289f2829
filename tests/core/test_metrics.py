"""The catalogue of metrics: names, units, labels, the page made from it, and the keys of workers' reports."""

import re
from typing import get_args

import pytest

from core.ids import Epoch, RequestId, RouterId, WorkerId
from core.messages import Refused
from core.metrics import (
    BY_NAME,
    CATALOGUE,
    READ_FAILURES,
    REFUSAL_KINDS,
    WORKER_METRICS,
    Metric,
    bucket_keys,
    series_key,
    series_keys,
)
from core.outbox import Outbox, RefusalKind
from core.process import read_usage
from core.request import AttemptKey
from core.step_meter import STEP_COUNTERS, StepMeter
from tests.core.metrics_page import PAGE, render_page

VLLM_HISTOGRAM = "vllm:iteration_tokens_total"
"""Its name is vLLM's."""


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_metric_follows_the_naming_rules(metric: Metric) -> None:
    assert re.fullmatch(r"(pdcluster_|vllm:|process_)[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter" or metric.name == VLLM_HISTOGRAM)
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help and metric.unit
    assert set(metric.values) <= set(metric.labels)
    assert len(set(metric.labels)) == len(metric.labels)
    if metric.name.startswith("pdcluster_") and metric.unit in ("seconds", "bytes", "tokens", "blocks"):
        assert metric.unit in metric.name, f"the name does not carry its unit {metric.unit}"
    if metric.name.startswith("vllm:"):
        assert metric.labels[:2] == ("model_name", "engine")
    assert "router" in metric.labels


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CATALOGUE)


@pytest.mark.parametrize("metric", WORKER_METRICS, ids=lambda metric: metric.name)
def test_worker_metric_has_at_most_one_label_of_its_own(metric: Metric) -> None:
    """Its key in a heartbeat has room for one, and a histogram's is the bucket."""
    own = metric.labels[: -len(("worker", "role", "router"))]
    assert metric.labels == (*own, "worker", "role", "router") and metric.owner == "worker"
    assert len(own) <= (0 if metric.kind == "histogram" else 1)
    assert len(set(series_keys(metric.name))) == len(series_keys(metric.name))


def test_closed_sets_are_those_of_the_code() -> None:
    assert get_args(RefusalKind) == REFUSAL_KINDS
    assert get_args(Refused.__annotations__["kind"]) == REFUSAL_KINDS


def test_page_is_made_from_the_catalogue() -> None:
    page = PAGE.read_text()
    assert render_page(page) == page, "run `python -m tests.core.metrics_page`"


def test_page_without_a_place_for_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="no place for the table 'view'"):
        render_page(PAGE.read_text().replace("<!-- end view -->", ""))


def test_key_names_the_label() -> None:
    assert series_key("pdcluster_refusals_total", "draining") == 'pdcluster_refusals_total{kind="draining"}'
    assert series_key("pdcluster_reads_failed_total", READ_FAILURES[0]) in series_keys("pdcluster_reads_failed_total")
    with pytest.raises(KeyError, match="bored"):
        series_key("pdcluster_refusals_total", "bored")


def test_observation_counts_in_the_bucket_that_ends_at_or_after_it() -> None:
    outbox = Outbox(WorkerId("w"), Epoch(1), STEP_COUNTERS)
    for value in (1, 8, 9, 20_000):
        outbox.observe("pdcluster_step_tokens", value)
    counts = [outbox.counters[key] for key in bucket_keys("pdcluster_step_tokens")]
    assert counts[:3] == [1, 1, 1] and counts[-1] == 1 and sum(counts) == 4
    assert outbox.counters["pdcluster_step_tokens_sum"] == 20_018


def test_refusal_is_counted_by_kind() -> None:
    outbox = Outbox(WorkerId("w"), Epoch(1), ())
    outbox.refuse(RouterId("r"), AttemptKey(request_id=RequestId("q"), attempt=0), "invalid", "no")  # type: ignore[arg-type]
    counted = {key: value for key, value in outbox.counters.items() if value}
    assert counted == {'pdcluster_refusals_total{kind="invalid"}': 1.0}


def test_parts_of_a_step_add_up_to_all_time() -> None:
    outbox = Outbox(WorkerId("w"), Epoch(1), STEP_COUNTERS)
    time_s = iter([10.0, 11.0, 13.0, 16.0, 20.0])
    meter = StepMeter(outbox, num_rows=8, now=lambda: next(time_s))
    meter.lap("idle")
    meter.lap("plan")
    meter.step(num_tokens=5, num_sequences=2, timings_s={"forward": 1.5, "sample": 1.0})
    meter.lap("apply")
    parts = {k: v for k, v in outbox.counters.items() if k.startswith("pdcluster_step_seconds_total") and v}
    name = "pdcluster_step_seconds_total"
    expected = {"idle": 1.0, "plan": 2.0, "forward": 2.0, "sample": 1.0, "apply": 4.0}
    assert parts == {series_key(name, part): seconds for part, seconds in expected.items()}
    assert (outbox.counters["pdcluster_steps_total"], outbox.counters["pdcluster_step_rows_total"]) == (1, 8)


def test_usage_of_this_process_is_read() -> None:
    before = read_usage()
    assert before is not None and before.cpu_s > 0 and before.resident_bytes > 1_000_000
    with open(__file__, "rb"):
        during = read_usage()
    assert during is not None and during.num_open_fds == before.num_open_fds + 1
