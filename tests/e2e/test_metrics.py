"""Goal: every metric of the catalogue is exported and moves, nothing else is, and vLLM's dashboards have data.

Method: one script drives a cluster in process, on the manual clock, through ordinary requests, refusals, cancellations
and faults, and its router is scraped all the while.
"""

import asyncio
import math
from pathlib import Path

import pytest

from core.errors import (
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    PdclusterError,
    StalledError,
    WorkerLostError,
)
from core.ids import Epoch, WorkerId
from core.messages import Audited, Drain
from core.metrics import BY_NAME, CATALOGUE, PHASES
from router.generation import Summary
from tests.e2e.scraped import MAX_REQUESTS, Scrape, ScrapedCluster, increase, quantile
from tests.e2e.stage import VOCAB, play

STALL_S = 5.0
CREDIT_S = 2.0
LEASE_S = 4.0


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed) % VOCAB for i in range(length)]


# ---- the script ------------------------------------------------------------------------------------------------------


async def ordinary_requests(stage: ScrapedCluster) -> None:
    """Requests of all kinds, one with tokens that end it, one answered from what is cached, some at once."""
    for number in range(4):
        assert isinstance(await stage.ask(prompt(30, number)), Summary)
    assert isinstance(await stage.ask(prompt(30, 0)), Summary)
    assert isinstance(await stage.ask(prompt(3)), Summary)
    assert isinstance(await stage.ask(prompt(20, 5), num_children=2, stop_token_ids=tuple(range(VOCAB))), Summary)
    asking = stage.begin(prompt(20, 6), max_tokens=150)
    await stage.clock.sleep(0.1)
    await stage.hang_up(asking)
    await stage.wait(1.0)
    many = [stage.begin(prompt(20, seed), max_tokens=100) for seed in range(10, 18)]
    await stage.wait(0.6, every_s=0.2)
    assert all(isinstance(one, Summary) for one in await asyncio.gather(*many))


async def slow_reads(stage: ScrapedCluster) -> None:
    """Leases, pins and a phase of transfer that can be seen; a client hangs up in it."""
    stage.faults.delay_s = (1.5, 1.5)
    asking = stage.begin(prompt(30, 20))
    await stage.wait(2.0)
    assert isinstance(await asking, Summary)
    asking = stage.begin(prompt(30, 21))
    await stage.wait(0.6)
    await stage.hang_up(asking)
    await stage.wait(2.0)
    stage.faults.delay_s = (0.0, 0.0)


async def bad_reads(stage: ScrapedCluster) -> None:
    """Wrong bytes, of one block each time, so that retries get on; lost reads, the third of which fails the request."""
    stage.faults.corruption_rate = 1.0
    assert isinstance(await stage.ask(prompt(30, 30)), Summary)
    stage.faults.corruption_rate, stage.faults.loss_rate = 0.0, 1.0
    assert isinstance(await stage.ask(prompt(30, 31)), PdclusterError)
    stage.faults.loss_rate = 0.0
    await stage.wait(1.0)


