"""`pdcluster bench serve`: one server measured, or two in alternation with the same prompts.

Decides nothing about how requests are sent or counted. Knows nothing about files or terminals.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from cluster.bench.client import RequestOptions, ServerClient, open_server, rate_text
from cluster.bench.load import LoadResult, run_load
from cluster.bench.record import RequestRecord
from cluster.bench.summary import Numbers, Objectives, details, median_ratios, ratios, summarise
from cluster.bench.workload import Prompt, Workload, arrival_offsets, make_prompts, make_warm_ups
from core.clock import Clock
from core.errors import BenchError

LineSink = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """One `bench serve`."""

    base_urls: tuple[str, ...]
    """One, or two to compare."""
    requests: RequestOptions
    """With an empty model: the first that the server names."""
    workload: Workload
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    rounds: int = 1
    objectives: Objectives | None = None
    percentiles: tuple[float, ...] = (50, 90, 99)
    has_details: bool = False
    api_key: str | None = None


async def bench_serve(options: ServeOptions, clock: Clock, report: LineSink) -> Numbers:
    """The content of a result file (docs/bench.md). Raises BenchError when a server cannot be measured at all."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(open_server(url, clock, options.api_key)) for url in options.base_urls
        ]
        requests = [await _resolve(server, options.requests) for server in servers]
        for server, chosen in zip(servers, requests, strict=True):
            await _warm_up(server, chosen, options, clock)
        rounds = []
        for index in range(options.rounds):
            measured: dict[int, Numbers] = {}
            order = range(len(servers)) if index % 2 == 0 else reversed(range(len(servers)))
            for place in order:
                measured[place] = await _measure(servers[place], requests[place], options, index, clock)
                report(f"round {index + 1}: {servers[place].base_url}: {one_line(measured[place])}")
            rounds.append([measured[place] for place in range(len(servers))])
    if len(rounds) == 1 and len(rounds[0]) == 1:
        return rounds[0][0]
    return _compare(rounds, options)


def one_line(numbers: Mapping[str, Any]) -> str:
    """What matters most of one run."""
    return (
        f"{numbers['completed']} completed, {numbers['failed']} failed in {numbers['duration']:.1f} s; "
        f"{numbers['output_throughput']:.1f} output tokens/s, median TTFT {_ms(numbers['median_ttft_ms'])}, "
        f"TPOT {_ms(numbers['median_tpot_ms'])}, ITL {_ms(numbers['median_itl_ms'])}"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def num_failed(result: Mapping[str, Any]) -> int:
    """Failed requests of a result of `bench_serve`, over all its rounds and servers."""
    if result["kind"] == "serve":
        return int(result["failed"])
    return sum(int(run["failed"]) for one in result["rounds"] for run in one["runs"])


async def _resolve(server: ServerClient, requests: RequestOptions) -> RequestOptions:
    return requests if requests.model else replace(requests, model=await server.first_model())


async def _warm_up(server: ServerClient, requests: RequestOptions, options: ServeOptions, clock: Clock) -> None:
    """Requests that do not count. Raises BenchError when one fails: nothing after it would mean anything."""
    prompts = make_warm_ups(options.workload, options.num_warmups)
    result = await _send_all(server, requests, prompts, [0.0] * len(prompts), options.max_concurrency, clock)
    for record in result.records:
        if record.failure is not None:
            problem = f"a warm-up request failed ({record.failure}): {record.detail}"
            raise BenchError(subject=server.base_url, problem=problem)


async def _send_all(
    server: ServerClient,
    requests: RequestOptions,
    prompts: Sequence[Prompt],
    offsets_s: Sequence[float],
    max_concurrency: int | None,
    clock: Clock,
) -> LoadResult:
    async def send(prompt: Prompt, queue_s: float) -> RequestRecord:
        return await server.send(prompt, requests, queue_s=queue_s)

    return await run_load(send, prompts, offsets_s, max_concurrency, clock)


async def _measure(
    server: ServerClient, requests: RequestOptions, options: ServeOptions, round_index: int, clock: Clock
) -> Numbers:
    workload = options.workload
    prompts = make_prompts(workload, round_index)
    offsets_s = arrival_offsets(len(prompts), options.request_rate, options.burstiness, workload.seed, round_index)
    date, cpu_s = datetime.now(UTC), time.process_time()
    result = await _send_all(server, requests, prompts, offsets_s, options.max_concurrency, clock)
    cpu_s = time.process_time() - cpu_s
    numbers = summarise(result.records, result.duration_s, options.objectives, options.percentiles)
    return {
        "kind": "serve",
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai" if requests.endpoint == "/v1/completions" else "openai-chat",
        "base_url": server.base_url,
        "model_id": requests.model,
        "num_prompts": len(prompts),
        "request_rate": rate_text(options.request_rate),
        "burstiness": rate_text(options.burstiness),
        "max_concurrency": options.max_concurrency,
        **numbers,
        "client_cpu_seconds": cpu_s,
        "client_cpu_share": cpu_s / result.duration_s,
        "max_send_delay_ms": result.lateness_s * 1000,
        "goodput_slos_ms": dict(options.objectives.limits_ms) if options.objectives else None,
        "round": round_index,
        "config": _config(options, requests),
        **(details(result.records) if options.has_details else {}),
    }


def _config(options: ServeOptions, requests: RequestOptions) -> Numbers:
    """Everything that repeats the run; no key."""
    return {
        "endpoint": requests.endpoint,
        "ignore_eos": requests.ignore_eos,
        "check_ids": requests.has_token_ids,
        "extra_body": dict(requests.extra_body),
        "timeout_s": requests.timeout_s,
        "num_warmups": options.num_warmups,
        "rounds": options.rounds,
        "workload": asdict(options.workload),
    }


def _compare(rounds: Sequence[Sequence[Numbers]], options: ServeOptions) -> Numbers:
    """Rounds of one server, or of two with the second over the first."""
    is_pair = len(options.base_urls) == 2
    found = [ratios(first, second) for first, second in rounds] if is_pair else []
    return {
        "kind": "serve-rounds",
        "date": rounds[0][0]["date"],
        "base_urls": list(options.base_urls),
        "rounds": [
            {
                "round": index,
                "order": [0, 1][: len(runs)] if index % 2 == 0 else [1, 0][-len(runs) :],
                "runs": list(runs),
                "ratios": found[index] if is_pair else None,
            }
            for index, runs in enumerate(rounds)
        ],
        "median_ratios": median_ratios(found) if is_pair else None,
    }


def run_bench_serve(options: ServeOptions, clock: Clock, report: LineSink) -> Numbers:
    """`bench_serve` from a thread without a loop."""
    return asyncio.run(bench_serve(options, clock, report))
