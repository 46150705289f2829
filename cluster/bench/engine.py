"""`pdcluster bench engine`: the step profile of this machine and model, and served streams beside bare products.

What needs torch is measured by `engine.measure`; here are the parts of other packages and the facts that identify a
run. Knows nothing about files or terminals.
"""

import asyncio
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from cluster.bench.client import RequestOptions, ServerClient, open_server
from cluster.bench.isolation import gaps_within
from cluster.bench.load import run_load
from cluster.bench.record import RequestRecord
from cluster.bench.serve import LineSink
from cluster.bench.summary import Numbers
from cluster.bench.workload import Prompt, Workload, make_prompts
from core.clock import Clock
from core.errors import BenchError
from core.ids import BlockId
from core.layout import KvDtype
from engine.measure import BareModel, EngineGrid, measure_engine
from kvtransfer.integrity import BlockDigester

CPU_INFO = Path("/proc/cpuinfo")
DIGEST_BLOCK_BYTES = 737_280
DIGEST_BLOCKS = 64
SERVED_OUTPUT_LEN = 48
SERVED_OUTPUT_FACTOR = 4
"""Several streams ask for so many times the tokens, so that all of them decode together for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOptions:
    """Streams of a running cluster, compared with bare products of its model."""

    base_url: str
    path: Path
    """Of the model's directory."""
    dtype: KvDtype
    """Of the bare products."""
    threads: int
    streams: tuple[int, ...] = (1, 16)
    context: int = 512
    rounds: int = 3
    seed: int = 0
    api_key: str | None = None


def bench_engine(grid: EngineGrid, clock: Clock, report: LineSink) -> Numbers:
    """The content of a result file (docs/bench.md). Raises ModelLoadError or NumericsError."""
    date = datetime.now(UTC)
    digest = digest_bandwidth(clock)
    numbers = measure_engine(grid, report)
    report(
        f"memory: read {numbers['read_gb_per_s']:.1f}, copy {numbers['copy_gb_per_s']:.1f}, "
        f"digest {digest:.2f} GB/s; "
        + ", ".join(f"{p['dtype']} {p['rows']} rows {p['gflop_per_s']:.0f} GFLOP/s" for p in numbers["products"])
    )
    return {
        "kind": "engine",
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "processor": processor_name(),
        **numbers,
        "digest_gb_per_s": digest,
        "config": {**asdict(grid), "path": str(grid.path)},
    }


def digest_bandwidth(clock: Clock, repeats: int = 3) -> float:
    """GB/s (10^9) of digesting KV blocks on one thread, the best of `repeats`."""
    memory = np.random.default_rng(0).integers(0, 256, DIGEST_BLOCKS * DIGEST_BLOCK_BYTES, dtype=np.uint8)
    digester, blocks = BlockDigester(memory.data, DIGEST_BLOCK_BYTES), [BlockId(i) for i in range(DIGEST_BLOCKS)]
    seconds = []
    for _ in range(repeats):
        begun_s = clock.now()
        digester.digest(blocks)
        seconds.append(clock.now() - begun_s)
    return memory.nbytes / min(seconds) / 1e9


def processor_name() -> str:
    """As Linux names it, else as Python does."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


async def bench_served(options: ServedOptions, clock: Clock, report: LineSink) -> Numbers:
    """Rounds of: streams served, then bare products of as many rows. Raises BenchError when a request fails."""
    bare = BareModel(options.path, options.dtype, options.threads)
    date, rounds = datetime.now(UTC), []
    async with open_server(options.base_url, clock, options.api_key) as server:
        requests = RequestOptions(model=await server.first_model(), has_token_ids=True, extra_body={"temperature": 0})
        await _serve(server, requests, options, 1, 0, clock)  # warm-up
        for index in range(options.rounds):
            for num_streams in options.streams:
                records = await _serve(server, requests, options, num_streams, index + 1, clock)
                per_token, products = seconds_per_token(records), bare.seconds(num_streams)
                ttft = statistics.median(record.ttft_s for record in records)
                entry = {"round": index, "rows": num_streams, "seconds_per_token": per_token, "ttft_seconds": ttft}
                rounds.append({**entry, "bare_seconds": products, "ratio": per_token / products})
                report(
                    f"{num_streams} streams: {per_token * 1e3:.1f} ms per token, "
                    f"bare products {products * 1e3:.1f} ms, ratio {per_token / products:.2f}, TTFT {ttft:.2f} s"
                )
    return {
        "kind": "served",
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "processor": processor_name(),
        "base_url": server.base_url,
        "rounds": rounds,
        "median_ratio": {
            str(rows): statistics.median(r["ratio"] for r in rounds if r["rows"] == rows) for rows in options.streams
        },
        "config": {**{k: v for k, v in asdict(options).items() if k != "api_key"}, "path": str(options.path)},
    }


def seconds_per_token(records: Sequence[RequestRecord]) -> float:
    """TPOT of one stream; of several the mean gap while all of them decode. Raises BenchError when they never do."""
    if len(records) == 1:
        return records[0].tpot_s or 0.0
    begin = max(record.token_times_s[0] for record in records)
    end = min(record.token_times_s[-1] for record in records)
    gaps = [gap for record in records for gap in gaps_within(record.token_times_s, begin, end)]
    if not gaps:
        problem = "never decoded together; ask for fewer --streams, or serve with a larger decode.max_running"
        raise BenchError(subject=f"{len(records)} streams", problem=problem)
    return statistics.mean(gaps)


async def _serve(
    server: ServerClient,
    requests: RequestOptions,
    options: ServedOptions,
    num_streams: int,
    round_index: int,
    clock: Clock,
) -> list[RequestRecord]:
    output_len = SERVED_OUTPUT_LEN * (1 if num_streams == 1 else SERVED_OUTPUT_FACTOR)
    workload = Workload(
        num_prompts=num_streams, input_len=options.context, output_len=output_len, seed=options.seed + num_streams
    )

    async def send(prompt: Prompt, queue_s: float) -> RequestRecord:
        return await server.send(prompt, requests, queue_s=queue_s)

    result = await run_load(send, make_prompts(workload, round_index), [0.0] * num_streams, None, clock)
    for record in result.records:
        if record.failure is not None:
            raise BenchError(subject=server.base_url, problem=f"a request failed ({record.failure}): {record.detail}")
    return result.records


def run_bench_served(options: ServedOptions, clock: Clock, report: LineSink) -> Numbers:
    """`bench_served` from a thread without a loop."""
    return asyncio.run(bench_served(options, clock, report))
