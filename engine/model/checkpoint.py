"""The safetensors files of a Hugging Face directory: which tensors a model needs, where they lie, if all is whole.

Reads headers only, never a weight. Knows nothing about torch, `config.json` or what a layer computes.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from core.errors import ModelLoadError
from engine.model.config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000
"""Limit of the format itself; a larger length means that the file is not a safetensors file."""
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Supported safetensors dtypes and the bytes of one element."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies."""

    file: str
    """Name of the file within the model's directory."""
    dtype: str
    """Key of `ITEM_BYTES`."""
    shape: Shape
    offset_bytes: int
    """From the start of the file."""
    size_bytes: int


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Hugging Face name -> shape of every tensor that a model of this config has; matrices are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in _norms(config).items():
            shapes[f"{prefix}{name}.weight"] = shape
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if _has_bias(config, name):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes


def _norms(config: ModelConfig) -> dict[str, Shape]:
    """Of one layer. `post_attention_layernorm` is the norm before the MLP, except where results are normed too."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.post_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, Shape] = {name: (config.hidden_size,) for name in names}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    return shapes


def _has_bias(config: ModelConfig, name: str) -> bool:
    if name == "self_attn.o_proj" and config.output_bias is not None:
        return config.output_bias
    return config.attention_bias if name.startswith("self_attn") else config.mlp_bias


def read_json_object(directory: Path, name: str) -> dict[str, object]:
    """The JSON object in `directory / name`; ModelLoadError when it is missing, unreadable or something else."""
    try:
        value = json.loads((directory / name).read_bytes())
    except FileNotFoundError as error:
        raise ModelLoadError(path=directory, file=name, field="file", problem="is missing") from error
    except OSError as error:
        raise ModelLoadError(path=directory, file=name, field="file", problem=f"cannot be read: {error}") from error
    except ValueError as error:
        raise ModelLoadError(path=directory, file=name, field="JSON", problem=f"is not valid: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(path=directory, file=name, field="JSON", problem="is not an object")
    return value


def locate_tensors(directory: Path, config: ModelConfig) -> dict[str, TensorEntry]:
    """Every tensor that `config` needs, by name in sorted order.

    Raises ModelLoadError, naming file and tensor, for a missing or truncated file, a header that is not one, and a
    tensor that is missing, has another shape or dtype, or has no place in the model (ignoring it could change results).
    """
    found = _found_tensors(directory)
    expected = expected_tensors(config)
    where = INDEX_FILE if (directory / INDEX_FILE).exists() else SINGLE_FILE
    for name, shape in sorted(expected.items()):
        entry = found.get(name)
        if entry is None:
            raise ModelLoadError(path=directory, file=where, field=name, problem="tensor is missing")
        if entry.shape != shape:
            problem = f"has shape {list(entry.shape)}, config.json asks for {list(shape)}"
            raise ModelLoadError(path=directory, file=entry.file, field=name, problem=problem)
    for name in sorted(found.keys() - expected.keys()):
        if name == "lm_head.weight":
            _require_tied(directory, found)
        elif not name.endswith(".rotary_emb.inv_freq"):
            problem = "tensor has no place in the model that config.json describes"
            raise ModelLoadError(path=directory, file=found[name].file, field=name, problem=problem)
    return {name: found[name] for name in sorted(expected)}


def read_bytes(directory: Path, entry: TensorEntry, chunk_bytes: int = 1 << 22) -> Iterable[bytes]:
    """Content of one tensor in chunks of at most `chunk_bytes`."""
    try:
        with (directory / entry.file).open("rb") as file:
            file.seek(entry.offset_bytes)
            left = entry.size_bytes
            while left > 0:
                chunk = file.read(min(left, chunk_bytes))
                if not chunk:
                    problem = "shrank while it was read"
                    raise ModelLoadError(path=directory, file=entry.file, field="size", problem=problem)
                left -= len(chunk)
                yield chunk
    except OSError as error:
        problem = f"cannot be read: {error}"
        raise ModelLoadError(path=directory, file=entry.file, field="file", problem=problem) from error


def read_header(directory: Path, name: str) -> dict[str, TensorEntry]:
    """Tensors of one safetensors file; ModelLoadError when the file is missing, truncated or malformed."""
    header, data_start, size = _raw_header(directory, name)
    entries: dict[str, TensorEntry] = {}
    for tensor, value in header.items():
        if tensor != "__metadata__":
            entries[tensor] = _parse_entry(directory, name, tensor, value, data_start)
    end = data_start
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].offset_bytes, item[1].size_bytes)):
        if entry.offset_bytes != end:
            problem = "data_offsets leave a hole or overlap"
            raise ModelLoadError(path=directory, file=name, field=tensor, problem=problem)
        end = entry.offset_bytes + entry.size_bytes
    if size != end:
        state = "is truncated" if size < end else "has bytes beyond its last tensor"
        problem = f"{state}: {size} bytes, its header says {end}"
        raise ModelLoadError(path=directory, file=name, field="size", problem=problem)
    return entries


def _found_tensors(directory: Path) -> dict[str, TensorEntry]:
    if not (directory / INDEX_FILE).exists():
        return read_header(directory, SINGLE_FILE)
    weight_map = read_json_object(directory, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(path=directory, file=INDEX_FILE, field="weight_map", problem="is not a non-empty object")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            problem = f"names {file!r}, which is not the name of a file in this directory"
            raise ModelLoadError(path=directory, file=INDEX_FILE, field=f"weight_map.{tensor}", problem=problem)
    shards = {file: read_header(directory, file) for file in sorted(set(weight_map.values()))}
    found: dict[str, TensorEntry] = {}
    for tensor, file in weight_map.items():
        if tensor not in shards[file]:
            problem = f"tensor is missing, although {INDEX_FILE} places it here"
            raise ModelLoadError(path=directory, file=file, field=tensor, problem=problem)
        found[tensor] = shards[file][tensor]
    return found


def _raw_header(directory: Path, name: str) -> tuple[dict[str, object], int, int]:
    """(header, offset of the first data byte, size of the file in bytes)."""
    try:
        with (directory / name).open("rb") as file:
            length_bytes = file.read(8)
            length = int.from_bytes(length_bytes, "little")
            size = file.seek(0, 2)
            if len(length_bytes) < 8 or length > HEADER_BYTES_MAX or 8 + length > size:
                problem = f"is truncated or not a safetensors file: {size} bytes, header length {length}"
                raise ModelLoadError(path=directory, file=name, field="header", problem=problem)
            file.seek(8)
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise ModelLoadError(path=directory, file=name, field="file", problem="is missing") from error
    except OSError as error:
        raise ModelLoadError(path=directory, file=name, field="file", problem=f"cannot be read: {error}") from error
    except ValueError as error:
        raise ModelLoadError(path=directory, file=name, field="header", problem=f"is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(path=directory, file=name, field="header", problem="is not a JSON object")
    return header, 8 + length, size


def _parse_entry(directory: Path, file: str, tensor: str, value: object, data_start: int) -> TensorEntry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or not isinstance(dtype, str):
        problem = f"header entry is malformed: {value!r}"
        raise ModelLoadError(path=directory, file=file, field=tensor, problem=problem)
    if dtype not in ITEM_BYTES:
        problem = f"has dtype {dtype}; supported are {', '.join(ITEM_BYTES)}"
        raise ModelLoadError(path=directory, file=file, field=tensor, problem=problem)
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        problem = f"spans {end - begin} bytes, {dtype} of shape {shape} needs {math.prod(shape) * ITEM_BYTES[dtype]}"
        raise ModelLoadError(path=directory, file=file, field=tensor, problem=problem)
    return TensorEntry(
        file=file, dtype=dtype, shape=tuple(shape), offset_bytes=data_start + begin, size_bytes=end - begin
    )


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _require_tied(directory: Path, found: dict[str, TensorEntry]) -> None:
    """A tied checkpoint may store the head a second time, but only as the same bytes."""
    head, embedding = found["lm_head.weight"], found["model.embed_tokens.weight"]
    is_same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        a == b for a, b in zip(read_bytes(directory, head), read_bytes(directory, embedding), strict=True)
    )
    if not is_same:
        problem = "differs from model.embed_tokens.weight, although config.json says tie_word_embeddings"
        raise ModelLoadError(path=directory, file=head.file, field="lm_head.weight", problem=problem)
