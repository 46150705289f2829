"""A router's metrics: counted here by the names of `core.metrics`, rendered in Prometheus' text format.

Worker metrics are not counted but shown, by `router.worker_metrics`. Knows nothing about requests' states or HTTP.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    PdclusterError,
    StalledError,
    TransferFailedError,
    WorkerLostError,
)
from core.ids import RouterId, WorkerId
from core.metrics import ROUTER_METRICS, VLLM_METRICS, Metric
from core.request import Request
from router.actions import FlowFacts, RequestPhase
from router.generation import Timing
from router.worker_metrics import ProcessCollector, WorkerCollector, WorkerView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MetricSeries = tuple[str, ...]
"""A metric's name and the values of its closed labels."""

_REASONS: tuple[tuple[type[PdclusterError], str], ...] = (
    (InvalidRequestError, "invalid"),
    (NoWorkerError, "no_worker"),
    (OverloadedError, "overloaded"),
    (TransferFailedError, "transfer_failed"),
    (WorkerLostError, "worker_lost"),
    (StalledError, "stalled"),
    (DeadlineExceededError, "deadline"),
)


@dataclass(slots=True, kw_only=True)
class ChoiceTimes:
    """When the tokens of one choice came, on the router's clock, and how many."""

    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    finish_reason: str = ""


