"""A trace served in virtual time: every request is answered at its time, hits are those of a plain cache."""

import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from cluster.cli import main
from cluster.sim.model import StepCost
from cluster.sim.replay import ReplayOptions, replay
from cluster.sim.trace import Trace, read_trace
from core.config import ClusterConfig, parse_config
from core.errors import SimulationError
from core.messages import TokenUpdate
from engine.kv.pool import BlockPool
from router.run import Run
from tests.cluster.sim.traces import MOONCAKE, trace_of

CONFIG = """
schema_version: 1
name: replayed
model: {path: letters}
kv: {block_size: 4, device_blocks: 64}
transfer: {transport: memory}
"""
PROFILE = {
    "kind": "stated",
    "weight_bytes": 1e9,
    "kv_bytes_per_token": 1000,
    "flops_per_token": 1e9,
    "memory_gb_per_s": 100,
    "tflop_per_s": 1,
    "overhead_s": 0.001,
}


def options(cost: StepCost, **changes: object) -> ReplayOptions:
    stated = {
        "cost": cost,
        "kv_bytes_per_token": 8,
        "read_bytes_per_s": 1e9,
        "link_delay_s": 0.001,
        "num_cores": float("inf"),
        "max_output_tokens": None,
        "vocab_size": 97,
        "seed": 1,
        "is_verified": True,
        "objectives": None,
        "percentiles": (50,),
        **changes,
    }
    return ReplayOptions(**stated)  # type: ignore[arg-type]


def config_with(*overrides: str) -> ClusterConfig:
    return parse_config(CONFIG, file="replayed.yaml", overrides=overrides)


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_requests_are_answered_rightly_at_the_times_that_steps_take(mode: str) -> None:
    """Three prompts far apart, the third a repetition; a step takes 0.5 s."""
    trace = trace_of((0.0, 10, 3, (1, 2, 3)), (100.0, 10, 1, (4, 5, 6)), (200.0, 10, 3, (1, 2, 3)))
    numbers = replay(config_with(f"mode={mode}"), trace, options(lambda plan: 0.5))
    assert (numbers["completed"], numbers["failed"], numbers["total_output_tokens"]) == (3, 0, 7)
    assert numbers["median_tpot_ms"] == pytest.approx(500.0)
    num_steps = 2 if mode == "disaggregated" else 1
    assert numbers["p50_ttft_ms"] == pytest.approx(500.0 * num_steps, rel=0.02)
    assert numbers["hit_rates"] == {"device_tokens": 8 / 30, "device_blocks": 2 / 9}
    decode = numbers["workers"]["decode-0"]
    assert decode["utilisation"] == pytest.approx(7 * 0.5 / numbers["duration"], rel=0.01)
    assert decode["max_waiting"] == 0


def test_steps_take_longer_when_workers_share_a_core() -> None:
    """Two decode workers that are both busy; with one core each step takes twice as long."""
    trace = trace_of((0.0, 3, 40, ()), (0.0, 3, 40, ()), block_size=None)
    config = config_with("mode=colocated", "decode.workers=2")
    alone = replay(config, trace, options(lambda plan: 0.1))
    shared = replay(config, trace, options(lambda plan: 0.1, num_cores=1.0))
    assert shared["median_tpot_ms"] == pytest.approx(2 * alone["median_tpot_ms"], rel=0.05)


