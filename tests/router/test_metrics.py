"""Rendering of the catalogue: every router metric exists, every known worker counter is shown."""

from core.ids import Epoch, WorkerId
from core.messages import KvUsage, WorkerStatus
from core.metrics import ROUTER_METRICS, WORKER_METRICS
from router.generation import Timing
from router.metrics import RouterMetrics


def status() -> WorkerStatus:
    return WorkerStatus(
        worker=WorkerId("decode-0"),
        role="decode",
        epoch=Epoch(1),
        state="ready",
        num_waiting=1,
        num_running=2,
        num_leases=3,
        num_pins=4,
        kv=KvUsage(blocks_total=10, blocks_free=5, blocks_cached=3, blocks_used=2),
        counters={metric.name: 1.0 for metric in WORKER_METRICS if metric.kind == "counter"} | {"unknown_total": 1.0},
    )


def test_every_metric_of_the_catalogue_is_rendered_and_nothing_else() -> None:
    metrics = RouterMetrics("m", lambda: [status()])
    metrics.attempt()
    metrics.first_token(10)
    metrics.tokens(3, 0.1)
    metrics.ended("finished")
    timing = Timing(queue_s=0.1, prefill_s=0.1, transfer_s=0.1, ttft_s=0.3, tpot_s=0.1, total_s=0.5)
    metrics.finished(timing, num_prompt=10, num_cached=0, num_output=3, reasons=["stop"])
    text = metrics.render(num_in_flight=1, num_queued_prompt_tokens=2, num_waiting=3, num_running=4).decode()
    samples = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    for metric in (*ROUTER_METRICS, *WORKER_METRICS):
        assert (f"{metric.name}_count" if metric.kind == "histogram" else metric.name) in samples, metric.name
    assert "unknown_total" not in text
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.2' in text
