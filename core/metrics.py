"""The catalogue of metrics: every name that this project exports, once, as data.

Names are `pdcluster_<noun>_<unit>`; a few `vllm:` names repeat router metrics for dashboards made for vLLM. Workers
send counters by these names in `WorkerStatus.counters`; gauges of workers come from its other fields. Knows nothing
about Prometheus.
"""

from dataclasses import dataclass
from typing import Literal

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LONG_SECONDS = (*_SECONDS, 160.0, 640.0, 2560.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One exported metric."""

    name: str
    """Full name; counters end in `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """`seconds`, `tokens`, `bytes`, `blocks`, `requests`, ..."""
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, histograms only."""
    owner: Literal["router", "worker"] = "router"
    """Who counts it. Worker metrics get the labels `worker` and `role` when a router renders them."""


def _router(
    name: str,
    kind: Literal["counter", "gauge", "histogram"],
    unit: str,
    help: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(name=name, kind=kind, unit=unit, help=help, labels=labels, buckets=buckets)


def _worker(name: str, kind: Literal["counter", "gauge"], unit: str, help: str) -> Metric:
    return Metric(name=name, kind=kind, unit=unit, help=help, labels=("worker", "role"), owner="worker")


ROUTER_METRICS = (
    _router("pdcluster_requests_total", "counter", "requests", "Requests by how they ended", ("outcome",)),
    _router("pdcluster_requests_in_flight", "gauge", "requests", "Choices of admitted requests that have not ended"),
    _router("pdcluster_queued_prompt_tokens", "gauge", "tokens", "Prompt tokens of requests without a first token"),
    _router("pdcluster_attempts_total", "counter", "attempts", "Tries at requests, the first ones included"),
    _router("pdcluster_prompt_tokens_total", "counter", "tokens", "Prompt tokens of requests that got a first token"),
    _router("pdcluster_cached_prompt_tokens_total", "counter", "tokens", "Prompt tokens that no worker had to compute"),
    _router("pdcluster_output_tokens_total", "counter", "tokens", "Tokens delivered"),
    _router("pdcluster_ttft_seconds", "histogram", "seconds", "Arrival to first token", (), _LONG_SECONDS),
    _router("pdcluster_tpot_seconds", "histogram", "seconds", "(E2E - TTFT) / (output tokens - 1)", (), _SECONDS),
    _router("pdcluster_e2e_seconds", "histogram", "seconds", "Arrival to last token", (), _LONG_SECONDS),
    _router(
        "pdcluster_queue_seconds", "histogram", "seconds", "Waiting for credit and for a first step", (), _LONG_SECONDS
    ),
    _router("pdcluster_prefill_seconds", "histogram", "seconds", "Computing the prompt", (), _LONG_SECONDS),
    _router("pdcluster_transfer_seconds", "histogram", "seconds", "Added by moving KV blocks", (), _SECONDS),
    _router("pdcluster_workers_live", "gauge", "workers", "Workers with a working link", ("role",)),
    _router("vllm:num_requests_running", "gauge", "requests", "Requests in decode", ("model_name",)),
    _router("vllm:num_requests_waiting", "gauge", "requests", "Requests without a first token", ("model_name",)),
    _router("vllm:kv_cache_usage_perc", "gauge", "share", "Used KV blocks of all workers, 0 to 1", ("model_name",)),
    _router("vllm:prompt_tokens_total", "counter", "tokens", "As pdcluster_prompt_tokens_total", ("model_name",)),
    _router("vllm:generation_tokens_total", "counter", "tokens", "As pdcluster_output_tokens_total", ("model_name",)),
    _router(
        "vllm:request_success_total", "counter", "requests", "Choices by reason", ("model_name", "finished_reason")
    ),
    _router(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "seconds",
        "As pdcluster_ttft_seconds",
        ("model_name",),
        _LONG_SECONDS,
    ),
    _router(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "seconds",
        "As pdcluster_e2e_seconds",
        ("model_name",),
        _LONG_SECONDS,
    ),
    _router(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "seconds",
        "Gaps between token messages",
        ("model_name",),
        _SECONDS,
    ),
    _router("vllm:request_prompt_tokens", "histogram", "tokens", "Prompt length", ("model_name",), _TOKENS),
    _router("vllm:request_generation_tokens", "histogram", "tokens", "Output length", ("model_name",), _TOKENS),
)
"""Counted by each router."""

WORKER_METRICS = (
    _worker("pdcluster_requests_waiting", "gauge", "requests", "Waiting at the worker"),
    _worker("pdcluster_requests_running", "gauge", "requests", "In the worker's batch"),
    _worker("pdcluster_leases", "gauge", "leases", "Leases granted and not yet released"),
    _worker("pdcluster_pins", "gauge", "pins", "Blocks held by leases or intake"),
    _worker("pdcluster_kv_total_blocks", "gauge", "blocks", "Blocks of the pool"),
    _worker("pdcluster_kv_free_blocks", "gauge", "blocks", "Blocks without content"),
    _worker("pdcluster_kv_cached_blocks", "gauge", "blocks", "Blocks kept for reuse"),
    _worker("pdcluster_kv_used_blocks", "gauge", "blocks", "Blocks that a request or lease holds"),
    _worker("pdcluster_steps_total", "counter", "steps", "Forward passes"),
    _worker("pdcluster_step_seconds_total", "counter", "seconds", "Time in forward passes"),
    _worker("pdcluster_prefill_prompts_total", "counter", "prompts", "Prompts computed to the end"),
    _worker(
        "pdcluster_prefill_computed_tokens_total", "counter", "tokens", "Prompt tokens computed by prefill workers"
    ),
    _worker("pdcluster_prefill_cached_tokens_total", "counter", "tokens", "Prompt tokens a prefill worker had cached"),
    _worker("pdcluster_leases_granted_total", "counter", "leases", "Leases granted"),
    _worker("pdcluster_leases_expired_total", "counter", "leases", "Leases that ended unreleased"),
    _worker("pdcluster_blocks_offered_total", "counter", "blocks", "Blocks offered to decode workers"),
    _worker("pdcluster_pulls_total", "counter", "prompts", "Prompts whose demanded blocks were all pulled"),
    _worker("pdcluster_pulls_failed_total", "counter", "prompts", "Pulls given up"),
    _worker("pdcluster_pulled_blocks_total", "counter", "blocks", "Blocks read, verified and committed"),
    _worker("pdcluster_pulled_bytes_total", "counter", "bytes", "Bytes of those blocks"),
    _worker("pdcluster_pull_read_seconds_total", "counter", "seconds", "Time spent in reads"),
    _worker(
        "pdcluster_digest_mismatches_total", "counter", "mismatches", "Blocks whose bytes did not match their digest"
    ),
    _worker("pdcluster_credits_lapsed_total", "counter", "requests", "Credits that ended without an offer"),
    _worker("pdcluster_decode_prompt_tokens_computed_total", "counter", "tokens", "Prompt tokens decode computed"),
    _worker("pdcluster_decode_prompt_tokens_cached_total", "counter", "tokens", "Prompt tokens decode had or pulled"),
    _worker("pdcluster_decode_tokens_total", "counter", "tokens", "Tokens sampled"),
    _worker("pdcluster_preemptions_total", "counter", "requests", "Requests whose blocks were given up"),
)
"""Counted by workers."""

CATALOGUE = (*ROUTER_METRICS, *WORKER_METRICS)
BY_NAME = {metric.name: metric for metric in CATALOGUE}
