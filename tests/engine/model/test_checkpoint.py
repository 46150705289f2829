"""Damaged or unfitting weight files are refused with the file and the tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import ModelLoadError
from engine.model.checkpoint import INDEX_FILE, SINGLE_FILE, locate_tensors, read_bytes, read_header
from engine.model.directory import read_config

WriteDirectory = Callable[..., Path]
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


def refusal(path: Path) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as caught:
        locate_tensors(path, read_config(path))
    return caught.value


def expect(error: ModelLoadError, file: str, field: str, problem: str) -> None:
    assert (error.fields["file"], error.fields["field"]) == (file, field)
    assert problem in str(error)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_content_is_found_when_weights_lie_in_shards(write_directory: WriteDirectory, num_shards: int) -> None:
    norm = np.arange(8, dtype=np.float32)
    path = write_directory(tensors={NORM: norm}, num_shards=num_shards)
    entries = locate_tensors(path, read_config(path))
    assert b"".join(read_bytes(path, entries[NORM], chunk_bytes=5)) == norm.tobytes()
    assert len(entries) == 3 + 2 * 9


def test_file_is_named_when_a_shard_is_missing(write_directory: WriteDirectory) -> None:
    path = write_directory(num_shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    expect(refusal(path), "model-00002-of-00003.safetensors", "file", "is missing")


def test_file_is_named_when_there_are_no_weights(write_directory: WriteDirectory) -> None:
    path = write_directory()
    (path / SINGLE_FILE).unlink()
    expect(refusal(path), SINGLE_FILE, "file", "is missing")


def test_sizes_are_named_when_a_shard_is_truncated(write_directory: WriteDirectory) -> None:
    path = write_directory(num_shards=2)
    file = path / "model-00001-of-00002.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    expect(refusal(path), file.name, "size", f"is truncated: {size - 1} bytes, its header says {size}")


def test_file_is_named_when_bytes_follow_the_last_tensor(write_directory: WriteDirectory) -> None:
    path = write_directory()
    file = path / SINGLE_FILE
    file.write_bytes(file.read_bytes() + b"\0")
    expect(refusal(path), SINGLE_FILE, "size", "bytes beyond its last tensor")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (None, "tensor is missing"),
        (np.zeros(7, np.float32), "has shape [7], config.json asks for [8]"),
        (np.zeros(8, np.int64), "has dtype I64; supported are F32, F16, BF16"),
    ],
)
def test_tensor_is_named_when_it_does_not_fit(write_directory: WriteDirectory, values: Any, problem: str) -> None:
    expect(refusal(write_directory(tensors={NORM: values})), SINGLE_FILE, NORM, problem)


def test_tensor_is_named_when_the_config_has_no_place_for_it(write_directory: WriteDirectory) -> None:
    extra = "model.layers.0.self_attn.q_proj.bias"
    error = refusal(write_directory(tensors={extra: np.zeros(8, np.float32)}))
    expect(error, SINGLE_FILE, extra, "has no place in the model")


def test_biases_are_expected_when_the_config_has_them(write_directory: WriteDirectory) -> None:
    path = write_directory(config={"attention_bias": True, "mlp_bias": True})
    entries = locate_tensors(path, read_config(path))
    assert entries["model.layers.1.self_attn.k_proj.bias"].shape == (4,)
    assert entries["model.layers.0.mlp.down_proj.bias"].shape == (8,)


def test_stored_head_is_accepted_only_when_it_equals_a_tied_embedding(write_directory: WriteDirectory) -> None:
    tied = {"tie_word_embeddings": True}
    weights = np.arange(96, dtype=np.float32).reshape(12, 8)
    same = write_directory("same", config=tied, tensors={EMBEDDING: weights, "lm_head.weight": weights})
    assert "lm_head.weight" not in locate_tensors(same, read_config(same))
    other = write_directory("other", config=tied, tensors={EMBEDDING: weights, "lm_head.weight": weights + 1})
    expect(refusal(other), SINGLE_FILE, "lm_head.weight", "differs from model.embed_tokens.weight")


def test_entry_is_named_when_the_index_leaves_the_directory(write_directory: WriteDirectory) -> None:
    path = write_directory(num_shards=2)
    index = json.loads((path / INDEX_FILE).read_text())
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    (path / INDEX_FILE).write_text(json.dumps(index))
    expect(refusal(path), INDEX_FILE, f"weight_map.{NORM}", "not the name of a file in this directory")


def test_shard_is_named_when_the_index_places_a_tensor_wrongly(write_directory: WriteDirectory) -> None:
    path = write_directory(num_shards=2)
    index = json.loads((path / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    wrong = files[1 - files.index(index["weight_map"][NORM])]
    index["weight_map"][NORM] = wrong
    (path / INDEX_FILE).write_text(json.dumps(index))
    expect(refusal(path), wrong, NORM, "places it here")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 1}'])
def test_index_is_named_when_it_is_malformed(write_directory: WriteDirectory, content: str) -> None:
    path = write_directory()
    (path / INDEX_FILE).write_text(content)
    assert refusal(path).fields["file"] == INDEX_FILE


@pytest.mark.parametrize("offsets", [[0, 4], [4, 36], [-1, 31]])
def test_tensor_is_named_when_its_offsets_are_wrong(tmp_path: Path, offsets: list[int]) -> None:
    header = json.dumps({NORM: {"dtype": "F32", "shape": [8], "data_offsets": offsets}}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(36))
    with pytest.raises(ModelLoadError) as caught:
        read_header(tmp_path, SINGLE_FILE)
    assert (caught.value.fields["file"], caught.value.fields["field"]) == (SINGLE_FILE, NORM)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_only_model_errors_come_out_when_header_bytes_change(tmp_path: Path, data: st.DataObject) -> None:
    """Any damage to the header is either noticed as a ModelLoadError or leaves a header that fits the file."""
    tensor = {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}
    header = json.dumps({NORM: tensor}).encode()
    content = bytearray(len(header).to_bytes(8, "little") + header + bytes(32))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 8 + len(header) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / SINGLE_FILE).write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        entries = read_header(tmp_path, SINGLE_FILE)
    except ModelLoadError as error:
        assert error.fields["file"] == SINGLE_FILE
    else:
        assert sum(entry.size_bytes for entry in entries.values()) in (0, 32)
