"""A served, colocated cluster against bare matrix products of the same shapes; see docs/experiments.md.

    python tests/e2e/bench_served.py URL [rounds]

The cluster must be up (bfloat16, fast, decode.cpus = 2). Rounds alternate: one stream, bare products at 1 row, 16
streams, bare products at 16 rows. TPOT of one stream is (E2E - TTFT) / (output tokens - 1); of 16 streams, the mean gap
between tokens while all of them decode. Prints every round, then medians of the ratios.
"""

import asyncio
import itertools
import json
import random
import statistics
import sys
import time

import httpx
import torch

from engine.model.catalog import import_model
from engine.model.directory import read_config
from engine.profile import BareProducts, measure_alternating

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 48


async def stream(client: httpx.AsyncClient, url: str, seed: int, max_tokens: int) -> list[float]:
    """Arrival times of the tokens of one greedy request, the time of sending first."""
    rng = random.Random(seed)
    body = {
        "prompt": [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    times = [time.perf_counter()]
    async with client.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                ids = json.loads(line[6:])["choices"][0].get("token_ids") or []
                times += [time.perf_counter()] * len(ids)
    assert len(times) == max_tokens + 1, f"{len(times) - 1} tokens arrived"
    return times


async def serve(url: str, num_streams: int, seed: int) -> tuple[float, float]:
    """(median seconds per token while all streams decode, TTFT of the first)."""
    async with httpx.AsyncClient() as client:
        runs = [
            stream(client, url, seed + i, OUTPUT_TOKENS * (1 if num_streams == 1 else 4)) for i in range(num_streams)
        ]
        results = await asyncio.gather(*runs)
    begin, end = max(times[1] for times in results), min(times[-1] for times in results)
    gaps = [b - a for times in results for a, b in itertools.pairwise(times[1:]) if begin <= a and b <= end]
    if num_streams == 1:
        return (results[0][-1] - results[0][1]) / (len(results[0]) - 2), results[0][1] - results[0][0]
    return statistics.mean(gaps), results[0][1] - results[0][0]


def bare(products: BareProducts, rows: int, repeats: int = 5) -> float:
    """Median seconds of one pass of plain products over `rows` rows."""
    return measure_alternating({"products": lambda: products.run(rows, rows)}, repeats)["products"]


def main(url: str, rounds: int) -> None:
    torch.set_num_threads(2)
    config = read_config(import_model("smollm2"))
    bare_products = BareProducts(config, torch.bfloat16)
    asyncio.run(serve(url, 1, 1))
    ratios: dict[int, list[float]] = {1: [], 16: []}
    for index in range(rounds):
        for num_streams in (1, 16):
            per_token, ttft = asyncio.run(serve(url, num_streams, 1000 * (index + 1) + num_streams))
            products = bare(bare_products, num_streams)
            ratios[num_streams].append(per_token / products)
            print(
                f"{num_streams:2} streams: {per_token * 1e3:.1f} ms per token, bare products {products * 1e3:.1f} ms, "
                f"ratio {per_token / products:.2f}, TTFT {ttft:.2f} s",
                flush=True,
            )
    for num_streams, values in ratios.items():
        print(f"{num_streams:2} streams: median ratio {statistics.median(values):.2f} of {rounds} rounds")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
