"""`pdcluster bench isolation`: what prompts that arrive do to streams that already run.

Some long streams decode while a window without other prompts and one with them pass, in an order that turns from pair
to pair; each pair has new streams. So the same streams, at nearly the same lengths and on the same machine, are seen
both ways. Knows nothing about files or terminals.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import numpy as np

from cluster.bench.client import RequestOptions, ServerClient, open_server
from cluster.bench.load import run_load, run_until
from cluster.bench.record import RequestRecord, StreamReader
from cluster.bench.serve import LineSink
from cluster.bench.summary import Numbers, spread, summarise
from cluster.bench.workload import Prompt, Workload, arrivals_within, make_prompts
from core.clock import Clock
from core.errors import BenchError

STREAM_START_TIMEOUT_S = 300.0
POLL_S = 0.05
CAPACITY_CONCURRENCY = 2
"""Prompts under way while the capacity is measured: one computed, one waiting."""
LEAD_PROMPTS = 2
"""Prompts begin to arrive before a window does, by the time that so many take: it begins in the middle of things."""
_CAPACITY, _WINDOWS = range(2)
"""Rounds of prompts; each window has two, for its prompts and for new streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationOptions:
    """One `bench isolation`."""

    base_url: str
    requests: RequestOptions
    """With an empty model: the first that the server names."""
    num_streams: int = 4
    stream_input_len: int = 64
    stream_output_len: int = 1900
    """Tokens that each stream asks for; it must outlast two windows."""
    prompt_len: int = 1500
    """Of the prompts that disturb; each asks for one token."""
    load: float = 0.6
    """Rate of these prompts, as a share of the capacity measured first."""
    capacity_prompts: int = 8
    window_s: float = 15.0
    num_pairs: int = 3
    """Of an undisturbed and a disturbed window."""
    seed: int = 0
    api_key: str | None = None

    def prompts(self, input_len: int, output_len: int, count: int, round_index: int) -> list[Prompt]:
        workload = Workload(num_prompts=count, input_len=input_len, output_len=output_len, seed=self.seed)
        return make_prompts(workload, round_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One stretch of time, and what the streams did in it."""

    is_disturbed: bool
    gaps_s: Sequence[float]
    """Gaps between tokens of a stream that lie in the window as a whole."""
    records: Sequence[RequestRecord]
    """Of the prompts that were sent."""
    cpu_share: float
    """CPU seconds of this client per second, all of the window's requests included."""

    def describe(self) -> str:
        name = "disturbed" if self.is_disturbed else "undisturbed"
        median_ms = float(np.median(self.gaps_s)) * 1000
        return f"{name}: {len(self.gaps_s)} gaps, median {median_ms:.1f} ms, {len(self.records)} prompts sent"


def gaps_within(token_times_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Gaps between neighbours that both lie in [begin, end]."""
    inside = [time_s for time_s in token_times_s if begin_s <= time_s <= end_s]
    return np.diff(inside).tolist()


async def bench_isolation(options: IsolationOptions, clock: Clock, report: LineSink) -> Numbers:
    """The content of a result file (docs/bench.md). Raises BenchError when a stream or the capacity run fails."""
    async with open_server(options.base_url, clock, options.api_key) as server:
        requests = options.requests
        if not requests.model:
            requests = replace(requests, model=await server.first_model())
        date = datetime.now(UTC)
        capacity = await _capacity(server, requests, options, clock)
        rate, lead_s = capacity * options.load, LEAD_PROMPTS / capacity
        if rate * (lead_s + options.window_s) * options.num_pairs < 1:
            problem = f"no prompt would arrive at {rate:.3g} prompts/s; use longer or more windows"
            raise BenchError(subject=server.base_url, problem=problem)
        report(f"prefill capacity {capacity:.3f} prompts/s; disturbing with {rate:.3f} prompts/s")
        windows: list[Window] = []
        for first in range(0, 2 * options.num_pairs, 2):
            streams = _start_streams(first, server, requests, options)
            try:
                await _wait_for_tokens(streams, clock)
                for index in (first, first + 1):
                    windows.append(await _window(index, rate, lead_s, server, requests, options, streams, clock))
                    report(windows[-1].describe())
            finally:
                for task, _reader in streams:
                    task.cancel()
                await asyncio.gather(*(task for task, _reader in streams), return_exceptions=True)
    return {
        "kind": "isolation",
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "base_url": server.base_url,
        "model_id": requests.model,
        "capacity_prompts_per_s": capacity,
        "disturbing_prompts_per_s": rate,
        **_numbers(windows, options.num_pairs * (lead_s + options.window_s)),
        "config": {k: v for k, v in asdict(options).items() if k not in ("api_key", "requests", "base_url")},
    }


_Stream = tuple["asyncio.Task[RequestRecord]", StreamReader]


async def _capacity(server: ServerClient, requests: RequestOptions, options: IsolationOptions, clock: Clock) -> float:
    """Prompts per second with the server never idle, after one that does not count."""

    async def send(prompt: Prompt, queue_s: float) -> RequestRecord:
        return await server.send(prompt, requests, queue_s=queue_s)

    prompts = options.prompts(options.prompt_len, 1, options.capacity_prompts + 1, _CAPACITY)
    records = [await send(prompts[0], 0.0)]
    result = await run_load(send, prompts[1:], [0.0] * (len(prompts) - 1), CAPACITY_CONCURRENCY, clock)
    for record in [*records, *result.records]:
        if record.failure is not None:
            problem = f"a prompt failed while the capacity was measured ({record.failure}): {record.detail}"
            raise BenchError(subject=server.base_url, problem=problem)
    return len(result.records) / result.duration_s


def _start_streams(
    index: int, server: ServerClient, requests: RequestOptions, options: IsolationOptions
) -> list[_Stream]:
    lengths = options.stream_input_len, options.stream_output_len
    prompts = options.prompts(*lengths, options.num_streams, _WINDOWS + 2 * index + 1)
    readers = [StreamReader(requests.has_token_ids) for _ in prompts]
    return [
        (asyncio.ensure_future(server.send(prompt, requests, reader=reader)), reader)
        for prompt, reader in zip(prompts, readers, strict=True)
    ]


async def _wait_for_tokens(streams: Sequence[_Stream], clock: Clock) -> None:
    deadline_s = clock.now() + STREAM_START_TIMEOUT_S
    while any(len(reader.token_times_s) < 2 for _, reader in streams):
        _require_running(streams)
        if clock.now() > deadline_s:
            raise BenchError(subject="the streams", problem=f"not all had tokens within {STREAM_START_TIMEOUT_S:g} s")
        await clock.sleep(POLL_S)


def _require_running(streams: Sequence[_Stream]) -> None:
    for task, reader in streams:
        if task.done():
            record = task.result()
            why = f"{record.failure}: {record.detail}" if record.failure else "it reached its number of tokens"
            problem = (
                f"ended after {len(reader.token_times_s)} chunks, before the measurement did ({why}); "
                "use shorter or fewer windows, or longer outputs"
            )
            raise BenchError(subject="a stream", problem=problem)


async def _window(
    index: int,
    rate: float,
    lead_s: float,
    server: ServerClient,
    requests: RequestOptions,
    options: IsolationOptions,
    streams: Sequence[_Stream],
    clock: Clock,
) -> Window:
    async def send(prompt: Prompt, queue_s: float) -> RequestRecord:
        return await server.send(prompt, requests, queue_s=queue_s)

    is_disturbed = index % 4 in (1, 2)
    lead_s = lead_s if is_disturbed else 0.0
    offsets_s = arrivals_within(rate, lead_s + options.window_s, options.seed, index // 2) if is_disturbed else []
    prompts = options.prompts(options.prompt_len, 1, len(offsets_s), _WINDOWS + 2 * index) if offsets_s else []
    begin_s, cpu_s = clock.now() + lead_s, time.process_time()
    end_s = begin_s + options.window_s
    records = await run_until(send, prompts, offsets_s, end_s, clock)
    _require_running(streams)
    gaps = [gap for _, reader in streams for gap in gaps_within(reader.token_times_s, begin_s, end_s)]
    cpu_share = (time.process_time() - cpu_s) / (clock.now() - begin_s + lead_s)
    if not gaps:
        raise BenchError(subject="the streams", problem=f"no two tokens in a window of {options.window_s:g} s")
    return Window(is_disturbed=is_disturbed, gaps_s=gaps, records=records, cpu_share=cpu_share)


def _numbers(windows: Sequence[Window], seconds: float) -> Numbers:
    """`seconds`: for which prompts arrived."""
    parts: Numbers = {}
    for name, is_disturbed in (("undisturbed", False), ("disturbed", True)):
        chosen = [window for window in windows if window.is_disturbed == is_disturbed]
        gaps = [gap for window in chosen for gap in window.gaps_s]
        shares = [window.cpu_share for window in chosen]
        spent = {"num_gaps": len(gaps), "client_cpu_share": float(np.mean(shares))}
        parts[name] = spent | spread("itl", gaps, (50, 90, 99))
    records = [record for window in windows for record in window.records]
    return {
        **parts,
        "median_itl_ratio": parts["disturbed"]["median_itl_ms"] / parts["undisturbed"]["median_itl_ms"],
        "p99_itl_ratio": parts["disturbed"]["p99_itl_ms"] / parts["undisturbed"]["p99_itl_ms"],
        "prompts": summarise(records, seconds),
        "windows": [
            {"is_disturbed": w.is_disturbed, "prompts_sent": len(w.records), **spread("itl", w.gaps_s, (50, 99))}
            for w in windows
        ],
    }


def run_bench_isolation(options: IsolationOptions, clock: Clock, report: LineSink) -> Numbers:
    """`bench_isolation` from a thread without a loop."""
    return asyncio.run(bench_isolation(options, clock, report))
