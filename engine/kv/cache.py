"""The bytes of the KV blocks: one contiguous tensor, and the flat views through which layers write and gather it.

A block belongs to one group of layers at a time; a layer has its place in the blocks of its group.

    bytes of block b:   [place 0: keys | values][place 1: keys | values] ...   each [position, kv head, head dim]
    part p of block b:  row b * parts_per_block + p of `parts`, p = 2 * place for keys and 2 * place + 1 for values
    slot of position:   block * block_size + offset, a row of `slots` once mapped by `slot_rows`

Every byte starts as zero and only finite numbers are ever stored, so a masked position may be read but counts for
nothing. Knows nothing about who owns a block, which group it serves or what it holds.
"""

import ctypes

import torch

from core.layout import BlockLayout, KvDtype
from engine.model.config import ModelConfig

TORCH_DTYPES: dict[KvDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvCache:
    """Storage of `num_blocks` blocks, each of which may serve any group, on one device."""

    def __init__(
        self, config: ModelConfig, *, block_size: int, num_blocks: int, dtype: KvDtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.layout: BlockLayout = config.block_layout(block_size, dtype)
        self.block_bytes = self.layout.block_bytes()
        num_places = self.layout.groups[0].num_layers
        self.parts_per_block = 2 * num_places
        self.layer_places: tuple[tuple[int, int], ...] = tuple(
            place for _, place in sorted(_layer_places(config).items())
        )
        """Per layer: its group and its place there."""
        shape = (num_blocks, num_places, 2, block_size, config.num_kv_heads, config.head_dim)
        self.tensor = torch.zeros(shape, dtype=TORCH_DTYPES[dtype], device=device)
        """[num_blocks, places, 2, block_size, kv heads, head dim]"""
        self.parts = self.tensor.view(num_blocks * self.parts_per_block, -1)
        """[num_blocks * parts_per_block, block_size * kv heads * head dim]"""
        self._slots = self.tensor.view(num_blocks * self.parts_per_block * block_size, -1)
        assert self.tensor.nbytes == self.block_bytes * num_blocks

    @property
    def address(self) -> int:
        """Address of the first byte of block 0 on the device."""
        return self.tensor.data_ptr()

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def byte_view(self) -> memoryview | None:
        """The blocks' bytes, writable, valid as long as this object lives; None where they are not in host memory."""
        if self.device.type != "cpu":
            return None
        return memoryview((ctypes.c_char * self.tensor.nbytes).from_address(self.address)).cast("B")

    def slot_rows(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Where T positions of one group are written: per place int64[2 * T] for `write`. slots: int64[T]"""
        first = slots + (slots // self.block_size) * (self.block_size * (self.parts_per_block - 1))
        part = torch.arange(self.parts_per_block, device=slots.device).view(-1, 1, 2) * self.block_size
        return (first[:, None] + part).view(-1, 2 * len(slots)).unbind()

    def part_rows(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Where N blocks of one group are gathered from: per place int64[2 * N], the keys of all, then the values."""
        part = torch.arange(self.parts_per_block, device=block_ids.device)
        return (block_ids * self.parts_per_block + part[:, None]).view(-1, 2 * len(block_ids)).unbind()

    def write(self, rows: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store one layer's new positions. keys_values: [T, 2 * kv heads, head dim], keys first."""
        self._slots.index_copy_(0, rows, keys_values.to(self._slots.dtype).reshape(len(rows), -1))


def _layer_places(config: ModelConfig) -> dict[int, tuple[int, int]]:
    return {
        layer: (group, place)
        for group, entry in enumerate(config.layer_groups())
        for place, layer in enumerate(entry.layers)
    }
