"""A router's metrics: every series is there from the start, and each observation lands where the catalogue says."""

from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

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
from core.ids import Epoch, RequestId, RouterId, WorkerId
from core.messages import KvUsage, WorkerStatus
from core.metrics import CATALOGUE, FAILURE_REASONS, RETRY_REASONS, WORKER_METRICS, bucket_keys, series_keys
from core.request import Request, SamplingParams
from router.actions import FlowFacts
from router.generation import Timing, make_timing
from router.metrics import ChoiceTimes, RouterMetrics, failure_reason
from router.worker_metrics import WorkerView

ERRORS: dict[str, PdclusterError] = {
    "invalid": InvalidRequestError(message="m"),
    "no_worker": NoWorkerError(role="decode"),
    "overloaded": OverloadedError(reason="r"),
    "transfer_failed": TransferFailedError(source="a", target="b", reason="r"),
    "worker_lost": WorkerLostError(worker="w", phase="p"),
    "stalled": StalledError(workers="w", phase="p", limit_s="1"),
    "deadline": DeadlineExceededError(phase="p", limit_s="1"),
    "protocol": PdclusterError(message="m"),
}


def view() -> WorkerView:
    counters = {key: 1.0 for metric in WORKER_METRICS for key in series_keys(metric.name)}
    status = WorkerStatus(
        worker=WorkerId("decode-0"),
        role="decode",
        epoch=Epoch(3),
        state="ready",
        num_waiting=1,
        num_running=2,
        num_leases=3,
        num_pins=4,
        kv=KvUsage(blocks_total=10, blocks_free=5, blocks_cached=3, blocks_used=2),
        counters=counters | {"unknown_total": 1.0},
    )
    return WorkerView(status=status, heartbeat_age_s=0.25, block_size=16)


class Scraped:
    """What a router shows, by sample name and labels."""

    def __init__(self, metrics: RouterMetrics) -> None:
        text = metrics.render(num_in_flight=1, num_queued_prompt_tokens=2, num_waiting=3, num_running=4).decode()
        self.families = list(text_string_to_metric_families(text))
        self.samples = {(s.name, frozenset(s.labels.items())): s.value for f in self.families for s in f.samples}

    def value(self, name: str, **labels: str) -> float:
        """Of the one sample that has these labels and maybe others."""
        found = [v for (n, have), v in self.samples.items() if n == name and set(labels.items()) <= have]
        assert len(found) == 1, (name, labels, found)
        return found[0]


def make_metrics(workers: Sequence[WorkerView] = ()) -> RouterMetrics:
    return RouterMetrics(router_id=RouterId("router-7"), model_name="m", workers=lambda: workers)


def facts(**fields: float) -> FlowFacts:
    return FlowFacts(**{"arrived_s": 10.0, **fields})  # type: ignore[arg-type]


def test_exactly_the_catalogue_is_exported_with_its_types_and_labels() -> None:
    metrics = make_metrics([view()])
    metrics.worker_lost(WorkerId("decode-1"))
    metrics.audited(WorkerId("decode-0"), 2)
    scraped = Scraped(metrics)
    found = {f.name + ("_total" if f.type == "counter" else ""): f for f in scraped.families}
    assert set(found) == {metric.name for metric in CATALOGUE}
    for metric in CATALOGUE:
        family = found[metric.name]
        assert family.type == metric.kind
        assert metric.owner == "process" or family.documentation == metric.help
        extra = {"le"} if metric.kind == "histogram" else set()
        labels = {frozenset(set(sample.labels) - extra) for sample in family.samples}
        assert labels == {frozenset(metric.labels)}, metric.name
        for label, values in metric.values.items():
            assert {s.labels[label] for s in family.samples} == set(values), f"{metric.name}: {label}"
    assert scraped.value("pdcluster_audit_problems") == 2
    assert scraped.value("vllm:kv_cache_usage_perc", engine="decode-0", model_name="m", router="router-7") == 0.2
    assert scraped.value("pdcluster_worker_epoch", worker="decode-0") == 3


def test_histogram_of_a_worker_is_cumulative_when_shown() -> None:
    scraped = Scraped(make_metrics([view()]))
    keys = bucket_keys("pdcluster_step_tokens")
    for name in ("pdcluster_step_tokens", "vllm:iteration_tokens_total"):
        assert scraped.value(f"{name}_bucket", le="1.0") == 1
        assert scraped.value(f"{name}_bucket", le="16.0") == 3
        assert scraped.value(f"{name}_bucket", le="+Inf") == scraped.value(f"{name}_count") == len(keys)


