"""Weights arrive under their names, with their values, in the wanted dtype."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from core.errors import ModelLoadError
from engine.model.checkpoint import SINGLE_FILE, expected_tensors
from engine.model.directory import read_config
from engine.model.loader import load_weights

pytestmark = pytest.mark.torch

WriteDirectory = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_values_are_exact_when_loaded_as_float32(write_directory: WriteDirectory, num_shards: int, stored: str) -> None:
    path = write_directory(num_shards=num_shards, dtype=stored)
    config = read_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    source = {name: values for file in path.glob("*.safetensors") for name, values in load_file(file).items()}
    assert weights.keys() == expected_tensors(config).keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(tensor.numpy(), source[name].astype(np.float32))


def test_values_are_rounded_when_loaded_as_bfloat16(write_directory: WriteDirectory) -> None:
    path = write_directory()
    full = load_weights(path, read_config(path), torch.float32, CPU)
    short = load_weights(path, read_config(path), torch.bfloat16, CPU)
    assert all(torch.equal(short[name], full[name].to(torch.bfloat16)) for name in full)


def test_no_head_is_loaded_when_embeddings_are_tied(write_directory: WriteDirectory) -> None:
    path = write_directory(config={"tie_word_embeddings": True})
    assert "lm_head.weight" not in load_weights(path, read_config(path), torch.float32, CPU)


def test_file_is_named_when_it_was_truncated(write_directory: WriteDirectory) -> None:
    path = write_directory()
    file = path / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelLoadError, match=f"{SINGLE_FILE}: size: is truncated"):
        load_weights(path, read_config(path), torch.float32, CPU)
