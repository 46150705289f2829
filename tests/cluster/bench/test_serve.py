"""Whole runs over real sockets: warm-up, concurrency, rounds of two servers, and failures in the result."""

from pathlib import Path
from typing import Any

import pytest

from cluster.bench.client import RequestOptions
from cluster.bench.isolation import IsolationOptions, gaps_within, run_bench_isolation
from cluster.bench.results import read_result, write_result
from cluster.bench.serve import ServeOptions, num_failed, run_bench_serve
from cluster.bench.summary import Numbers, Objectives
from cluster.bench.workload import Workload
from core.clock import SystemClock
from core.errors import BenchError
from tests.cluster.bench.fake_server import Body, FakeAnswer, FakeServer, plain_answer, serving

pytestmark = pytest.mark.process

WORKLOAD = Workload(num_prompts=6, input_len=8, output_len=4, seed=9)


def run(*servers: FakeServer, **more: Any) -> Numbers:
    lines: list[str] = []
    with serving(*servers):
        options = {"requests": RequestOptions(model=""), "workload": WORKLOAD, **more}
        options["base_urls"] = tuple(server.url for server in servers)
        result = run_bench_serve(ServeOptions(**options), SystemClock(), lines.append)
    assert len(lines) == more.get("rounds", 1) * len(servers)
    return result


def test_result_has_the_key_names_of_vllm_when_one_server_is_measured() -> None:
    server = FakeServer(lambda body: plain_answer(body, 0.01, 0.01))
    result = run(server, max_concurrency=2, num_warmups=3, objectives=Objectives(limits_ms={"ttft": 1e6}))
    vllm = {
        "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration",
        "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
        "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
        *(f"{stat}_{name}_ms" for stat in ("mean", "median", "std", "p50", "p90", "p99")
          for name in ("ttft", "tpot", "itl", "e2el")),
    }  # fmt: skip
    assert vllm <= result.keys()
    assert (result["completed"], result["failed"], result["model_id"]) == (6, 0, "fake")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (48, 24)
    assert result["request_goodput"] == result["request_throughput"] and result["slo_attainment"] == 1.0
    assert result["median_itl_ms"] >= 8 and result["client_cpu_seconds"] > 0
    assert server.num_open_max == 2
    assert len(server.bodies) == 9
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert not set(prompts[:3]) & set(prompts[3:]), "a warm-up fills no cache with a measured prompt"


def test_every_key_of_a_result_is_documented() -> None:
    result = run(FakeServer(plain_answer), has_details=True, objectives=Objectives(limits_ms={"ttft": 1e6}))
    documented = (Path(__file__).parents[3] / "docs" / "bench.md").read_text(encoding="utf-8")
    latencies = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
    assert all(f"`*_{name}_ms`" in documented for name in latencies)
    others = {key for key in result if not any(name in key for name in latencies) or key in ("ttfts", "itls")}
    assert not {key for key in others if f"`{key}`" not in documented}


def test_failures_are_counted_by_reason_and_speed_is_of_the_rest() -> None:
    count = iter(range(100))

    def script(body: Body) -> FakeAnswer:
        number = next(count)
        if number < 2:
            return FakeAnswer(pieces=[], status=503)
        whole = plain_answer(body)
        return FakeAnswer(pieces=whole.pieces[:2]) if number == 2 else whole

    result = run(FakeServer(script), has_details=True)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (3, 3, 12)
    assert result["failures_by_reason"] == {"http_status": 2, "truncated": 1}
    assert [value is None for value in result["ttfts"]] == [error != "" for error in result["errors"]]
    assert num_failed(result) == 3


def test_two_servers_get_the_same_prompts_in_alternating_order() -> None:
    order: list[str] = []
    slow = FakeServer(lambda body: plain_answer(body, 0.1, 0.03), lambda: order.append("slow"))
    fast = FakeServer(lambda body: plain_answer(body, 0.01, 0.01), lambda: order.append("fast"))
    result = run(slow, fast, rounds=3)
    assert order == ["slow"] * 6 + ["fast"] * 12 + ["slow"] * 12 + ["fast"] * 6
    prompts = {}
    for server in (slow, fast):
        found = [tuple(body["prompt"]) for body in server.bodies]
        prompts[server.url] = [set(found[i : i + 6]) for i in (0, 6, 12)]
        assert len(set(found)) == 18, "no round repeats a prompt"
    assert prompts[slow.url] == prompts[fast.url]
    assert [one["order"] for one in result["rounds"]] == [[0, 1], [1, 0], [0, 1]]
    assert result["median_ratios"]["output_throughput"] > 1.2
    assert result["median_ratios"]["median_ttft_ms"] < 0.9
    assert num_failed(result) == 0