def _lru_hit_rate(trace: Trace, num_blocks: int) -> float:
    """Leading full blocks found, over all blocks; a plain cache of block ids that a request touches in order."""
    assert trace.block_size is not None
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = num_all = 0
    for request in trace.requests:
        full = request.blocks[: (request.num_prompt_tokens - 1) // trace.block_size]
        num_all += len(request.blocks)
        for hit in full:
            if hit not in cache:
                break
            num_hits += 1
        for block in reversed(full):  # tails are evicted before heads
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_hits / num_all


@pytest.mark.parametrize("num_blocks", [300, 3000])
def test_hit_rate_is_that_of_a_plain_cache(num_blocks: int) -> None:
    whole = read_trace(MOONCAKE)
    trace = Trace(name="head", block_size=whole.block_size, requests=whole.requests[:80])
    overrides = [
        "mode=colocated", "kv.block_size=512", f"kv.device_blocks={num_blocks}", "decode.max_batched_tokens=200000",
        "router.max_queued_prompt_tokens=100000000",
    ]  # fmt: skip
    settings = options(lambda plan: 0.0, max_output_tokens=1, is_verified=False)
    numbers = replay(config_with(*overrides), trace, settings)
    assert numbers["completed"] == 80
    assert numbers["hit_rates"]["device_blocks"] == pytest.approx(_lru_hit_rate(trace, num_blocks), abs=0.005)


def test_pool_of_unknown_size_is_refused() -> None:
    config = parse_config(
        "{schema_version: 1, name: a, model: {path: m}, kv: {device_gib: 1}}", file="a.yaml", overrides=[]
    )
    with pytest.raises(SimulationError, match=r"--set kv.device_blocks=N"):
        replay(config, trace_of((0.0, 3, 1, ())), options(lambda plan: 0.0))


def test_numbers_are_printed_and_written(tmp_path: Path) -> None:
    config, profile, result = tmp_path / "c.yaml", tmp_path / "p.json", tmp_path / "r.json"
    config.write_text(CONFIG)
    profile.write_text(json.dumps(PROFILE))
    arguments = ["simulate", "--config", str(config), "--synthetic", "requests=20,rate=2,prompt=10-40,output=4"]
    arguments += ["--profile", str(profile), "--goodput", "ttft:5000", "--verify", "--result", str(result)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    numbers = json.loads(result.read_text())
    assert numbers["kind"] == "simulated" and numbers["completed"] == 20 and numbers["slo_attainment"] == 1.0
    assert f"ttft  ms: mean {numbers['mean_ttft_ms']:.1f}" in done.output
    again = CliRunner().invoke(main, [*arguments[:-2], "--json"])
    assert json.loads(again.output) == numbers


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--trace", str(MOONCAKE)], "--config is needed"),
        (["--scenario", "chaos", "--trace", str(MOONCAKE)], "give one of --scenario"),
        (["--synthetic", "requests=20,speed=2"], "'speed' is none of requests, rate"),
        (["--synthetic", "requests=many"], "requests=many: invalid literal"),
        (["--synthetic", "arrivals=odd"], "arrivals=odd is neither poisson nor even"),
    ],
)
def test_command_line_that_does_not_fit_is_refused(arguments: list[str], problem: str, tmp_path: Path) -> None:
    config, profile = tmp_path / "c.yaml", tmp_path / "p.json"
    config.write_text(CONFIG)
    profile.write_text(json.dumps(PROFILE))
    given = [] if "--trace" in arguments else ["--config", str(config), "--profile", str(profile)]
    done = CliRunner().invoke(main, ["simulate", *arguments, *given])
    assert done.exit_code == 2 and problem in done.output, done.output


@pytest.mark.parametrize("last_s", [0.0, 500.0])
def test_wrong_answer_ends_the_run_whenever_it_comes(monkeypatch: pytest.MonkeyPatch, last_s: float) -> None:
    """Planted: the router loses a token of each answer. Later requests do not hide what an early one showed."""
    deliver = Run.deliver

    def lose(self: Run, updates: Iterable[TokenUpdate]) -> list[int]:
        return deliver(self, [replace(update, token_ids=update.token_ids[:0]) for update in updates])

    monkeypatch.setattr(Run, "deliver", lose)
    trace = trace_of((0.0, 10, 3, (1, 2, 3)), (last_s, 10, 3, (4, 5, 6)))
    with pytest.raises(SimulationError, match="request 0 is answered with"):
        replay(config_with(), trace, options(lambda plan: 0.01))


def test_broken_invariant_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what a request held is never given back to its worker."""
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: None)
    trace = trace_of((0.0, 10, 1, (1, 2, 3)), (200.0, 10, 1, (4, 5, 6)))
    with pytest.raises(SimulationError, match="KV-1"):
        replay(config_with(), trace, options(lambda plan: 0.01))