def failure_reason(error: PdclusterError) -> str:
    """The error as one of `core.metrics.FAILURE_REASONS`."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "protocol")


class RouterMetrics:
    """The registry of one router process."""

    def __init__(self, *, router_id: RouterId, model_name: str, workers: Callable[[], Sequence[WorkerView]]) -> None:
        """`workers`: every live worker as it is known now."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # times of creation: nobody asks for them, and the catalogue does not have them
        self._fixed = {"router": router_id, "engine": router_id, "model_name": model_name}
        self._registry = CollectorRegistry(auto_describe=False)
        self._workers = workers
        self._counters: dict[MetricSeries, Counter] = {}
        self._gauges: dict[MetricSeries, Gauge] = {}
        self._histograms: dict[MetricSeries, Histogram] = {}
        for metric in (*ROUTER_METRICS, *VLLM_METRICS):
            self._register(metric)
        self._audit_problems: dict[WorkerId, int] = {}
        self._registry.register(WorkerCollector(router_id, model_name, workers, self._audit_problems))
        self._registry.register(ProcessCollector(router_id))

    def _register(self, metric: Metric) -> None:
        """Make a metric and each of its series, so that all are there from the start. Those of a metric with an open
        label are made as they come, from the metric itself.
        """
        arguments = (metric.name, metric.help, metric.labels)
        if metric.kind == "counter":
            counter = Counter(*arguments, registry=self._registry)
            for series, labels in self._all_series(metric):
                self._counters[series] = counter.labels(*labels) if labels else counter
        elif metric.kind == "gauge":
            gauge = Gauge(*arguments, registry=self._registry)
            for series, labels in self._all_series(metric):
                self._gauges[series] = gauge.labels(*labels)
        else:
            buckets = (*metric.buckets, float("inf"))
            histogram = Histogram(*arguments, buckets=buckets, registry=self._registry)
            for series, labels in self._all_series(metric):
                self._histograms[series] = histogram.labels(*labels)

    def _all_series(self, metric: Metric) -> Iterator[tuple[MetricSeries, list[str]]]:
        """Each series and the values of its labels, none of them for a metric with an open label."""
        for values in product(*metric.values.values()):
            known = {**self._fixed, **dict(zip(metric.values, values, strict=True))}
            is_open = any(label not in known for label in metric.labels)
            yield (metric.name, *values), [] if is_open else [known[label] for label in metric.labels]

    # ---- requests ----------------------------------------------------------------------------------------------------

    def attempt(self, ended_by: PdclusterError | None) -> None:
        """A try begins; `ended_by`: what ended the one before, None for the first."""
        cause = "first" if ended_by is None else failure_reason(ended_by)
        self._count("pdcluster_attempts_total", cause)

    def prompt_computed(self, facts: FlowFacts, *, num_prompt: int, num_cached: int, block_size: int) -> None:
        """A request got its first token; `num_cached`: prompt tokens that no worker had to compute."""
        assert facts.first_token_s is not None
        self._count("pdcluster_prompt_tokens_total", amount=num_prompt)
        self._count("pdcluster_cached_prompt_tokens_total", amount=num_cached)
        self._observe("pdcluster_ttft_seconds", facts.first_token_s - facts.arrived_s)
        num_here = min(facts.num_decode_cached_tokens, num_prompt)
        num_pulled = min(facts.num_pulled_blocks * block_size, num_here)
        num_held = num_here - num_pulled
        self._count("vllm:prompt_tokens_total", amount=num_prompt)
        self._count("vllm:prompt_tokens_cached_total", amount=num_here)
        self._count("vllm:prompt_tokens_by_source_total", "local_compute", amount=num_prompt - num_here)
        self._count("vllm:prompt_tokens_by_source_total", "local_cache_hit", amount=num_held)
        self._count("vllm:prompt_tokens_by_source_total", "external_kv_transfer", amount=num_pulled)
        self._count("vllm:prefix_cache_queries_total", amount=num_prompt)
        self._count("vllm:prefix_cache_hits_total", amount=num_held)
        self._count("vllm:external_prefix_cache_queries_total", amount=num_prompt - num_held)
        self._count("vllm:external_prefix_cache_hits_total", amount=num_pulled)

    def tokens(self, choice: ChoiceTimes, arrived_s: float, count: int, now: float) -> None:
        """`count` > 0 new tokens of one choice came in one message; notes them in `choice`."""
        self._count("pdcluster_output_tokens_total", amount=count)
        self._count("vllm:generation_tokens_total", amount=count)
        if choice.num_tokens:
            self._observe("vllm:inter_token_latency_seconds", now - choice.last_s)
        else:
            choice.first_s = now
            self._observe("vllm:time_to_first_token_seconds", now - arrived_s)
        choice.last_s = now
        choice.num_tokens += count

    def finished(self, request: Request, arrived_s: float, timing: Timing, choices: Sequence[ChoiceTimes]) -> None:
        """A request ended well."""
        self._observe("pdcluster_e2e_seconds", timing.total_s)
        if any(choice.num_tokens > 1 for choice in choices):
            self._observe("pdcluster_tpot_seconds", timing.tpot_s)
        for phase, seconds in timing.phases().items():
            if seconds is not None:
                self._observe("pdcluster_phase_seconds", seconds, phase)
        if timing.prefill_queue_s is not None:
            self._observe("pdcluster_phase_wait_seconds", timing.prefill_queue_s, "prefill")
        self._observe("pdcluster_phase_wait_seconds", timing.tail_queue_s, "tail")
        self._observe("vllm:request_max_num_generation_tokens", max(choice.num_tokens for choice in choices))
        self._observe("vllm:request_params_n", request.num_children)
        self._observe("vllm:request_params_max_tokens", request.sampling.max_tokens)
        for choice in choices:
            self._choice_finished(choice, arrived_s, timing, len(request.token_ids))

    def _choice_finished(self, choice: ChoiceTimes, arrived_s: float, timing: Timing, num_prompt: int) -> None:
        """Under vLLM's names a choice is a request."""
        self._count("vllm:request_success_total", choice.finish_reason)
        self._observe("vllm:request_prompt_tokens", num_prompt)
        self._observe("vllm:request_generation_tokens", choice.num_tokens)
        if not choice.num_tokens:
            return  # a stop string took all of it
        queue_s = timing.until_first_step_s
        decode_s = choice.last_s - choice.first_s
        self._observe("vllm:e2e_request_latency_seconds", choice.last_s - arrived_s)
        self._observe("vllm:request_queue_time_seconds", queue_s)
        self._observe("vllm:request_prefill_time_seconds", choice.first_s - arrived_s - queue_s)
        self._observe("vllm:request_decode_time_seconds", decode_s)
        self._observe("vllm:request_inference_time_seconds", choice.last_s - arrived_s - queue_s)
        if choice.num_tokens > 1:
            self._observe("vllm:request_time_per_output_token_seconds", decode_s / (choice.num_tokens - 1))

    def failed(self, error: PdclusterError) -> None:
        """A request that was admitted ended with an error."""
        self._count("pdcluster_failures_total", failure_reason(error))

    def refused(self, reason: Literal["admission", "draining", "invalid"]) -> None:
        """A request was not admitted."""
        self._count("pdcluster_failures_total", reason)
        self._count("pdcluster_requests_total", "refused")

    def ended(self, outcome: Literal["finished", "failed", "cancelled"], phase: RequestPhase) -> None:
        """An admitted request reached its terminal state, in this phase."""
        self._count("pdcluster_requests_total", outcome)
        if outcome != "finished":
            self._count("pdcluster_ended_in_phase_total", phase, outcome)

    # ---- workers -----------------------------------------------------------------------------------------------------

    def worker_lost(self, worker: WorkerId) -> None:
        """A worker that was live is gone."""
        self._counters[("pdcluster_workers_lost_total",)].labels(worker, self._fixed["router"]).inc()
        self._audit_problems.pop(worker, None)

    def audited(self, worker: WorkerId, num_problems: int) -> None:
        """A worker has checked itself."""
        self._audit_problems[worker] = num_problems

    # ---- rendering ---------------------------------------------------------------------------------------------------

    def render(self, *, num_in_flight: int, num_queued_prompt_tokens: int, num_waiting: int, num_running: int) -> bytes:
        """Everything in Prometheus' text format, gauges as of now. `num_waiting` and `num_running` count choices."""
        roles = [view.status.role for view in self._workers()]
        gauges: dict[MetricSeries, float] = {
            ("pdcluster_requests_in_flight",): num_in_flight,
            ("pdcluster_queued_prompt_tokens",): num_queued_prompt_tokens,
            ("pdcluster_workers_live", "prefill"): roles.count("prefill"),
            ("pdcluster_workers_live", "decode"): roles.count("decode"),
            ("vllm:num_requests_running",): num_running,
            ("vllm:num_requests_waiting",): num_waiting,
        }
        for series, value in gauges.items():
            self._gauges[series].set(value)
        return generate_latest(self._registry)

    def _count(self, name: str, *values: str, amount: float = 1.0) -> None:
        self._counters[(name, *values)].inc(amount)

    def _observe(self, name: str, value: float, *values: str) -> None:
        self._histograms[(name, *values)].observe(value)
