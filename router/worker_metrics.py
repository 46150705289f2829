"""The workers' metrics as a router shows them: the last heartbeat of each live worker, and what the router sees of it.

Nothing is counted here. Knows nothing about requests or HTTP.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from core.ids import RouterId, WorkerId
from core.messages import WorkerStatus
from core.metrics import PROCESS_METRICS, VIEW_METRICS, WORKER_METRICS, Metric, bucket_keys, series_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A live worker as a router knows it."""

    status: WorkerStatus
    heartbeat_age_s: float
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One series of one worker: the values of its labels, and a number, or those of a histogram."""

    labels: tuple[str, ...]
    value: float = 0.0
    counts: tuple[float, ...] = ()
    """Of a histogram's buckets, not cumulative."""
    sum: float = 0.0


class WorkerCollector(Collector):
    """Shows all live workers."""

    def __init__(
        self,
        router_id: RouterId,
        model_name: str,
        workers: Callable[[], Sequence[WorkerView]],
        audit_problems: Mapping[WorkerId, int],
    ) -> None:
        """`audit_problems` is read when asked: the number of problems that a worker's last audit found."""
        self._router_id = router_id
        self._model_name = model_name
        self._workers = workers
        self._audit_problems = audit_problems

    def collect(self) -> Iterable[Family]:
        views = self._workers()
        reports = [((view.status.worker, view.status.role, self._router_id), _report(view.status)) for view in views]
        for metric in WORKER_METRICS:
            yield _family(metric, [sample for owner, report in reports for sample in _samples(metric, owner, report)])
        shown = [(view, self._seen(view)) for view in views]
        for metric in VIEW_METRICS:
            yield _family(metric, [samples[metric.name] for _view, samples in shown if metric.name in samples])

    def _seen(self, view: WorkerView) -> dict[str, Sample]:
        """What the router says of a worker, by metric."""
        status, kv = view.status, view.status.kv
        owner = (status.worker, status.role, self._router_id)
        engine = (self._model_name, status.worker, self._router_id)
        config = (self._model_name, status.worker, str(view.block_size), str(kv.blocks_total), self._router_id)
        seen = {
            "pdcluster_heartbeat_age_seconds": Sample(labels=owner, value=view.heartbeat_age_s),
            "pdcluster_worker_epoch": Sample(labels=owner, value=status.epoch),
            "vllm:cache_config_info": Sample(labels=config, value=1.0),
        }
        if status.worker in self._audit_problems:
            problems = self._audit_problems[status.worker]
            seen["pdcluster_audit_problems"] = Sample(labels=owner, value=problems)
        if kv.blocks_total:
            usage = kv.blocks_used / kv.blocks_total
            seen["vllm:kv_cache_usage_perc"] = Sample(labels=engine, value=usage)
        if counts := _counts("pdcluster_step_tokens", status.counters):
            total = status.counters.get("pdcluster_step_tokens_sum", 0.0)
            seen["vllm:iteration_tokens_total"] = Sample(labels=engine, counts=counts, sum=total)
        for name, source in _VLLM_COUNTERS.items():
            found = [status.counters[key] for key in series_keys(source) if key in status.counters]
            if found:
                seen[name] = Sample(labels=engine, value=sum(found))
        return seen


_VLLM_COUNTERS = {
    "vllm:num_preemptions_total": "pdcluster_preemptions_total",
    "vllm:nixl_num_failed_transfers_total": "pdcluster_reads_failed_total",
    "vllm:nixl_num_kv_expired_reqs_total": "pdcluster_leases_expired_total",
}
"""Counters of workers that have a name of vLLM's, too."""


class ProcessCollector(Collector):
    """Prometheus' own collector of this process, as far as the catalogue goes."""

    def __init__(self, router: RouterId) -> None:
        self._router = router
        self._inner = prometheus_client.ProcessCollector(registry=None)
        self._names = {metric.name.removesuffix("_total") for metric in PROCESS_METRICS}

    def collect(self) -> Iterable[Family]:
        families = [family for family in self._inner.collect() if family.name in self._names]
        for family in families:
            family.samples = [one._replace(labels={**one.labels, "router": self._router}) for one in family.samples]
        return families


def _counts(name: str, report: Mapping[str, float]) -> tuple[float, ...]:
    """A histogram's buckets as a worker reports them, () when it does not."""
    keys = bucket_keys(name)
    return tuple(report.get(key, 0.0) for key in keys) if keys[0] in report else ()


def _samples(metric: Metric, owner: tuple[str, ...], report: Mapping[str, float]) -> list[Sample]:
    """The series of a metric that a worker counts; none of one that its role does not have."""
    if metric.kind == "histogram":
        counts = _counts(metric.name, report)
        return [Sample(labels=owner, counts=counts, sum=report.get(f"{metric.name}_sum", 0.0))] if counts else []
    own = metric.values[metric.labels[0]] if metric.values else ("",)
    pairs = zip(own, series_keys(metric.name), strict=True)
    return [
        Sample(labels=(value, *owner) if value else owner, value=report[key]) for value, key in pairs if key in report
    ]


def _report(status: WorkerStatus) -> dict[str, float]:
    """A heartbeat as key -> value."""
    values = {
        **status.counters,
        "pdcluster_requests_waiting": status.num_waiting,
        "pdcluster_credits_waiting": status.num_waiting_credit,
        "pdcluster_requests_running": status.num_running,
        "pdcluster_leases": status.num_leases,
        "pdcluster_pins": status.num_pins,
        "pdcluster_kv_total_blocks": status.kv.blocks_total,
        "pdcluster_kv_free_blocks": status.kv.blocks_free,
        "pdcluster_kv_cached_blocks": status.kv.blocks_cached,
        "pdcluster_kv_used_blocks": status.kv.blocks_used,
    }
    if status.process is not None:
        values["pdcluster_process_cpu_seconds_total"] = status.process.cpu_s
        values["pdcluster_process_resident_bytes"] = status.process.resident_bytes
        values["pdcluster_process_open_fds"] = status.process.num_open_fds
    return values


def _family(metric: Metric, samples: Sequence[Sample]) -> Family:
    """A metric with its series in Prometheus' form."""
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for sample in samples:
            histogram.add_metric(sample.labels, _cumulative(metric, sample.counts), sum_value=sample.sum)
        return histogram
    made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = made(metric.name, metric.help, labels=metric.labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


def _cumulative(metric: Metric, counts: Sequence[float]) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: each with all observations up to its bound."""
    bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
    buckets, total = [], 0.0
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