def test_nothing_is_measured_when_a_warm_up_fails() -> None:
    server = FakeServer(lambda body: FakeAnswer(pieces=[], status=400))
    with serving(server), pytest.raises(BenchError, match=r"warm-up request failed \(http_status\): 400"):
        options = ServeOptions(
            base_urls=(server.url,), requests=RequestOptions(model="m"), workload=WORKLOAD, num_warmups=1
        )
        run_bench_serve(options, SystemClock(), lambda line: None)
    assert len(server.bodies) == 1


def test_result_survives_a_file(tmp_path: Path) -> None:
    result = run(FakeServer(plain_answer), rounds=2)
    path = tmp_path / "a.json"
    write_result(path, result)
    assert read_result(path) == result
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_gaps_lie_wholly_in_the_window() -> None:
    assert gaps_within([0.5, 1.0, 2.0, 4.0, 4.5], 1.0, 4.0) == [1.0, 2.0]
    assert gaps_within([0.5, 4.5], 1.0, 4.0) == []


class Disturbed:
    """Streams of one-token chunks; while a prompt that asks for one token is computed, their gaps are long."""

    def __init__(self, stream_len: int = 4000) -> None:
        self.server = FakeServer(self._answer, self._count)
        self._num_asked = 0
        self._stream_len = stream_len

    def _count(self) -> None:
        self._num_asked += 1

    def _answer(self, body: Body) -> FakeAnswer:
        if body["max_tokens"] == 1:
            return plain_answer(body, 0.02)
        return plain_answer({**body, "max_tokens": self._stream_len}, 0.0, 0.002)


def isolation_options(url: str, **more: Any) -> IsolationOptions:
    return IsolationOptions(
        base_url=url, requests=RequestOptions(model=""), num_streams=2, prompt_len=30, capacity_prompts=4,
        window_s=0.4, num_pairs=2, **more,
    )  # fmt: skip


def test_isolation_alternates_windows_and_sends_prompts_in_every_second_one_to_new_streams() -> None:
    stage = Disturbed()
    lines: list[str] = []
    with serving(stage.server):
        result = run_bench_isolation(isolation_options(stage.server.url), SystemClock(), lines.append)
    assert [window["is_disturbed"] for window in result["windows"]] == [False, True, True, False]
    sent = [window["prompts_sent"] for window in result["windows"]]
    assert sent[0] == sent[3] == 0 and sent[1] > 0 and sent[2] > 0
    assert 0 < result["capacity_prompts_per_s"] <= 100
    assert result["disturbing_prompts_per_s"] == pytest.approx(0.6 * result["capacity_prompts_per_s"])
    assert result["prompts"]["completed"] == sum(sent)
    assert result["undisturbed"]["num_gaps"] > 100 and result["disturbed"]["num_gaps"] > 100
    assert result["median_itl_ratio"] == pytest.approx(
        result["disturbed"]["median_itl_ms"] / result["undisturbed"]["median_itl_ms"]
    )
    assert len(lines) == 5
    lengths = {(len(body["prompt"]), body["max_tokens"]) for body in stage.server.bodies}
    assert lengths == {(30, 1), (64, 1900)}
    prompts = [tuple(body["prompt"]) for body in stage.server.bodies]
    assert len(set(prompts)) == len(prompts), "no prompt is sent twice"
    assert sum(len(prompt) == 64 for prompt in prompts) == 2 * 2


def test_isolation_refuses_to_speak_when_no_prompt_would_arrive() -> None:
    stage = Disturbed()
    with serving(stage.server), pytest.raises(BenchError, match=r"no prompt would arrive at .*longer or more windows"):
        run_bench_isolation(isolation_options(stage.server.url, load=1e-6), SystemClock(), lambda line: None)


def test_isolation_refuses_to_speak_when_a_stream_ends_early() -> None:
    stage = Disturbed(stream_len=20)
    with serving(stage.server), pytest.raises(BenchError, match=r"a stream: ended after 20 chunks.*wrong_count"):
        run_bench_isolation(isolation_options(stage.server.url), SystemClock(), lambda line: None)
