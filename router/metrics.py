"""A router's metrics: counted here by the names of `core.metrics`, rendered in Prometheus' text format.

Worker metrics are not counted but shown: the last heartbeat of each live worker, with the labels `worker` and `role`.
Knows nothing about requests or HTTP.
"""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from core.messages import WorkerStatus
from core.metrics import ROUTER_METRICS, WORKER_METRICS
from router.generation import Timing

Family = CounterMetricFamily | GaugeMetricFamily
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class RouterMetrics:
    """The registry of one router process."""

    def __init__(self, model_name: str, worker_statuses: Callable[[], Sequence[WorkerStatus]]) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in ROUTER_METRICS:
            arguments = (metric.name, metric.help, metric.labels)
            if metric.kind == "counter":
                self._counters[metric.name] = Counter(*arguments, registry=self._registry)
            elif metric.kind == "gauge":
                self._gauges[metric.name] = Gauge(*arguments, registry=self._registry)
            else:
                self._histograms[metric.name] = Histogram(
                    *arguments, buckets=(*metric.buckets, float("inf")), registry=self._registry
                )
        self._registry.register(_WorkerCollector(worker_statuses))
        self._worker_statuses = worker_statuses

    def attempt(self) -> None:
        self._counters["pdcluster_attempts_total"].inc()

    def first_token(self, num_prompt_tokens: int) -> None:
        self._counters["pdcluster_prompt_tokens_total"].inc(num_prompt_tokens)
        self._labelled("vllm:prompt_tokens_total").inc(num_prompt_tokens)

    def tokens(self, count: int, gap_s: float | None) -> None:
        """Tokens delivered; `gap_s`: since the message before, if there was one."""
        self._counters["pdcluster_output_tokens_total"].inc(count)
        self._labelled("vllm:generation_tokens_total").inc(count)
        if gap_s is not None:
            self._observed("vllm:inter_token_latency_seconds").observe(gap_s)

    def ended(self, outcome: str) -> None:
        """A request reached its terminal state."""
        self._counters["pdcluster_requests_total"].labels(outcome).inc()

    def finished(
        self, timing: Timing, *, num_prompt: int, num_cached: int, num_output: int, reasons: Iterable[str]
    ) -> None:
        """A request ended well; `reasons`: the finish reason of each choice."""
        self._counters["pdcluster_cached_prompt_tokens_total"].inc(num_cached)
        for reason in reasons:
            self._counters["vllm:request_success_total"].labels(self._model_name, reason).inc()
        values = {
            "pdcluster_ttft_seconds": timing.ttft_s,
            "pdcluster_tpot_seconds": timing.tpot_s,
            "pdcluster_e2e_seconds": timing.total_s,
            "pdcluster_queue_seconds": timing.queue_s,
            "pdcluster_prefill_seconds": timing.prefill_s,
            "pdcluster_transfer_seconds": timing.transfer_s,
        }
        for name, value in values.items():
            self._histograms[name].observe(value)
        self._observed("vllm:time_to_first_token_seconds").observe(timing.ttft_s)
        self._observed("vllm:e2e_request_latency_seconds").observe(timing.total_s)
        self._observed("vllm:request_prompt_tokens").observe(num_prompt)
        self._observed("vllm:request_generation_tokens").observe(num_output)

    def render(self, *, num_in_flight: int, num_queued_prompt_tokens: int, num_waiting: int, num_running: int) -> bytes:
        """Everything in Prometheus' text format, gauges as of now."""
        statuses = self._worker_statuses()
        self._gauges["pdcluster_requests_in_flight"].set(num_in_flight)
        self._gauges["pdcluster_queued_prompt_tokens"].set(num_queued_prompt_tokens)
        for role in ("prefill", "decode"):
            count = sum(status.role == role for status in statuses)
            self._gauges["pdcluster_workers_live"].labels(role).set(count)
        total = sum(status.kv.blocks_total for status in statuses)
        used = sum(status.kv.blocks_used for status in statuses)
        gauges = {
            "vllm:num_requests_running": num_running,
            "vllm:num_requests_waiting": num_waiting,
            "vllm:kv_cache_usage_perc": used / total if total else 0.0,
        }
        for name, value in gauges.items():
            self._gauges[name].labels(self._model_name).set(value)
        return generate_latest(self._registry)

    def _labelled(self, name: str) -> Counter:
        return self._counters[name].labels(self._model_name)

    def _observed(self, name: str) -> Histogram:
        return self._histograms[name].labels(self._model_name)


class _WorkerCollector(Collector):
    """Shows the workers' last heartbeats."""

    def __init__(self, worker_statuses: Callable[[], Sequence[WorkerStatus]]) -> None:
        self._worker_statuses = worker_statuses

    def collect(self) -> Iterable[Family]:
        values = [(status, worker_values(status)) for status in self._worker_statuses()]
        for metric in WORKER_METRICS:
            family: Family
            if metric.kind == "counter":
                family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            else:
                family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for status, known in values:
                if metric.name in known:
                    family.add_metric((status.worker, status.role), known[metric.name])
            if family.samples:
                yield family


def worker_values(status: WorkerStatus) -> dict[str, float]:
    """A heartbeat as metric name -> value."""
    return {
        **status.counters,
        "pdcluster_requests_waiting": status.num_waiting,
        "pdcluster_requests_running": status.num_running,
        "pdcluster_leases": status.num_leases,
        "pdcluster_pins": status.num_pins,
        "pdcluster_kv_total_blocks": status.kv.blocks_total,
        "pdcluster_kv_free_blocks": status.kv.blocks_free,
        "pdcluster_kv_cached_blocks": status.kv.blocks_cached,
        "pdcluster_kv_used_blocks": status.kv.blocks_used,
    }
