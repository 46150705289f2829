"""Runs plans with torch: plan to device, forward pass, sampling. The only place where planner's arrays become tensors.

Owns the KV cache's bytes; called from the step thread only. Knows nothing about requests, scheduling or transfer.
"""

import time
from typing import Any, Literal

import numpy as np
import torch

from core.errors import NumericsError
from core.layout import KvDtype
from engine.attention.base import Attention
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.kv.cache import TORCH_DTYPES, KvCache
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, product_shapes
from engine.numerics import Numerics, NumericsMode, choose_exact, choose_fast, is_activation_exact
from engine.probe import one_sequence_plan
from engine.sampler import Sampler
from engine.step import IntArray, StepOutput, StepPlan

PROBE_TOKENS = 21
"""Length of the prompt that warms a runner up; its logits show whether `exact` holds for a whole pass."""
PROBE_TAIL = 4
PROBE_KEYS = 700
"""Length of the chunk whose attention must be exact; a window before it makes keys that only some of its rows see."""


class TorchRunner:
    """A `Runner` for the supported families."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        *,
        dtype: KvDtype,
        device: torch.device,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        numerics: NumericsMode,
        attention: Literal["reference", "fast"] = "fast",
        threads: int | None = None,
    ) -> None:
        """weights: by Hugging Face names, in `dtype`, not modified. threads: of torch in this process; None: as it is.

        Raises NumericsError when `exact` cannot be kept on this machine, ValueError when `num_blocks` is less than one
        block per group of layers.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.numerics = _choose(numerics, TORCH_DTYPES[dtype], device, config)
        self.cache = KvCache(config, block_size=block_size, num_blocks=num_blocks, dtype=dtype, device=device)
        self._config = config
        self._device = device
        self._groups = self.cache.layout.groups
        if num_blocks < len(self._groups):
            raise ValueError(f"{num_blocks} KV blocks cannot hold a position of {len(self._groups)} groups of layers")
        self._max_length = min(max_model_len, num_blocks // len(self._groups) * block_size)
        layer_attention: Attention[Any] = (
            ReferenceAttention(self.cache, scale=config.attention_scale)
            if attention == "reference"
            else CpuAttention(
                self.cache, num_heads=config.num_heads, exact=numerics == "exact", scale=config.attention_scale
            )
        )
        with torch.inference_mode():
            self.model: Decoder[Any] = Decoder(
                config,
                weights,
                numerics=self.numerics,
                attention=layer_attention,
                max_model_len=max_model_len,
                device=device,
            )
            self._sampler = Sampler(config.vocab_size, device)

    def execute(self, plan: StepPlan) -> StepOutput:
        """One forward pass: writes KV of every planned position, samples the planned rows."""
        started = time.perf_counter()
        with torch.inference_mode():
            logits = self.logits(plan)
            self._wait()
            computed = time.perf_counter()
            output = self._sampler.sample(logits, plan.sampling, plan.history) if plan.sampling.size else _NOTHING
        finished = time.perf_counter()
        return StepOutput(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            top_ids=output.top_ids,
            top_logprobs=output.top_logprobs,
            timings_s={"forward": computed - started, "sample": finished - computed},
        )

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """The forward pass alone: float32[B, vocab size] of the rows that sample. Writes KV like `execute`."""
        dtype = self.numerics.step_dtype(plan.num_tokens)
        with torch.inference_mode():
            sample_tokens = plan.query_start[plan.sample_rows + 1].astype(np.int64) - 1
            return self.model.forward(
                torch.from_numpy(plan.token_ids.astype(np.int64)).to(self._device),
                torch.from_numpy(plan.positions.astype(np.int64)).to(self._device),
                self.model.attention.prepare(plan, dtype),
                torch.from_numpy(sample_tokens).to(self._device),
                dtype,
            )

    def warm_up(self) -> None:
        """Run the code paths once, before the first request and while no block is in use; zeroes what it wrote.

        For `exact`, raises NumericsError unless a prompt's logits, and attention over more keys than its kernel handles
        at once and than a window holds, are the same bits in one chunk and token by token, and so are a row's after the
        activation, alone and among so many that threads share them.
        """
        length = min(PROBE_TOKENS, self._max_length)
        token_ids = np.arange(length, dtype=np.int32) * 7 % self._config.vocab_size
        split = max(length - PROBE_TAIL, 1)
        whole = self.logits(self._probe_plan(token_ids, 0, length))
        last = whole
        for start, end in [(0, split), *((at, at + 1) for at in range(split, length))]:
            plan = self._probe_plan(token_ids, start, end)
            last = self.logits(plan)
            self.execute(plan)
        is_equal = self.numerics.mode == "fast" or (torch.equal(whole, last) and self._are_layers_exact())
        longest = PROBE_KEYS + max(group.window or 0 for group in self._groups)
        self.cache.tensor[: -(-longest // self.block_size) * len(self._groups)] = 0
        if not is_equal:
            raise NumericsError(problem="a position's bits differ between one chunk and token by token")

    def _probe_plan(self, token_ids: IntArray, start: int, end: int) -> StepPlan:
        return one_sequence_plan(token_ids, start, end, self.block_size, self._groups)

    def _are_layers_exact(self) -> bool:
        """Whether the activation, and every kind of layer's attention, give rows the same bits alone as among many."""
        width, dtype = self._config.intermediate_size, self.numerics.wide_dtype
        first_layers = {group.window: group.layers[0] for group in reversed(self._config.layer_groups())}
        with torch.inference_mode():
            return is_activation_exact(self.model.activation, width, dtype, self._device) and all(
                self._is_attention_exact(layer, window) for window, layer in first_layers.items()
            )

    def _is_attention_exact(self, layer: int, window: int | None) -> bool:
        config, dtype = self._config, self.numerics.wide_dtype
        length = min((window or 0) + PROBE_KEYS, self._max_length)
        generator = torch.Generator().manual_seed(0)
        queries, keys_values = (
            torch.randn(length, heads, config.head_dim, generator=generator).to(self._device, dtype)
            for heads in (config.num_heads, 2 * config.num_kv_heads)
        )

        def attend(start: int, end: int) -> torch.Tensor:
            metadata = self.model.attention.prepare(self._probe_plan(np.zeros(end, dtype=np.int32), start, end), dtype)
            return self.model.attention.attend(layer, queries[start:end], keys_values[start:end], metadata)

        # Chunks up to the compared one, the last:   0  ...  start   start + count = length
        count = min(length, PROBE_KEYS)
        start = length - count
        for before in range(0, start, PROBE_KEYS):
            attend(before, min(before + PROBE_KEYS, start))
        whole = attend(start, length)
        return all(
            torch.equal(attend(start + at, start + at + 1)[0], whole[at])
            for at in {0, count // 4, count // 2, count - 1}
        )

    def _wait(self) -> None:
        """Until the device has finished, so that the timings are of work and not of its submission."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


_NOTHING = StepOutput(token_ids=np.zeros(0, dtype=np.int32))


def _choose(mode: NumericsMode, dtype: torch.dtype, device: torch.device, config: ModelConfig) -> Numerics:
    with torch.inference_mode():
        if mode == "fast":
            return choose_fast(dtype, device)
        return choose_exact(dtype, device, product_shapes(config))
