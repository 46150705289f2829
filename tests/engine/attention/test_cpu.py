"""The batched attention against the readable one, on plans that make every kind of piece."""

import math

import numpy as np
import pytest
import torch

import engine.attention.cpu as cpu_module
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.kv.cache import KvCache
from engine.model.config import ModelConfig
from engine.probe import ProbeSequence, build_plan
from engine.step import StepPlan
from tests.engine.tiny_models import gemma_layers, make_tiny_family, make_tiny_model

pytestmark = pytest.mark.torch

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 16, 120, 6, 2, 16


def _cache(dtype: str, config: ModelConfig | None = None, num_blocks: int = NUM_BLOCKS) -> KvCache:
    cache = KvCache(
        config or make_tiny_model().config,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        dtype=dtype,  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(0)))
    return cache


def _plan(ranges: list[tuple[int, int]]) -> StepPlan:
    order = np.random.default_rng(1).permutation(NUM_BLOCKS).astype(np.int32)
    blocks = np.split(order, np.cumsum([-(-end // BLOCK_SIZE) for _, end in ranges]))
    return build_plan(
        [
            ProbeSequence(token_ids=np.zeros(end, dtype=np.int32), start=start, end=end, block_ids=block_ids)
            for (start, end), block_ids in zip(ranges, blocks, strict=False)
        ],
        BLOCK_SIZE,
    )


PLANS = {
    "one decode": [(40, 41)],
    "first token": [(0, 1)],
    "decodes of many lengths": [(n - 1, n) for n in (1, 16, 17, 400, 3, 33, 250, 250, 31)],
    "prompt": [(0, 50)],
    "later chunk": [(37, 90)],
    "decodes and chunks": [(79, 80), (15, 16), (0, 33), (100, 117), (4, 5), (0, 16)],
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bytes_max", [1, 40_000, 1 << 30])
def test_outputs_and_stored_kv_equal_the_reference(
    name: str, exact: bool, dtype: str, bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_module, "GATHER_BYTES_MAX", bytes_max)
    plan = _plan(PLANS[name])
    fast_cache, reference_cache = _cache(dtype), _cache(dtype)
    fast = CpuAttention(fast_cache, num_heads=HEADS, exact=exact)
    reference = ReferenceAttention(reference_cache)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(plan.num_tokens, HEADS, HEAD_DIM, generator=generator)
    keys_values = torch.randn(plan.num_tokens, 2 * KV_HEADS, HEAD_DIM, generator=generator)
    fast_metadata = fast.prepare(plan, torch.float32)
    reference_metadata = reference.prepare(plan, torch.float32)
    for layer in (2, 0):
        actual = fast.attend(layer, queries, keys_values, fast_metadata)
        wanted = reference.attend(layer, queries, keys_values, reference_metadata)
        torch.testing.assert_close(actual, wanted, atol=2e-6, rtol=1e-5)
    assert torch.equal(fast_cache.tensor, reference_cache.tensor)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bytes_max", [1, 1 << 30])
@pytest.mark.parametrize("window", [7, 24])
def test_windows_equal_the_reference_whatever_unneeded_blocks_hold(
    name: str, exact: bool, bytes_max: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 0, which stands in the tables for every block that is not needed, is nobody's and holds no numbers."""
    monkeypatch.setattr(cpu_module, "GATHER_BYTES_MAX", bytes_max)
    config = make_tiny_family("gemma3", **gemma_layers("wfww"), sliding_window=window, head_dim=HEAD_DIM).config
    num_blocks = 1 + 4 * NUM_BLOCKS
    caches = [_cache("float32", config, num_blocks) for _ in range(2)]
    caches[0].tensor[0] = math.nan
    caches[1].tensor[0] = 1e30
    fast = CpuAttention(caches[0], num_heads=HEADS, exact=exact, scale=0.3)
    reference = ReferenceAttention(caches[1], scale=0.3)
    order = np.random.default_rng(1).permutation(np.arange(1, num_blocks)).astype(np.int32).reshape(4, -1)
    ranges = PLANS[name]
    blocks = np.split(order, np.cumsum([-(-end // BLOCK_SIZE) for _, end in ranges]), axis=1)
    sequences = [
        ProbeSequence(token_ids=np.zeros(end, dtype=np.int32), start=start, end=end, block_ids=block_ids)
        for (start, end), block_ids in zip(ranges, blocks, strict=False)
    ]
    plan = build_plan(sequences, BLOCK_SIZE, caches[0].layout.groups)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(plan.num_tokens, HEADS, HEAD_DIM, generator=generator)
    keys_values = torch.randn(plan.num_tokens, 2 * KV_HEADS, HEAD_DIM, generator=generator)
    fast_metadata = fast.prepare(plan, torch.float32)
    reference_metadata = reference.prepare(plan, torch.float32)
    for layer in (3, 1, 0):
        actual = fast.attend(layer, queries, keys_values, fast_metadata)
        wanted = reference.attend(layer, queries, keys_values, reference_metadata)
        torch.testing.assert_close(actual, wanted, atol=2e-6, rtol=1e-5)
    assert torch.equal(caches[0].tensor[1:], caches[1].tensor[1:])


@pytest.mark.parametrize(("exact", "first_blocks"), [(False, (0, 73)), (True, (0, 64))])
def test_windows_gather_from_the_first_needed_block_or_the_unit_of_keys_before_it(
    exact: bool, first_blocks: tuple[int, int]
) -> None:
    config = make_tiny_family("gemma3", **gemma_layers("fw"), sliding_window=24, head_dim=HEAD_DIM).config
    cache = _cache("float32", config, 320)
    sequence = ProbeSequence(
        token_ids=np.zeros(1200, dtype=np.int32),
        start=1199,
        end=1200,
        block_ids=np.arange(150, dtype=np.int32).reshape(2, 75),
    )
    plan = build_plan([sequence], BLOCK_SIZE, cache.layout.groups)
    metadata = CpuAttention(cache, num_heads=HEADS, exact=exact).prepare(plan, torch.float32)
    ends = (96, 96) if exact else (75, 75)
    widths = [group.pieces[0].keys.shape[2] // BLOCK_SIZE for group in metadata]
    assert widths == [end - first for first, end in zip(first_blocks, ends, strict=True)]


def test_short_sequences_share_a_piece_and_long_ones_do_not_drag_them() -> None:
    attention = CpuAttention(_cache("float32"), num_heads=HEADS, exact=False)
    (metadata,) = attention.prepare(_plan([(9, 10), (11, 12), (20, 21), (799, 800), (5, 6), (6, 7)]), torch.float32)
    assert [(piece.first, piece.end) for piece in metadata.pieces] == [(0, 3), (3, 4), (4, 6)]
