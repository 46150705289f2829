"""The cache's bytes: where a position of a layer lies, and that writes and gathers agree on it."""

import pytest
import torch

from engine.kv.cache import KvCache
from tests.engine.tiny_models import gemma_layers, make_tiny_family, make_tiny_model

pytestmark = pytest.mark.torch

BLOCK_SIZE, NUM_BLOCKS, LAYERS, KV_HEADS, HEAD_DIM = 4, 5, 3, 2, 16


@pytest.fixture
def cache() -> KvCache:
    return KvCache(
        make_tiny_model().config,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        dtype="float32",
        device=torch.device("cpu"),
    )


def test_blocks_are_contiguous_runs_of_the_agreed_size(cache: KvCache) -> None:
    assert cache.block_bytes == LAYERS * 2 * BLOCK_SIZE * KV_HEADS * HEAD_DIM * 4
    assert cache.tensor[3].data_ptr() - cache.address == 3 * cache.block_bytes


def test_byte_view_is_the_tensor_itself(cache: KvCache) -> None:
    view = cache.byte_view()
    assert view is not None and len(view) == NUM_BLOCKS * cache.block_bytes and view.format == "B"
    view[2 * cache.block_bytes : 2 * cache.block_bytes + 4] = b"\x00\x00\x80\x3f"
    assert cache.tensor[2].flatten()[0] == 1.0


def test_write_reaches_only_the_layer_and_slots_it_names(cache: KvCache) -> None:
    slots = torch.tensor([3 * BLOCK_SIZE + 1, 1 * BLOCK_SIZE + 3])
    new = torch.randn(2, 2 * KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cache.write(cache.slot_rows(slots)[1], new)
    expected = torch.zeros_like(cache.tensor)
    for index, (block, offset) in enumerate([(3, 1), (1, 3)]):
        expected[block, 1, 0, offset] = new[index, :KV_HEADS]
        expected[block, 1, 1, offset] = new[index, KV_HEADS:]
    assert torch.equal(cache.tensor, expected)


def test_part_rows_gather_keys_then_values_of_the_blocks(cache: KvCache) -> None:
    cache.tensor.copy_(torch.arange(cache.tensor.numel()).view_as(cache.tensor))
    blocks = torch.tensor([4, 0, 2])
    for layer, rows in enumerate(cache.part_rows(blocks)):
        gathered = cache.parts[rows].view(2, 3, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        assert torch.equal(gathered, cache.tensor[blocks, layer].transpose(0, 1))


def test_layers_of_every_group_have_places_of_their_own_in_blocks_of_one_size() -> None:
    config = make_tiny_family("gemma3", **gemma_layers("wfwfw"), sliding_window=8).config
    cache = KvCache(config, block_size=4, num_blocks=5, dtype="float32", device=torch.device("cpu"))
    assert cache.layer_places == ((1, 0), (0, 0), (1, 1), (0, 1), (2, 0))
    assert cache.tensor.shape == (5, 2, 2, 4, 2, 20)
    assert cache.block_bytes == cache.layout.block_bytes() == 2 * 2 * 4 * 2 * 20 * 4