async def router_refusals(stage: ScrapedCluster) -> None:
    assert isinstance(await stage.ask(prompt(5), num_children=MAX_REQUESTS + 1), InvalidRequestError)
    stage.freeze("decode-0")
    waiting = [stage.begin(prompt(3, seed), num_children=MAX_REQUESTS // 2) for seed in (40, 41)]
    await stage.wait(0.1)
    assert isinstance(await stage.ask(prompt(5)), OverloadedError)
    for asking in waiting:
        await stage.hang_up(asking)
    stage.thaw("decode-0")
    await stage.wait(0.5)


async def standing_workers(stage: ScrapedCluster) -> None:
    """A prefill worker that does nothing lets credit lapse; a decode worker that does nothing stalls the request."""
    stage.freeze("prefill-0")
    asking = stage.begin(prompt(30, 52))
    await stage.clock.sleep(0.1)
    await stage.hang_up(asking)
    asking = stage.begin(prompt(30, 50))
    await stage.wait(CREDIT_S + 0.6)
    stage.thaw("prefill-0")
    assert isinstance(await asking, Summary)
    stage.freeze("decode-0")
    asking = stage.begin(prompt(30, 51))
    await stage.wait(4 * STALL_S, every_s=STALL_S)
    stage.thaw("decode-0")
    assert isinstance(await asking, StalledError)


async def full_pool(stage: ScrapedCluster) -> None:
    """More sequences than blocks: some wait for credit, some are preempted."""
    many = [stage.begin(prompt(40, seed), max_tokens=90) for seed in range(60, 72)]
    await stage.wait(1.0, every_s=0.2)
    assert all(isinstance(one, Summary) for one in await asyncio.gather(*many))
    await stage.wait(0.6)


async def lost_workers(stage: ScrapedCluster) -> None:
    """A lease that nobody ends any more, and a worker that comes again."""
    stage.faults.delay_s = (1.0, 1.0)
    asking = stage.begin(prompt(30, 80))
    await stage.wait(0.5)
    stage.cut("prefill-0")
    await asking
    await stage.wait(LEASE_S + 1.0)
    stage.faults.delay_s = (0.0, 0.0)
    await stage.kill("prefill-0")
    assert isinstance(await stage.ask(prompt(30, 83)), NoWorkerError)
    await stage.start("prefill-0", "prefill", 2)
    assert isinstance(await stage.ask(prompt(30, 81)), Summary)
    asking = stage.begin(prompt(30, 82), max_tokens=150)
    await stage.clock.sleep(0.05)
    await stage.kill("decode-0")
    stage.num_blocks += 8
    await stage.start("decode-0", "decode", 2)
    assert isinstance(await asking, WorkerLostError)


async def odds_and_ends(stage: ScrapedCluster, path: Path) -> None:
    """An audit with a finding, a drained router, and a process that grows."""
    for problems in ((), ("KV-1: planted",)):
        found = Audited(number=1, member=WorkerId("decode-0"), epoch=Epoch(2), problems=problems, books={})
        stage.service.audited(WorkerId("decode-0"), found)
        stage.scrape()
    ballast = bytearray(b"x") * (48 * 1024 * 1024)
    with path.open("w"):
        await stage.wait(1.0)
    assert len(ballast)
    stage.cluster.workers[WorkerId("decode-0")].handle(stage.service.router_id, Drain(), stage.clock.now())
    assert isinstance(await stage.ask(prompt(5)), NoWorkerError)
    await stage.wait(0.6)
    stage.service.drain()
    assert isinstance(await stage.ask(prompt(5)), OverloadedError)
    stage.scrape()


NEEDS_OTHER_FAULTS = {
    ("pdcluster_attempts_total", "overloaded"),
    ("pdcluster_ended_in_phase_total", "credit", "cancelled"),
    ("pdcluster_ended_in_phase_total", "prefill", "failed"),
    ("pdcluster_ended_in_phase_total", "queue", "cancelled"),
    ("pdcluster_ended_in_phase_total", "tail", "failed"),
    ("pdcluster_failures_total", "deadline"),
    ("pdcluster_failures_total", "overloaded"),
    ("pdcluster_failures_total", "protocol"),
    ("pdcluster_reads_failed_total", "not_started"),
    ("pdcluster_reads_failed_total", "timed_out"),
    ("pdcluster_refusals_total", "invalid"),
    ("pdcluster_refusals_total", "overloaded"),
    ("pdcluster_refusals_total", "too_long"),
    ("pdcluster_refusals_total", "unknown_peer"),
    ("pdcluster_step_seconds_total", "sample"),
}
"""Values of labels that the script does not bring about: their metrics move by other values. Unit tests count each
reason of a failure, each phase and each end of a read; the stand-in runner has no sampling time of its own.
"""


def test_every_metric_moves_in_a_scripted_run(tmp_path: Path) -> None:
    stage = ScrapedCluster(
        f"transfer.credit_s={CREDIT_S}",
        f"transfer.lease_s={LEASE_S}",
        "decode.max_running=8",
        "prefill.max_batched_tokens=16",
        stall_s=STALL_S,
    )

    async def script() -> None:
        await stage.open()
        try:
            await stage.wait(0.6)
            await ordinary_requests(stage)
            await slow_reads(stage)
            await bad_reads(stage)
            await router_refusals(stage)
            await standing_workers(stage)
            await full_pool(stage)
            await lost_workers(stage)
            await odds_and_ends(stage, tmp_path / "held_open")
        finally:
            await stage.close()

    play(script, stage.clock)
    exported = {series.partition("{")[0] for scrape in stage.scrapes for series in scrape.values}
    ends = ("", "_bucket", "_sum", "_count")
    assert {metric.name for metric in CATALOGUE} <= {name.removesuffix(end) for name in exported for end in ends}
    unknown = [name for name in exported if not any(name.removesuffix(end) in BY_NAME for end in ends)]
    assert not unknown, "exported and not in the catalogue"
    assert not stage.unmoved(), "in the catalogue and never moved"
    assert stage.unmoved_values() == NEEDS_OTHER_FAULTS


# ---- vLLM's dashboards -----------------------------------------------------------------------------------------------

RATE, MEAN, QUANTILES, BUCKETS, GAUGE = "rate", "mean", "quantiles", "buckets", "gauge"

PANELS = [
    ("vLLM", "E2E request latency", QUANTILES, "vllm:e2e_request_latency_seconds", ()),
    ("vLLM", "E2E request latency", MEAN, "vllm:e2e_request_latency_seconds", ()),
    ("vLLM", "token throughput", RATE, "vllm:prompt_tokens_total", ()),
    ("vLLM", "token throughput", RATE, "vllm:generation_tokens_total", ()),
    ("vLLM", "inter-token latency", QUANTILES, "vllm:inter_token_latency_seconds", ()),
    ("vLLM", "inter-token latency", MEAN, "vllm:inter_token_latency_seconds", ()),
    ("vLLM", "scheduler state", GAUGE, "vllm:num_requests_running", ()),
    ("vLLM", "scheduler state", GAUGE, "vllm:num_requests_waiting", ()),
    ("vLLM", "time to first token", QUANTILES, "vllm:time_to_first_token_seconds", ()),
    ("vLLM", "time to first token", MEAN, "vllm:time_to_first_token_seconds", ()),
    ("vLLM", "cache utilisation", GAUGE, "vllm:kv_cache_usage_perc", ()),
    ("vLLM", "prompt length", BUCKETS, "vllm:request_prompt_tokens", ()),
    ("vLLM", "generation length", BUCKETS, "vllm:request_generation_tokens", ()),
    ("vLLM", "finish reason", RATE, "vllm:request_success_total", ("finished_reason",)),
    ("vLLM", "queue time", RATE, "vllm:request_queue_time_seconds_sum", ()),
    ("vLLM", "prefill and decode time", RATE, "vllm:request_prefill_time_seconds_sum", ()),
    ("vLLM", "prefill and decode time", RATE, "vllm:request_decode_time_seconds_sum", ()),
    ("vLLM", "longest choice", RATE, "vllm:request_max_num_generation_tokens_sum", ()),
    ("performance statistics", "E2E latency", MEAN, "vllm:e2e_request_latency_seconds", ()),
    ("performance statistics", "E2E latency", QUANTILES, "vllm:e2e_request_latency_seconds", ()),
    ("performance statistics", "first token", MEAN, "vllm:time_to_first_token_seconds", ()),
    ("performance statistics", "first token", QUANTILES, "vllm:time_to_first_token_seconds", ()),
    ("performance statistics", "inter-token latency", MEAN, "vllm:inter_token_latency_seconds", ()),
    ("performance statistics", "inter-token latency", QUANTILES, "vllm:inter_token_latency_seconds", ()),
    ("performance statistics", "tokens per second", RATE, "vllm:generation_tokens_total", ()),
    ("performance statistics", "tokens per second", RATE, "vllm:prompt_tokens_total", ()),
    ("performance statistics", "tokens per second", RATE, "vllm:iteration_tokens_total_count", ()),
    ("query statistics", "successful requests", RATE, "vllm:request_success_total", ()),
    ("query statistics", "latency", QUANTILES, "vllm:e2e_request_latency_seconds", ()),
    ("query statistics", "input sizes", BUCKETS, "vllm:request_prompt_tokens", ()),
    ("query statistics", "input sizes", QUANTILES, "vllm:request_prompt_tokens", ()),
    ("query statistics", "input rate", RATE, "vllm:prompt_tokens_total", ()),
    ("query statistics", "output rate", RATE, "vllm:generation_tokens_total", ()),
]
"""What the dashboards that vLLM ships ask for: dashboard, panel, function, metric, labels it sums by."""


@pytest.fixture(scope="module")
def scraped_twice() -> tuple[Scrape, Scrape]:
    """Before and after 20 requests."""
    stage = ScrapedCluster("decode.max_running=4")
    scrapes: list[Scrape] = []

    async def script() -> None:
        await stage.open()
        try:
            await stage.wait(0.6)
            scrapes.append(stage.scrape())
            for first in range(0, 20, 5):
                many = [stage.begin(prompt(10 + n, n), max_tokens=8 + n) for n in range(first, first + 5)]
                assert all(isinstance(one, Summary) for one in await asyncio.gather(*many))
            await stage.wait(0.6)
            scrapes.append(stage.scrape())
        finally:
            await stage.close()

    play(script, stage.clock)
    return scrapes[0], scrapes[1]


def grown_buckets(first: Scrape, last: Scrape, metric: str) -> dict[float, float]:
    """`sum by (le) (increase(<metric>_bucket[...]))`."""
    buckets: dict[float, float] = {}
    for (_name, labels), value in increase(first, last, f"{metric}_bucket", model_name="standin").items():
        bound = float(dict(labels)["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
    return buckets


@pytest.mark.parametrize(("dashboard", "panel", "function", "metric", "by"), PANELS)
def test_panel_of_vllms_dashboards_has_data_after_20_requests(
    scraped_twice: tuple[Scrape, Scrape], dashboard: str, panel: str, function: str, metric: str, by: tuple[str, ...]
) -> None:
    first, last = scraped_twice
    if function == GAUGE:
        found = last.select(metric, model_name="standin")
        assert found and all({"model_name", "engine"} <= {label for label, _ in labels} for _, labels in found)
    elif function == RATE:
        grown = increase(first, last, metric, model_name="standin")
        assert sum(grown.values()) > 0 and min(grown.values()) >= 0
        assert all(set(by) <= {label for label, _ in labels} for _, labels in grown)
    elif function == MEAN:
        total = sum(increase(first, last, f"{metric}_sum", model_name="standin").values())
        count = sum(increase(first, last, f"{metric}_count", model_name="standin").values())
        assert count > 0 and math.isfinite(total / count)
    else:
        buckets = grown_buckets(first, last, metric)
        counts = [count for _bound, count in sorted(buckets.items())]
        assert math.inf in buckets and counts == sorted(counts) and counts[-1] > 0
        assert all(math.isfinite(quantile(share, buckets)) for share in (0.5, 0.9, 0.95, 0.99))


def test_numbers_of_the_dashboards_are_those_of_the_requests(scraped_twice: tuple[Scrape, Scrape]) -> None:
    first, last = scraped_twice

    def grown(name: str, **labels: str) -> float:
        return sum(increase(first, last, name, **labels).values())

    assert grown("vllm:request_success_total") == grown("vllm:e2e_request_latency_seconds_count") == 20
    assert grown("vllm:request_success_total", finished_reason="length") == 20
    assert grown("vllm:prompt_tokens_total") == grown("vllm:request_prompt_tokens_sum") == sum(range(10, 30))
    assert grown("vllm:generation_tokens_total") == sum(range(8, 28))
    assert grown("vllm:inter_token_latency_seconds_count") == sum(range(8, 28)) - 20
    assert grown("vllm:prompt_tokens_by_source_total") == grown("vllm:prompt_tokens_total")
    assert grown("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") > 0
    phases = sum(grown("pdcluster_phase_seconds_sum", phase=phase) for phase in PHASES)
    assert phases == pytest.approx(grown("pdcluster_e2e_seconds_sum"))
    parts = ("vllm:request_queue_time_seconds_sum", "vllm:request_inference_time_seconds_sum")
    assert sum(grown(name) for name in parts) == pytest.approx(grown("vllm:e2e_request_latency_seconds_sum"))
    granted = grown("pdcluster_leases_granted_total")
    assert granted == grown("pdcluster_leases_released_total") == grown("pdcluster_pulls_total") > 0
    assert grown("pdcluster_step_tokens_count") == grown("pdcluster_steps_total") > 0
    computed = grown("pdcluster_prefill_computed_tokens_total") + grown("pdcluster_decode_prompt_tokens_computed_total")
    assert grown("pdcluster_step_tokens_sum") == computed + grown("vllm:generation_tokens_total") - 20
