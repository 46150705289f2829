"""Seconds of steps by kind and size, beside bare products of the same shapes: what one machine does with one model.

The numbers are what a simulator of this machine is calibrated from; docs/bench.md has their schema. Knows nothing about
servers, requests or files.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.layout import KvDtype
from engine.factory import load_runner
from engine.kv.cache import TORCH_DTYPES
from engine.model.config import ModelConfig
from engine.model.directory import read_config
from engine.numerics import NumericsMode
from engine.probe import greedy_batch
from engine.profile import (
    BareProducts,
    decode_plan,
    measure_alternating,
    prefill_plan,
    read_bandwidth,
    time_by_kind,
    unfused_shapes,
)
from engine.runner import TorchRunner
from engine.sampler import Sampler
from engine.step import SamplingBatch, StepPlan

COPY_BYTES = 1 << 28
LONG_CASE_ROWS = 64
"""From so many rows on, a case is repeated a third as often."""
LONG_CASE_REPEATS_MIN = 2

Entry = dict[str, Any]
"""One measured case, as it stands in a result file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGrid:
    """What to measure."""

    path: Path
    """Of a model directory."""
    dtype: KvDtype
    numerics: NumericsMode
    threads: int
    block_size: int = 16
    streams: tuple[int, ...] = (1, 4, 16)
    """Rows of a decode step."""
    contexts: tuple[int, ...] = (512,)
    """Positions that a decode row attends to."""
    chunks: tuple[int, ...] = (128, 512)
    """Tokens of a prefill step."""
    prefill_contexts: tuple[int, ...] = (0,)
    """Positions computed before the chunk."""
    bare_dtypes: tuple[KvDtype, ...] = ("float32",)
    repeats: int = 9

    @property
    def max_length(self) -> int:
        return max(max(self.contexts), max(self.prefill_contexts) + max(self.chunks)) + 1

    def num_blocks(self, num_groups: int) -> int:
        """So many that every case fits, when the model's layers form `num_groups` groups."""
        streams = max(self.streams) * -(-max(self.contexts) // self.block_size)
        return num_groups * max(streams, -(-self.max_length // self.block_size))


def measure_engine(grid: EngineGrid, report: Callable[[str], None]) -> Entry:
    """All of the grid, each step in alternation with bare products. Raises ModelLoadError or NumericsError."""
    config = read_config(grid.path)
    runner = load_runner(
        grid.path,
        dtype=grid.dtype,
        device="cpu",
        block_size=grid.block_size,
        num_blocks=grid.num_blocks(len(config.layer_groups())),
        max_model_len=grid.max_length,
        numerics=grid.numerics,
        threads=grid.threads,
    )
    bare = {name: BareProducts(config, TORCH_DTYPES[name]) for name in grid.bare_dtypes}
    decode, prefill = [], []
    for context in grid.contexts:
        for rows in grid.streams:
            case = _time_step(runner, decode_plan(runner, rows, context), bare, grid.repeats)
            decode.append({"rows": rows, "context": context, **case})
            report(f"decode, {rows} rows, context {context}: {describe(case)}")
    for start in grid.prefill_contexts:
        for tokens in grid.chunks:
            case = _time_step(runner, prefill_plan(runner, tokens, start), bare, grid.repeats)
            prefill.append({"tokens": tokens, "context": start, **case})
            report(f"prefill, {tokens} tokens after {start}: {describe(case)}")
    return {
        "torch": torch.__version__,
        "decode": decode,
        "prefill": prefill,
        "products": _throughput(config, [*decode, *prefill], bare),
        "sampler": time_sampler(config.vocab_size, grid.streams, grid.repeats),
        "read_gb_per_s": read_bandwidth(),
        "copy_gb_per_s": copy_bandwidth(),
    }


def describe(case: Entry) -> str:
    """A step in one line."""
    ratios = ", ".join(
        f"{ratio:.2f} of {name} products ({case['bare_seconds'][name] * 1e3:.1f} ms)"
        for name, ratio in case["ratio"].items()
    )
    kinds = ", ".join(f"{kind} {seconds * 1e3:.1f}" for kind, seconds in case["seconds_by_kind"].items())
    return f"{case['seconds'] * 1e3:.1f} ms = {ratios}; by kind, ms: {kinds}"


def time_sampler(vocab_size: int, rows: Sequence[int], repeats: int) -> list[Entry]:
    """Seconds of sampling for so many rows: greedy, at temperature 1, and with top-p 0.9 and top-k 50 as well."""
    sampler, entries = Sampler(vocab_size, torch.device("cpu")), []
    for size in rows:
        logits = torch.randn(size, vocab_size, generator=torch.Generator().manual_seed(0))
        batches = _sampling_batches(size)
        seconds = measure_alternating(
            {case: lambda b=batch, x=logits: sampler.sample(x, b, None) for case, batch in batches.items()},  # type: ignore[misc]
            repeats,
        )
        entries += [{"rows": size, "case": case, "seconds": taken} for case, taken in seconds.items()]
    return entries


class BareModel:
    """Bare products of one model in this process, for comparing anything else with them in alternation."""

    def __init__(self, path: Path, dtype: KvDtype, threads: int) -> None:
        """threads: of torch, process-wide. Raises ModelLoadError."""
        torch.set_num_threads(threads)
        self._products = BareProducts(read_config(path), TORCH_DTYPES[dtype])

    def seconds(self, rows: int, repeats: int = 5) -> float:
        """Median seconds of one pass over `rows` rows that all sample."""
        return measure_alternating({"bare": lambda: self._products.run(rows, rows)}, repeats)["bare"]


def copy_bandwidth(size_bytes: int = COPY_BYTES, repeats: int = 5) -> float:
    """GB/s (10^9 bytes copied) of copying `size_bytes` within host memory; bytes read and written count once."""
    source = torch.ones(size_bytes // 4)
    target = torch.empty_like(source)
    return size_bytes / measure_alternating({"copy": lambda: target.copy_(source)}, repeats)["copy"] / 1e9


def _time_step(runner: TorchRunner, plan: StepPlan, bare: dict[KvDtype, BareProducts], repeats: int) -> Entry:
    rows, head_rows = plan.num_tokens, len(plan.sample_rows)
    if rows >= LONG_CASE_ROWS:
        repeats = max(LONG_CASE_REPEATS_MIN, repeats // 3)
    sampled: list[float] = []

    def step() -> None:
        timings = runner.execute(plan).timings_s
        sampled.append(timings["sample"])

    products: dict[str, Callable[[], object]] = {
        name: lambda p=kind: p.run(rows, head_rows)  # type: ignore[misc]
        for name, kind in bare.items()
    }
    seconds = measure_alternating({"step": step, **products}, repeats)
    total = seconds.pop("step")
    return {
        "seconds": total,
        "sample_seconds": statistics.median(sampled[1:]),
        "seconds_by_kind": time_by_kind(runner, plan, repeats),
        "bare_seconds": seconds,
        "ratio": {name: total / taken for name, taken in seconds.items()},
        "repeats": repeats,
    }


def _throughput(config: ModelConfig, cases: Sequence[Entry], bare: dict[KvDtype, BareProducts]) -> list[Entry]:
    """GFLOP/s (10^9 multiplications and additions per second) of the bare products that the cases were compared with.

    Cases of equal rows and sampled rows are one entry, the faster one.
    """
    layer = sum(n * k for n, k in unfused_shapes(config)) * config.num_layers
    head = config.vocab_size * config.hidden_size
    best: dict[tuple[int, int, str], float] = {}
    for case in cases:
        rows, head_rows = (case["rows"], case["rows"]) if "rows" in case else (case["tokens"], 1)
        for name in bare:
            key = (rows, head_rows, name)
            best[key] = min(best.get(key, float("inf")), case["bare_seconds"][name])
    return [
        {
            "rows": rows,
            "head_rows": head_rows,
            "dtype": name,
            "seconds": seconds,
            "gflop_per_s": 2 * (rows * layer + head_rows * head) / seconds / 1e9,
        }
        for (rows, head_rows, name), seconds in sorted(best.items())
    ]


def _sampling_batches(size: int) -> dict[str, SamplingBatch]:
    greedy, ones = greedy_batch(size), np.ones(size, dtype=np.float32)
    random = replace(greedy, temperature=ones)
    filtered = replace(random, top_p=ones * np.float32(0.9), top_k=np.full(size, 50, dtype=np.int32))
    return {"greedy": greedy, "temperature": random, "top_p_top_k": filtered}
