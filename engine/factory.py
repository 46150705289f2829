"""From a model directory to a runner that is warm: the one call a process makes to get an engine.

Knows nothing about roles, transfer or links.
"""

from pathlib import Path
from typing import Literal

import torch

from core.errors import ModelLoadError
from core.layout import KvDtype
from engine.kv.cache import TORCH_DTYPES
from engine.model.directory import read_config
from engine.model.loader import load_weights
from engine.numerics import NumericsMode
from engine.runner import TorchRunner

Device = Literal["cpu", "cuda"]


def load_runner(
    path: Path,
    *,
    dtype: KvDtype,
    device: Device,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    numerics: NumericsMode,
    threads: int | None,
) -> TorchRunner:
    """Load the weights of `path` and warm the runner up. Raises ModelLoadError or NumericsError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(path=path, file="configuration", field="model.device", problem="torch sees no CUDA device")
    config = read_config(path)
    target = torch.device(device)
    runner = TorchRunner(
        config,
        load_weights(path, config, TORCH_DTYPES[dtype], target),
        dtype=dtype,
        device=target,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        numerics=numerics,
        threads=threads,
    )
    runner.warm_up()
    return runner
