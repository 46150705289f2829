"""The catalogue of metrics: every name that this project exports, once, as data; and how workers report theirs.

Names are `pdcluster_<noun>_<unit>`. The `vllm:` names say the same for dashboards made for vLLM; `process_` names are
Prometheus' own. Every series has the label `router`: routers that share a port answer a scrape in turn, and one series
must not jump between two processes' counts.

A worker reports in `WorkerStatus.counters`. The key is the metric's name, followed by `{label="value"}` when the metric
has one label of its own, never two: `pdcluster_refusals_total{kind="draining"}`. A histogram is one key per bucket,
`name{le="64"}`, with the observations of that bucket alone (the last one is `+Inf`), and `name_sum`. All keys are
reported from the first heartbeat on. Knows nothing about Prometheus.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

PHASES = ("queue", "credit", "prefill", "transfer", "tail", "decode")
"""Of a request, in order: disjoint, and together its E2E."""
OUTCOMES = ("finished", "failed", "cancelled", "refused")
"""`refused`: not admitted."""
FAILURE_REASONS = (
    "admission",
    "draining",
    "invalid",
    "no_worker",
    "overloaded",
    "transfer_failed",
    "worker_lost",
    "stalled",
    "deadline",
    "protocol",
)
"""Why a request failed or was refused, or an attempt was given up. `admission` and `draining` are the router's own;
`protocol`: a worker broke RQ-1."""
RETRY_REASONS = ("overloaded", "no_worker", "transfer_failed", "worker_lost", "stalled")
"""Those after which another attempt may begin."""
REFUSAL_KINDS = (
    "overloaded",
    "too_long",
    "transfer_failed",
    "credit_lapsed",
    "unknown_peer",
    "invalid",
    "draining",
)
"""As in `core.messages.Refused`."""
READ_FAILURES = ("mismatch", "lost", "timed_out", "not_started")
"""Ends of a read of blocks that left some of them bad. `mismatch`: bytes arrived that do not have their digest."""
SOURCES = ("peer",)
"""Where KV bytes came from."""
STEP_PARTS = ("messages", "transfer", "plan", "forward", "sample", "apply", "idle")
"""What the step thread does; together all of its time."""

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LONG = (*_SECONDS, 160.0, 640.0, 2560.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_CHOICES = (1, 2, 5, 10, 20)

MetricKind = Literal["counter", "gauge", "histogram"]
MetricOwner = Literal["router", "worker", "view", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One exported metric."""

    name: str
    """Full name; counters end in `_total`."""
    kind: MetricKind
    unit: str
    """`seconds`, `tokens`, `bytes`, `blocks`, `requests`, ..."""
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Closed sets of values, by label. Each is exported from the start, at 0."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, histograms only."""
    owner: MetricOwner = "router"
    """Who counts it: a router; a worker, whose label of its own (if any) comes first; a router when it is asked, from
    what it hears of workers (`view`); Prometheus' collector for the router's process."""


def _router(
    name: str,
    kind: MetricKind,
    unit: str,
    help: str,
    buckets: tuple[float, ...] = (),
    labels: tuple[str, ...] = (),
    /,
    **values: tuple[str, ...],
) -> Metric:
    """`labels`: with open sets of values; `values`: with closed ones."""
    every = (*labels, *values, "router")
    return Metric(name=name, kind=kind, unit=unit, help=help, labels=every, values=values, buckets=buckets)


_ENGINE = ("model_name", "engine")


def _vllm(
    name: str, kind: MetricKind, unit: str, help: str, buckets: tuple[float, ...] = (), /, **values: tuple[str, ...]
) -> Metric:
    return _router(name, kind, unit, help, buckets, _ENGINE, **values)


def _worker(
    name: str, kind: MetricKind, unit: str, help: str, buckets: tuple[float, ...] = (), /, **values: tuple[str, ...]
) -> Metric:
    labels = (*values, "worker", "role", "router")
    return Metric(
        name=name, kind=kind, unit=unit, help=help, labels=labels, values=values, buckets=buckets, owner="worker"
    )


