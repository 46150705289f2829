"""The catalogue of metrics: names, units and completeness."""

import re

import pytest

from core.metrics import BY_NAME, CATALOGUE, WORKER_METRICS, Metric


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_metric_follows_the_naming_rules(metric: Metric) -> None:
    assert re.fullmatch(r"(pdcluster_|vllm:)[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help and metric.unit
    if metric.name.startswith("pdcluster_") and metric.unit in ("seconds", "bytes", "tokens", "blocks"):
        assert metric.unit in metric.name, f"the name does not carry its unit {metric.unit}"


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CATALOGUE)


def test_worker_metrics_carry_the_labels_of_a_worker() -> None:
    assert all(metric.labels == ("worker", "role") and metric.owner == "worker" for metric in WORKER_METRICS)
