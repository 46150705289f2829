"""`pdcluster simulate --config FILE --trace TRACE`: what is read, what is printed.

Knows nothing about how a trace is served.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cluster.bench.summary import Numbers, Objectives
    from cluster.sim.model import StepCost
    from cluster.sim.trace import Trace

BYTES_PER_GB = 1e9
SYNTHETIC_KEYS = {
    "requests": "100",
    "rate": "1",
    "prompt": "512",
    "output": "64",
    "arrivals": "poisson",
    "prefixes": "0",
    "prefix": "0",
}
"""What may be stated, with its default."""
TRACE_VOCABULARY = 32_000
"""Of the prompts that stand for a trace's."""


@dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """What the command line says."""

    config: Path
    overrides: tuple[str, ...]
    trace: Path | None
    synthetic: str | None
    profile: Path
    speed: float
    num_requests: int | None
    kv_bytes_per_token: int
    read_gb_per_s: float
    link_ms: float
    cores: float
    step_overhead_ms: float
    max_output_tokens: int | None
    seed: int
    is_verified: bool
    objectives: "Objectives | None"
    percentiles: tuple[float, ...]


def run_replay(flags: ReplayFlags, result: Path | None, as_json: bool) -> None:
    """Serve the trace and print the numbers. Raises what reading and serving raise."""
    from cluster.bench.results import write_result
    from cluster.sim.profile import StepProfile
    from cluster.sim.replay import ReplayOptions, replay
    from core.config import load_config

    config = load_config(flags.config, flags.overrides)
    options = ReplayOptions(
        cost=_with_overhead(StepProfile.read(flags.profile).of_plan, flags.step_overhead_ms / 1000),
        kv_bytes_per_token=flags.kv_bytes_per_token,
        read_bytes_per_s=flags.read_gb_per_s * BYTES_PER_GB,
        link_delay_s=flags.link_ms / 1000,
        num_cores=flags.cores,
        max_output_tokens=flags.max_output_tokens,
        vocab_size=TRACE_VOCABULARY,
        seed=flags.seed,
        is_verified=flags.is_verified,
        objectives=flags.objectives,
        percentiles=flags.percentiles,
    )
    numbers = replay(config, _trace(flags), options)
    if result is not None:
        write_result(result, numbers)
    click.echo(json.dumps(numbers) if as_json else "\n".join(_lines(numbers)))


def _with_overhead(cost: "StepCost", overhead_s: float) -> "StepCost":
    return lambda plan: cost(plan) + overhead_s


def _trace(flags: ReplayFlags) -> "Trace":
    from cluster.sim.trace import read_trace, scaled

    trace = make_synthetic(flags.synthetic, flags.seed) if flags.trace is None else read_trace(flags.trace)
    if flags.speed == 1.0 and flags.num_requests is None:
        return trace
    return scaled(trace, rate=flags.speed, num_requests=flags.num_requests, seed=flags.seed)


def make_synthetic(text: str | None, seed: int) -> "Trace":
    """The arrivals that `requests=N,rate=R,prompt=N|N-N,output=N|N-N,arrivals=poisson|even,prefixes=N,prefix=N` states.
    Raises click.BadParameter.
    """
    from cluster.sim.synthetic import synthetic

    given = dict(part.strip().partition("=")[::2] for part in (text or "").split(","))
    if unknown := sorted(given.keys() - SYNTHETIC_KEYS):
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(SYNTHETIC_KEYS)}", param_hint="--synthetic")
    stated = SYNTHETIC_KEYS | given
    arrivals = stated["arrivals"]
    if arrivals not in ("poisson", "even"):
        raise click.BadParameter(f"arrivals={arrivals} is neither poisson nor even", param_hint="--synthetic")
    try:
        return synthetic(
            num_requests=int(stated["requests"]),
            rate=float(stated["rate"]),
            seed=seed,
            prompt_len=_range(stated["prompt"]),
            output_len=_range(stated["output"]),
            arrivals="even" if arrivals == "even" else "poisson",
            num_prefixes=int(stated["prefixes"]),
            prefix_len=int(stated["prefix"]),
        )
    except ValueError as error:
        raise click.BadParameter(f"{text}: {error}", param_hint="--synthetic") from error


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _lines(numbers: "Numbers") -> list[str]:
    lines = [
        f"{numbers['trace']}: {numbers['completed']} requests, {numbers['failed']} failed, {numbers['duration']:.1f} s",
        f"{numbers['request_throughput']:.3f} requests/s, {numbers['output_throughput']:.1f} output tokens/s",
    ]
    if numbers["request_goodput"] is not None:
        attained = numbers["slo_attainment"]
        lines.append(f"goodput {numbers['request_goodput']:.3f} requests/s, {attained:.3f} of all met the objectives")
    for name in ("ttft", "tpot", "e2el"):
        lines.append(f"{name:5} ms: {', '.join(_spread(numbers, name))}")
    rates = {name: rate for name, rate in numbers["hit_rates"].items() if rate is not None}
    lines.append("hit rates: " + ", ".join(f"{name} {rate:.4f}" for name, rate in rates.items()))
    for worker, load in numbers["workers"].items():
        lines.append(
            f"{worker:12} busy {load['utilisation']:.3f}, waiting {load['mean_waiting']:.2f} (at most "
            f"{load['max_waiting']}), running {load['mean_running']:.2f}, preemptions {load['num_preemptions']:.0f}"
        )
    lines += [f"failed: {count} {reason}" for reason, count in numbers["failures_by_reason"].items()]
    return lines + [f"  {detail}" for detail in numbers["failure_details"]]


def _spread(numbers: "Numbers", name: str) -> list[str]:
    keys = [key for key in ("mean", "p50", "p90", "p99") if numbers.get(f"{key}_{name}_ms") is not None]
    return [f"{key} {numbers[f'{key}_{name}_ms']:.1f}" for key in keys] or ["none"]
