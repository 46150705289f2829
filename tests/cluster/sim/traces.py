"""Traces for tests: excerpts of published ones, and small ones to make. Knows nothing about what is tested."""

from pathlib import Path

import numpy as np

from cluster.sim.trace import Trace, TracedRequest

DATA = Path(__file__).parents[2] / "data"
MOONCAKE = DATA / "mooncake-conversation-head.jsonl"
AZURE = DATA / "azure-conversation-head.csv"

Fields = tuple[float, int, int, tuple[int, ...]]


def fields_of(trace: Trace) -> list[Fields]:
    return [(one.arrival_s, one.num_prompt_tokens, one.num_output_tokens, one.blocks) for one in trace.requests]


def trace_of(*requests: Fields, block_size: int | None = 4) -> Trace:
    traced = [
        TracedRequest(
            arrival_s=arrival_s,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            blocks=blocks,
            block_size=block_size,
            index=index,
        )
        for index, (arrival_s, num_prompt, num_output, blocks) in enumerate(requests)
    ]
    return Trace(name="made", block_size=block_size, requests=traced)


def random_trace(seed: int, num_requests: int = 30) -> Trace:
    """Requests that continue each other's prompts, at times that grow."""
    rng = np.random.default_rng(seed)
    known: list[tuple[int, ...]] = [()]
    fresh, arrival_s, requests = 0, 0.0, []
    for _ in range(num_requests):
        blocks = (*known[rng.integers(len(known))], *range(fresh, fresh + int(rng.integers(1, 4))))
        fresh += 3
        known.append(blocks)
        num_prompt = 4 * len(blocks) - int(rng.integers(4))
        requests.append((arrival_s, num_prompt, int(rng.integers(1, 9)), blocks))
        arrival_s += float(rng.exponential())
    return trace_of(*requests)
