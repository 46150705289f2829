"""Tiny models stepped by hand: a runner for one, and whoever gives its sequences blocks."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from engine.numerics import NumericsMode
from engine.probe import ProbeSequence, build_plan
from engine.runner import TorchRunner
from tests.engine.tiny_models import TinyModel, random_tokens

AttentionName = Literal["reference", "fast"]
Tokens = np.ndarray[Any, np.dtype[np.int32]]
TOLERANCE = 1e-4


def make_runner(
    model: TinyModel, *, block_size: int = 16, numerics: NumericsMode = "fast", attention: AttentionName = "fast"
) -> TorchRunner:
    return TorchRunner(
        model.config,
        model.weights,
        dtype="float32",
        device=torch.device("cpu"),
        block_size=block_size,
        num_blocks=16384 // block_size,
        max_model_len=2048,
        numerics=numerics,
        attention=attention,
        threads=1,
    )


class Feeder:
    """Gives every sequence scattered blocks of its own in every group and computes the ranges it is told to.

    All memory begins as junk, block 0 belongs to nobody, and before a step the blocks that its window groups do not
    need any more are overwritten with junk: only KV that a layer may attend to can give the right logits.
    """

    def __init__(self, runner: TorchRunner, prompts: Sequence[Tokens], seed: int = 0) -> None:
        self._runner = runner
        self._groups = runner.cache.layout.groups
        self._prompts = prompts
        self._generator = torch.Generator().manual_seed(seed)
        self._spoil(slice(None))
        order = np.random.default_rng(seed).permutation(np.arange(1, runner.num_blocks)).astype(np.int32)
        needed = [-(-len(prompt) // runner.block_size) * len(self._groups) for prompt in prompts]
        assert sum(needed) <= len(order)
        parts = np.split(order, np.cumsum(needed))[: len(prompts)]
        self._blocks = [part.reshape(len(self._groups), -1) for part in parts]

    def logits(self, *ranges: tuple[int, int, int]) -> torch.Tensor:
        """One step over (sequence, start, end) triples; [len(ranges), vocab size] of the last positions."""
        size = self._runner.block_size
        for index, start, _ in ranges:
            for group, block_ids in zip(self._groups, self._blocks[index], strict=True):
                freed = block_ids[: group.needed_blocks(start, size).start]
                self._spoil(torch.from_numpy(freed).long())
        parts = [
            ProbeSequence(token_ids=self._prompts[index], start=start, end=end, block_ids=self._blocks[index])
            for index, start, end in ranges
        ]
        return self._runner.logits(build_plan(parts, size, self._groups))

    def _spoil(self, where: Any) -> None:
        tensor = self._runner.cache.tensor
        junk = torch.randn(tensor[where].shape, generator=self._generator) * 1000
        tensor[where] = junk.to(tensor.dtype)


def assert_mixed_steps_equal_transformers(model: TinyModel, runner: TorchRunner) -> None:
    """Three prompts in steps that mix chunks with decoding: every step's logits are transformers'."""
    prompts = [random_tokens(length, seed) for seed, length in enumerate((40, 150, 17))]
    expected = [model.reference_logits(prompt) for prompt in prompts]
    feeder = Feeder(runner, prompts)
    steps = [
        [(0, 0, 37)],
        [(0, 37, 38), (1, 0, 50)],
        [(0, 38, 39), (2, 0, 16), (1, 50, 146)],
        [(0, 39, 40), (2, 16, 17), (1, 146, 147)],
        [(1, 147, 150)],
    ]
    for step in steps:
        wanted = torch.stack([expected[index][end - 1] for index, _, end in step])
        torch.testing.assert_close(feeder.logits(*step), wanted, atol=TOLERANCE, rtol=0)