def _view(
    name: str, kind: MetricKind, unit: str, help: str, labels: tuple[str, ...], buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(name=name, kind=kind, unit=unit, help=help, labels=(*labels, "router"), buckets=buckets, owner="view")


def _process(name: str, kind: MetricKind, unit: str, help: str) -> Metric:
    return Metric(name=name, kind=kind, unit=unit, help=help, labels=("router",), owner="process")


ROUTER_METRICS = (
    _router("pdcluster_requests_total", "counter", "requests", "Requests by how they ended", outcome=OUTCOMES),
    _router("pdcluster_failures_total", "counter", "requests", "Failed and refused ones", reason=FAILURE_REASONS),
    _router(
        "pdcluster_ended_in_phase_total", "counter", "requests", "Failed and cancelled ones by the phase they were in",
        phase=PHASES, outcome=("failed", "cancelled"),
    ),
    _router(
        "pdcluster_attempts_total", "counter", "attempts",
        "Tries at requests; `cause` is what ended the try before, or `first`", cause=("first", *RETRY_REASONS),
    ),
    _router("pdcluster_requests_in_flight", "gauge", "requests", "Prompts of admitted requests that have not ended"),
    _router("pdcluster_queued_prompt_tokens", "gauge", "tokens", "Prompt tokens of requests without a first token"),
    _router("pdcluster_prompt_tokens_total", "counter", "tokens", "Prompt tokens of requests that got a first token"),
    _router("pdcluster_cached_prompt_tokens_total", "counter", "tokens", "Those of them that no worker had to compute"),
    _router("pdcluster_output_tokens_total", "counter", "tokens", "Tokens delivered"),
    _router("pdcluster_ttft_seconds", "histogram", "seconds", "Arrival to first token, of any choice", _LONG),
    _router("pdcluster_tpot_seconds", "histogram", "seconds", "(E2E - TTFT) / (output tokens - 1)", _SECONDS),
    _router("pdcluster_e2e_seconds", "histogram", "seconds", "Arrival to last token", _LONG),
    _router(
        "pdcluster_phase_seconds", "histogram", "seconds", "Time of finished requests in the phases they had",
        _LONG, phase=PHASES,
    ),
    _router(
        "pdcluster_phase_wait_seconds", "histogram", "seconds",
        "Part of a phase before the worker's first step for the request", _LONG, phase=("prefill", "tail"),
    ),
    _router("pdcluster_workers_live", "gauge", "workers", "Workers with a working link", role=("prefill", "decode")),
    _router("pdcluster_workers_lost_total", "counter", "workers", "Losses of a worker that was live", (), ("worker",)),
)  # fmt: skip
"""Counted by each router."""

VLLM_METRICS = (
    _vllm("vllm:num_requests_running", "gauge", "requests", "Choices with a first token"),
    _vllm("vllm:num_requests_waiting", "gauge", "requests", "Choices without a first token"),
    _vllm("vllm:prompt_tokens_total", "counter", "tokens", "As pdcluster_prompt_tokens_total"),
    _vllm(
        "vllm:prompt_tokens_by_source_total", "counter", "tokens", "How the decode worker came by them",
        source=("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    _vllm("vllm:prompt_tokens_cached_total", "counter", "tokens", "Those the decode worker did not compute"),
    _vllm("vllm:prefix_cache_queries_total", "counter", "tokens", "Prompt tokens looked up at the decode worker"),
    _vllm("vllm:prefix_cache_hits_total", "counter", "tokens", "Those that it had cached"),
    _vllm("vllm:external_prefix_cache_queries_total", "counter", "tokens", "Those that it had not"),
    _vllm("vllm:external_prefix_cache_hits_total", "counter", "tokens", "Those of them that it pulled"),
    _vllm("vllm:generation_tokens_total", "counter", "tokens", "As pdcluster_output_tokens_total"),
    _vllm(
        "vllm:request_success_total", "counter", "requests", "Choices of finished requests by reason",
        finished_reason=("stop", "length"),
    ),
    _vllm("vllm:time_to_first_token_seconds", "histogram", "seconds", "Arrival to a choice's first token", _LONG),
    _vllm("vllm:inter_token_latency_seconds", "histogram", "seconds", "Between a choice's token messages", _SECONDS),
    _vllm("vllm:request_time_per_output_token_seconds", "histogram", "seconds", "TPOT of a choice", _SECONDS),
    _vllm("vllm:e2e_request_latency_seconds", "histogram", "seconds", "Arrival to a choice's last token", _LONG),
    _vllm("vllm:request_queue_time_seconds", "histogram", "seconds", "Arrival to the prompt's first step", _LONG),
    _vllm("vllm:request_prefill_time_seconds", "histogram", "seconds", "From there to a choice's first token", _LONG),
    _vllm("vllm:request_decode_time_seconds", "histogram", "seconds", "A choice's first to last token", _LONG),
    _vllm(
        "vllm:request_inference_time_seconds", "histogram", "seconds", "From the first step to a choice's last token",
        _LONG,
    ),
    _vllm("vllm:request_prompt_tokens", "histogram", "tokens", "Prompt length, once per choice", _TOKENS),
    _vllm("vllm:request_generation_tokens", "histogram", "tokens", "Output length of a choice", _TOKENS),
    _vllm("vllm:request_max_num_generation_tokens", "histogram", "tokens", "Of a request's longest choice", _TOKENS),
    _vllm("vllm:request_params_n", "histogram", "requests", "Choices asked for", _CHOICES),
    _vllm("vllm:request_params_max_tokens", "histogram", "tokens", "max_tokens asked for", _TOKENS),
)  # fmt: skip
"""Counted by each router, under vLLM's names; `engine` is the router."""

WORKER_METRICS = (
    _worker("pdcluster_requests_waiting", "gauge", "requests", "Waiting at the worker, for credit or for a row"),
    _worker("pdcluster_credits_waiting", "gauge", "requests", "Those of them that wait for credit"),
    _worker("pdcluster_requests_running", "gauge", "requests", "In the worker's batch"),
    _worker("pdcluster_leases", "gauge", "leases", "Leases granted and not yet ended"),
    _worker("pdcluster_pins", "gauge", "pins", "Blocks held by leases or intake"),
    _worker("pdcluster_kv_total_blocks", "gauge", "blocks", "Blocks of the pool"),
    _worker("pdcluster_kv_free_blocks", "gauge", "blocks", "Blocks without content"),
    _worker("pdcluster_kv_cached_blocks", "gauge", "blocks", "Blocks kept for reuse"),
    _worker("pdcluster_kv_used_blocks", "gauge", "blocks", "Blocks that a request or lease holds"),
    _worker("pdcluster_process_cpu_seconds_total", "counter", "seconds", "CPU time of the worker's process"),
    _worker("pdcluster_process_resident_bytes", "gauge", "bytes", "Memory of the worker's process in RAM"),
    _worker("pdcluster_process_open_fds", "gauge", "descriptors", "Open file descriptors of the worker's process"),
    _worker("pdcluster_steps_total", "counter", "steps", "Forward passes"),
    _worker("pdcluster_step_seconds_total", "counter", "seconds", "Time of the step thread", part=STEP_PARTS),
    _worker("pdcluster_step_tokens", "histogram", "tokens", "Positions computed by one step", _STEP_TOKENS),
    _worker("pdcluster_step_sequences_total", "counter", "sequences", "Sequences in each step, added up"),
    _worker("pdcluster_step_rows_total", "counter", "sequences", "Sequences that each step had room for, added up"),
    _worker("pdcluster_refusals_total", "counter", "requests", "Attempts refused or given up", kind=REFUSAL_KINDS),
    _worker("pdcluster_prefill_prompts_total", "counter", "prompts", "Prompts computed to the end"),
    _worker("pdcluster_prefill_computed_tokens_total", "counter", "tokens", "Prompt tokens computed for others"),
    _worker("pdcluster_prefill_cached_tokens_total", "counter", "tokens", "Prompt tokens a prefill worker had cached"),
    _worker("pdcluster_leases_granted_total", "counter", "leases", "Leases granted"),
    _worker("pdcluster_leases_released_total", "counter", "leases", "Leases that their reader ended"),
    _worker("pdcluster_leases_cancelled_total", "counter", "leases", "Leases that ended with their request"),
    _worker("pdcluster_leases_expired_total", "counter", "leases", "Leases that ended unreleased"),
    _worker("pdcluster_blocks_offered_total", "counter", "blocks", "Blocks offered to decode workers"),
    _worker("pdcluster_credits_granted_total", "counter", "requests", "Credits given, with or without need of prefill"),
    _worker("pdcluster_credits_lapsed_total", "counter", "requests", "Credits that ended without an offer"),
    _worker("pdcluster_pulls_total", "counter", "prompts", "Prompts whose demanded blocks were all pulled"),
    _worker("pdcluster_pulls_failed_total", "counter", "prompts", "Prompts given up before they were all here"),
    _worker("pdcluster_pulled_blocks_total", "counter", "blocks", "Blocks read and verified", source=SOURCES),
    _worker("pdcluster_pulled_bytes_total", "counter", "bytes", "Bytes read, verified or not", source=SOURCES),
    _worker("pdcluster_pull_read_seconds_total", "counter", "seconds", "Time spent in reads", source=SOURCES),
    _worker("pdcluster_reads_failed_total", "counter", "reads", "Reads that left bad blocks", reason=READ_FAILURES),
    _worker(
        "pdcluster_digest_mismatches_total", "counter", "mismatches", "Blocks whose bytes did not match their digest"
    ),
    _worker("pdcluster_decode_prompt_tokens_computed_total", "counter", "tokens", "Prompt tokens decode computed"),
    _worker("pdcluster_decode_prompt_tokens_cached_total", "counter", "tokens", "Prompt tokens decode had or pulled"),
    _worker("pdcluster_decode_tokens_total", "counter", "tokens", "Tokens sampled"),
    _worker("pdcluster_preemptions_total", "counter", "requests", "Sequences whose blocks were given up"),
)
"""Counted by workers."""

VIEW_METRICS = (
    _view("pdcluster_heartbeat_age_seconds", "gauge", "seconds", "Since a live worker was heard", ("worker", "role")),
    _view("pdcluster_worker_epoch", "gauge", "epochs", "Grows by one with every restart", ("worker", "role")),
    _view("pdcluster_audit_problems", "gauge", "problems", "Broken invariants at the last audit", ("worker", "role")),
    _view("vllm:kv_cache_usage_perc", "gauge", "share", "Used KV blocks of a worker, 0 to 1", _ENGINE),
    _view(
        "vllm:iteration_tokens_total", "histogram", "tokens", "As pdcluster_step_tokens", _ENGINE,
        _STEP_TOKENS,
    ),
    _view("vllm:num_preemptions_total", "counter", "requests", "As pdcluster_preemptions_total", _ENGINE),
    _view(
        "vllm:nixl_num_failed_transfers_total", "counter", "reads", "pdcluster_reads_failed_total of all reasons",
        _ENGINE,
    ),
    _view(
        "vllm:nixl_num_kv_expired_reqs_total", "counter", "leases", "As pdcluster_leases_expired_total",
        _ENGINE,
    ),
    _view(
        "vllm:cache_config_info", "gauge", "constant", "1; the labels say how large a worker's cache is",
        ("model_name", "engine", "block_size", "num_gpu_blocks"),
    ),
)  # fmt: skip
"""Shown by each router for each live worker; `engine` is the worker."""

PROCESS_METRICS = (
    _process("process_cpu_seconds_total", "counter", "seconds", "CPU time of the router's process"),
    _process("process_resident_memory_bytes", "gauge", "bytes", "Memory of the router's process in RAM"),
    _process("process_open_fds", "gauge", "descriptors", "Open file descriptors of the router's process"),
)
"""Of the router that answers, under Prometheus' own names."""

CATALOGUE = (*ROUTER_METRICS, *VLLM_METRICS, *WORKER_METRICS, *VIEW_METRICS, *PROCESS_METRICS)
BY_NAME = {metric.name: metric for metric in CATALOGUE}


# ---- how workers report ----------------------------------------------------------------------------------------------


@cache
def series_key(name: str, value: str) -> str:
    """The key of one labelled series of a worker's metric. KeyError for one that is not in the catalogue."""
    metric = BY_NAME[name]
    label = "le" if metric.kind == "histogram" else metric.labels[0]
    if metric.kind == "counter" and value not in metric.values[label]:
        raise KeyError(f"{name}: {label} is none of {metric.values[label]}: {value!r}")
    return f'{name}{{{label}="{value}"}}'


@cache
def bucket_keys(name: str) -> tuple[str, ...]:
    """The keys of a histogram's buckets in order, the last one without an upper bound."""
    bounds = [f"{bound:g}" for bound in BY_NAME[name].buckets]
    return tuple(series_key(name, bound) for bound in (*bounds, "+Inf"))


@cache
def series_keys(name: str) -> tuple[str, ...]:
    """Every key under which a worker reports this metric."""
    metric = BY_NAME[name]
    if metric.kind == "histogram":
        return (*bucket_keys(name), f"{name}_sum")
    if not metric.values:
        return (name,)
    return tuple(series_key(name, value) for value in metric.values[metric.labels[0]])
