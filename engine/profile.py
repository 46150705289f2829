"""Where a step's time goes, and what the machine could do: bare matrix products of the same shapes, read bandwidth.

Measurements alternate between the things compared and report medians, because machines are shared. Knows nothing about
servers or requests; the bench prints what this returns.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from engine.model.config import ModelConfig
from engine.probe import ProbeSequence, build_plan, one_sequence_plan
from engine.runner import TorchRunner
from engine.step import StepPlan

READ_BYTES = 1 << 30


def read_bandwidth(size_bytes: int = READ_BYTES, repeats: int = 3) -> float:
    """Best GB/s (10^9) of summing a float32 tensor of `size_bytes` in host memory."""
    values = torch.ones(size_bytes // 4)
    seconds = min(_seconds(values.sum) for _ in range(repeats))
    return size_bytes / seconds / 1e9


def unfused_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(N, K) of the seven products of a layer as the checkpoint has them."""
    hidden, queries, keys = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    up = (config.intermediate_size, hidden)
    return [
        (queries, hidden),
        (keys, hidden),
        (keys, hidden),
        (hidden, queries),
        up,
        up,
        (hidden, config.intermediate_size),
    ]


class BareProducts:
    """Every matrix product of one pass as plain `F.linear` calls on weights of their own, each touched once."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._layers = [torch.full(s, 0.01, dtype=dtype) for s in unfused_shapes(config) * config.num_layers]
        self._head = torch.full((config.vocab_size, config.hidden_size), 0.01, dtype=dtype)

    def run(self, num_rows: int, num_head_rows: int) -> None:
        """One pass over `num_rows` rows, the LM head over `num_head_rows` of them (those that sample)."""
        widths = {weight.shape[1] for weight in (*self._layers, self._head)}
        inputs = {width: torch.ones(num_rows, width, dtype=self._head.dtype) for width in widths}
        with torch.inference_mode():
            for weight in self._layers:
                F.linear(inputs[weight.shape[1]], weight)
            F.linear(inputs[self._head.shape[1]][:num_head_rows], self._head)


def decode_plan(runner: TorchRunner, num_streams: int, context: int) -> StepPlan:
    """One token for each of `num_streams` sequences that attend to `context` positions, or to a layer's window."""
    size, groups = runner.block_size, runner.cache.layout.groups
    num_blocks = -(-context // size)
    firsts = [group.needed_blocks(context - 1, size).start for group in groups]
    counts = [num_blocks - first for first in firsts]
    assert num_streams * sum(counts) <= runner.num_blocks, "the runner has too few blocks for this measurement"
    order = np.random.default_rng(0).permutation(num_streams * sum(counts)).astype(np.int32)
    token_ids = np.ones(context, dtype=np.int32)
    sequences = []
    for own in order.reshape(num_streams, sum(counts)):
        block_ids = np.zeros((len(groups), num_blocks), dtype=np.int32)
        for index, part in enumerate(np.split(own, np.cumsum(counts)[:-1])):
            block_ids[index, firsts[index] :] = part
        sequences.append(ProbeSequence(token_ids=token_ids, start=context - 1, end=context, block_ids=block_ids))
    return build_plan(sequences, size, groups)


def prefill_plan(runner: TorchRunner, length: int, start: int = 0) -> StepPlan:
    """A chunk of `length` tokens that follows `start` computed ones, its last position sampled."""
    end, groups = start + length, runner.cache.layout.groups
    fits = -(-end // runner.block_size) * len(groups) <= runner.num_blocks
    assert fits, "the runner has too few blocks for this measurement"
    return one_sequence_plan(np.ones(end, dtype=np.int32), start, end, runner.block_size, groups)


def measure_alternating(cases: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each case over `repeats` rounds, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(repeats + 1):
        for name, case in cases.items():
            elapsed = _seconds(case)
            if round_index:
                seconds[name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds.items()}


def time_by_kind(runner: TorchRunner, plan: StepPlan, repeats: int) -> dict[str, float]:
    """Median seconds of one pass by layer kind; `other` is norms, rotary embedding, additions and calls."""
    rounds = []
    for _ in range(repeats):
        spent: dict[str, float] = {}
        with _timed_model(runner, spent):
            total = _seconds(lambda: runner.logits(plan))
        rounds.append({**spent, "other": total - sum(spent.values()), "total": total})
    return {kind: statistics.median(values[kind] for values in rounds) for kind in rounds[0]}


@contextmanager
def _timed_model(runner: TorchRunner, spent: dict[str, float]) -> Iterator[None]:
    model = runner.model
    layers, head, attend = model.layers, model.head, model.attention.attend
    model.layers = [
        replace(
            layer,
            qkv=_timed(layer.qkv, "qkv", spent),
            output=_timed(layer.output, "output", spent),
            gate_up=_timed(layer.gate_up, "gate_up", spent),
            down=_timed(layer.down, "down", spent),
        )
        for layer in layers
    ]
    model.head = _timed(head, "head", spent)
    model.attention.attend = _timed(attend, "attention", spent)  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.layers, model.head = layers, head
        del model.attention.attend


def _timed(function: Callable[..., torch.Tensor], kind: str, spent: dict[str, float]) -> Callable[..., torch.Tensor]:
    def run(*arguments: object) -> torch.Tensor:
        started = time.perf_counter()
        result = function(*arguments)
        spent[kind] = spent.get(kind, 0.0) + time.perf_counter() - started
        return result

    return run


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