@pytest.mark.parametrize("reason", ERRORS)
def test_error_counts_under_its_reason(reason: str) -> None:
    metrics = make_metrics()
    metrics.failed(ERRORS[reason])
    assert failure_reason(ERRORS[reason]) == reason
    assert Scraped(metrics).value("pdcluster_failures_total", reason=reason) == 1
    if reason in RETRY_REASONS:
        metrics.attempt(ERRORS[reason])
        assert Scraped(metrics).value("pdcluster_attempts_total", cause=reason) == 1


def test_every_reason_has_an_error_or_is_the_routers_own() -> None:
    assert set(FAILURE_REASONS) == {*ERRORS, "admission", "draining"}


def test_phases_are_disjoint_in_order_and_sum_to_the_whole_when_prefilled() -> None:
    timing = make_timing(
        facts(
            retried_s=11.0,
            submitted_s=11.5,
            credited_s=12.0,
            needs_prefill=True,
            offered_s=15.0,
            pulled_s=15.25,
            first_token_s=16.0,
            last_token_s=20.0,
            prefill_queue_s=2.0,
            tail_queue_s=0.5,
        ),
        num_tokens_longest=5,
    )
    phases = {"queue": 1.5, "credit": 0.5, "prefill": 3.0, "transfer": 0.25, "tail": 0.75, "decode": 4.0}
    assert timing.phases() == phases
    assert list(timing.phases()) == list(phases) and sum(phases.values()) == timing.total_s == 10.0
    assert (timing.retry_s, timing.prefill_queue_s, timing.tail_queue_s) == (1.0, 2.0, 0.5)
    assert (timing.ttft_s, timing.tpot_s, timing.until_first_step_s) == (6.0, 1.0, 4.0)


def test_parts_that_workers_report_never_exceed_their_phase() -> None:
    """A worker's duration and the router's are of two clocks."""
    timing = make_timing(
        facts(
            submitted_s=10.0,
            credited_s=10.0,
            needs_prefill=True,
            offered_s=11.0,
            pulled_s=11.0,
            first_token_s=11.5,
            last_token_s=11.5,
            prefill_queue_s=1.25,
            tail_queue_s=0.75,
        ),
        num_tokens_longest=1,
    )
    assert (timing.prefill_queue_s, timing.tail_queue_s, timing.tpot_s) == (1.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("phase", "fields"),
    [
        ("queue", {}),
        ("credit", {"submitted_s": 1}),
        ("tail", {"submitted_s": 1, "credited_s": 2}),
        ("prefill", {"submitted_s": 1, "credited_s": 2, "needs_prefill": True}),
        ("transfer", {"submitted_s": 1, "credited_s": 2, "needs_prefill": True, "offered_s": 3}),
        ("tail", {"submitted_s": 1, "credited_s": 2, "needs_prefill": True, "offered_s": 3, "pulled_s": 4}),
        ("decode", {"submitted_s": 1, "credited_s": 2, "first_token_s": 3}),
    ],
)
def test_phase_follows_from_what_has_happened(phase: str, fields: dict[str, float]) -> None:
    metrics = make_metrics()
    assert facts(**fields).phase() == phase
    metrics.ended("cancelled", facts(**fields).phase())
    assert Scraped(metrics).value("pdcluster_ended_in_phase_total", phase=phase, outcome="cancelled") == 1


def finished_choices(metrics: RouterMetrics, token_times: Sequence[Sequence[float]]) -> list[ChoiceTimes]:
    """Choices whose tokens came one by one at these times; arrival is 10.0."""
    choices = [ChoiceTimes(finish_reason="stop") for _ in token_times]
    for now, index in sorted((now, index) for index, times in enumerate(token_times) for now in times):
        metrics.tokens(choices[index], 10.0, 1, now)
    return choices


