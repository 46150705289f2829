"""The engine against bare matrix products of the same shapes, in one run, alternating; see docs/experiments.md.

    python tests/engine/bench.py [fast|exact] [bfloat16|float32] [repeats]

Bare products are plain `F.linear` calls on the unfused shapes of every layer, each weight touched once, the LM head
only for the rows that are sampled. Prints medians in milliseconds, ratios, the time by layer kind, and the read
bandwidth.
"""

import sys
from collections.abc import Callable

import torch

from engine.factory import load_runner
from engine.kv.cache import TORCH_DTYPES
from engine.model.catalog import import_model
from engine.model.directory import read_config
from engine.profile import (
    BareProducts,
    decode_plan,
    measure_alternating,
    prefill_plan,
    read_bandwidth,
    time_by_kind,
)

CONTEXT = 512
THREADS = 2


def main(numerics: str, dtype: str, repeats: int) -> None:
    torch.set_num_threads(THREADS)
    path = import_model("smollm2")
    config = read_config(path)
    runner = load_runner(
        path,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        device="cpu",
        block_size=16,
        num_blocks=640,
        max_model_len=2048,
        numerics="exact" if numerics == "exact" else "fast",
        threads=THREADS,
    )
    bare = {name: BareProducts(config, kind) for name, kind in TORCH_DTYPES.items()}
    plans = {
        "decode, 1 stream": (decode_plan(runner, 1, CONTEXT), 1, 1),
        "decode, 16 streams": (decode_plan(runner, 16, CONTEXT), 16, 16),
        f"prefill, {CONTEXT} tokens": (prefill_plan(runner, CONTEXT), CONTEXT, 1),
    }
    print(f"{numerics} {dtype}, {THREADS} threads, context {CONTEXT}; medians in ms of {repeats} rounds")
    for name, (plan, rows, head_rows) in plans.items():
        cases: dict[str, Callable[[], object]] = {
            "step": lambda plan=plan: runner.execute(plan),  # type: ignore[misc]
            **{kind: lambda p=p, r=rows, h=head_rows: p.run(r, h) for kind, p in bare.items()},  # type: ignore[misc]
        }
        seconds = measure_alternating(cases, repeats if rows < CONTEXT else max(2, repeats // 3))
        step = seconds.pop("step")
        ratios = ", ".join(f"{step / s:.2f} of {kind} products ({s * 1e3:.1f})" for kind, s in seconds.items())
        kinds = ", ".join(f"{kind} {s * 1e3:.1f}" for kind, s in time_by_kind(runner, plan, 3).items())
        print(f"{name}: step {step * 1e3:.1f} = {ratios}\n    by kind: {kinds}")
    print(f"read bandwidth: {read_bandwidth():.1f} GB/s")


if __name__ == "__main__":
    defaults = ["fast", "bfloat16", "9"]
    chosen = sys.argv[1:] + defaults[len(sys.argv) - 1 :]
    main(chosen[0], chosen[1], int(chosen[2]))
