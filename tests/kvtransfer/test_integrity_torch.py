"""The torch digests equal the NumPy digests, which are the oracle."""

import numpy as np
import pytest
import torch

from core.ids import BlockId
from kvtransfer import integrity_torch
from kvtransfer.integrity import BlockDigester
from kvtransfer.integrity_torch import TorchBlockDigester

pytestmark = pytest.mark.torch

BLOCK_BYTES = 3 * 2 * 16 * 2 * 64 * 2
IDS = [BlockId(i) for i in (4, 0, 2, 2, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digests_are_equal_when_computed_by_torch_and_numpy(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    pool = torch.randn(6 * BLOCK_BYTES // dtype.itemsize, generator=generator).to(dtype)
    view = pool.view(torch.uint8).numpy().data
    assert TorchBlockDigester(pool, BLOCK_BYTES).digest(IDS) == BlockDigester(view, BLOCK_BYTES).digest(IDS)


def test_digests_are_equal_when_every_word_has_its_high_bit_set() -> None:
    pool = torch.full((6, BLOCK_BYTES), 0xFF, dtype=torch.uint8)
    view = np.full(6 * BLOCK_BYTES, 0xFF, dtype=np.uint8).data
    assert TorchBlockDigester(pool, BLOCK_BYTES).digest(IDS) == BlockDigester(view, BLOCK_BYTES).digest(IDS)


def test_digests_are_equal_when_scratch_allows_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.arange(6 * BLOCK_BYTES // 4, dtype=torch.int32)
    whole = TorchBlockDigester(pool, BLOCK_BYTES).digest(IDS)
    monkeypatch.setattr(integrity_torch, "SCRATCH_BYTES_MAX", 1)
    assert TorchBlockDigester(pool, BLOCK_BYTES).digest(IDS) == whole


def test_digester_refuses_when_the_pool_is_not_contiguous() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        TorchBlockDigester(torch.zeros(8, 8)[:, :4], 32)


def test_cleared_blocks_are_zero_and_others_are_not() -> None:
    pool = torch.full((6, BLOCK_BYTES), 0xFF, dtype=torch.uint8)
    TorchBlockDigester(pool, BLOCK_BYTES).clear([BlockId(1), BlockId(4)])
    assert [bool(block.any()) for block in pool] == [True, False, True, True, False, True]