def test_latencies_are_of_each_choice_when_there_are_several() -> None:
    metrics = make_metrics()
    times = [[11.0, 11.5, 12.0], [11.0, 15.0]]
    choices = finished_choices(metrics, times)
    timing = Timing(
        queue_s=0.25, credit_s=0.0, prefill_s=None, transfer_s=None, tail_s=0.75, decode_s=4.0, retry_s=0.0,
        prefill_queue_s=None, tail_queue_s=0.25, ttft_s=1.0, tpot_s=2.0, total_s=5.0,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=9)
    request = Request(request_id=RequestId("r"), token_ids=(1,) * 7, sampling=sampling, num_children=2)
    metrics.finished(request, 10.0, timing, choices)
    scraped = Scraped(metrics)

    def histogram(name: str, **labels: str) -> tuple[float, float]:
        return scraped.value(f"{name}_count", **labels), scraped.value(f"{name}_sum", **labels)

    assert histogram("vllm:time_to_first_token_seconds") == (2, 2.0)
    assert histogram("vllm:inter_token_latency_seconds") == (3, 5.0)
    assert scraped.value("vllm:inter_token_latency_seconds_bucket", le="0.5") == 2, "two gaps of 0.5 s and one of 4 s"
    assert histogram("vllm:e2e_request_latency_seconds") == (2, 7.0)
    assert histogram("vllm:request_queue_time_seconds") == (2, 1.0)
    assert histogram("vllm:request_prefill_time_seconds") == (2, 1.0)
    assert histogram("vllm:request_decode_time_seconds") == (2, 5.0)
    assert histogram("vllm:request_inference_time_seconds") == (2, 6.0)
    assert histogram("vllm:request_generation_tokens") == (2, 5)
    assert histogram("vllm:request_prompt_tokens") == (2, 14)
    assert histogram("vllm:request_max_num_generation_tokens") == (1, 3)
    assert histogram("vllm:request_params_n") == (1, 2)
    assert histogram("pdcluster_e2e_seconds") == (1, 5.0)
    assert histogram("pdcluster_phase_seconds", phase="tail") == (1, 0.75)
    assert histogram("pdcluster_phase_seconds", phase="prefill") == (0, 0.0), "it did not happen"
    assert scraped.value("vllm:request_success_total", finished_reason="stop") == 2
    assert scraped.value("pdcluster_output_tokens_total") == 5


def test_time_per_output_token_is_nobody_s_when_there_is_one_token() -> None:
    metrics = make_metrics()
    request = Request(request_id=RequestId("r"), token_ids=(1,), sampling=SamplingParams(max_tokens=2))
    for times in ([1.0], [1.0, 2.0]):
        choices = finished_choices(metrics, [times])
        timing = Timing(
            queue_s=0.0, credit_s=0.0, prefill_s=None, transfer_s=None, tail_s=1.0, decode_s=times[-1] - 1.0,
            retry_s=0.0, prefill_queue_s=None, tail_queue_s=0.0, ttft_s=1.0, tpot_s=0.0, total_s=times[-1],
        )  # fmt: skip
        metrics.finished(request, 0.0, timing, choices)
    scraped = Scraped(metrics)
    assert scraped.value("pdcluster_tpot_seconds_count") == 1
    assert scraped.value("vllm:request_time_per_output_token_seconds_count") == 1


def test_gap_is_one_when_a_message_brings_several_tokens() -> None:
    metrics = make_metrics()
    choice = ChoiceTimes()
    metrics.tokens(choice, 10.0, 3, 11.0)
    metrics.tokens(choice, 10.0, 4, 13.0)
    scraped = Scraped(metrics)
    assert scraped.value("vllm:inter_token_latency_seconds_count") == 1
    assert scraped.value("vllm:inter_token_latency_seconds_sum") == 2.0
    assert scraped.value("vllm:generation_tokens_total") == 7


def test_sources_of_prompt_tokens_sum_to_all_of_them() -> None:
    metrics = make_metrics()
    first = facts(first_token_s=12.5)
    first.num_pulled_blocks, first.num_decode_cached_tokens = 2, 48
    metrics.prompt_computed(first, num_prompt=60, num_cached=32, block_size=16)
    scraped = Scraped(metrics)
    name = "vllm:prompt_tokens_by_source_total"
    sources = {
        source: scraped.value(name, source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert sources == {"local_compute": 12, "local_cache_hit": 16, "external_kv_transfer": 32}
    assert scraped.value("vllm:prompt_tokens_total") == sum(sources.values())
    assert scraped.value("vllm:prefix_cache_hits_total") == 16
    assert scraped.value("vllm:external_prefix_cache_queries_total") == 44
    assert scraped.value("pdcluster_cached_prompt_tokens_total") == 32
    assert scraped.value("pdcluster_ttft_seconds_sum") == 2.5
