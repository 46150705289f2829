"""Weights of a Hugging Face directory as torch tensors.

Knows nothing about layers, fusing or sharding over devices: names and shapes are those of the checkpoint.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from core.errors import ModelLoadError
from engine.model.checkpoint import locate_tensors
from engine.model.config import ModelConfig


def load_weights(path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of `checkpoint.expected_tensors(config)` by its Hugging Face name, in `dtype` on `device`.

    With tied embeddings there is no `lm_head.weight`. A CPU tensor that is stored in `dtype` already may be backed by
    the mapped file, so that processes share its pages: do not write to it. Raises ModelLoadError.
    """
    entries = locate_tensors(path, config)
    by_file: dict[str, list[str]] = {}
    for name, entry in entries.items():
        by_file.setdefault(entry.file, []).append(name)
    weights: dict[str, torch.Tensor] = {}
    for file, names in sorted(by_file.items()):
        try:
            with safe_open(path / file, framework="pt", device=str(device)) as tensors:
                for name in names:
                    weights[name] = tensors.get_tensor(name).to(dtype)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(path=path, file=file, field="content", problem=str(error)) from error
    return {name: weights[name] for name in entries}
