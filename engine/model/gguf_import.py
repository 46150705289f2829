"""Turn a llama-family GGUF file into an ordinary Hugging Face directory: safetensors, configs and tokenizer.

Dequantises one tensor at a time, writes beside the target and renames, so that a crash leaves nothing half-made and any
number of processes may import at once. Needs no torch. Knows nothing about where GGUF files come from or how
directories are named.
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from core.errors import ModelLoadError
from engine.model.checkpoint import SINGLE_FILE, Shape
from engine.model.directory import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    check_directory,
)
from engine.model.gguf_tokenizer import GgufTokenizer, TokenizerFieldError, read_tokenizer

IMPORT_WAIT_S_MAX = 900.0
"""How long to wait for another process that imports the same model."""
_LOCK_POLL_S = 0.1

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Stored as they are; everything else is dequantised to float32.
_PLAIN_DTYPES = {GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gguf:
    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]

    def error(self, field: str, problem: str) -> ModelLoadError:
        return ModelLoadError(path=self.path.parent, file=self.path.name, field=field, problem=problem)

    def require(self, key: str) -> Any:
        value = self.fields.get(f"llama.{key}")
        if value is None:
            raise self.error(f"llama.{key}", "is missing")
        return value


def import_gguf(source: Path, target: Path) -> Path:
    """Write the model in GGUF file `source` as Hugging Face directory `target`, unless that exists; returns `target`.

    Raises ModelLoadError for anything in the file that is damaged or not supported, naming its field, and when `target`
    cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target):
            if not target.exists():
                _import_under_lock(source, target)
    except OSError as error:
        problem = f"cannot be written: {error}"
        raise ModelLoadError(path=target, file=".", field="directory", problem=problem) from error
    return target


def _import_under_lock(source: Path, target: Path) -> None:
    part = target.parent / f".{target.name}.part"
    if part.exists():  # of an import that died: who holds the lock is alone
        shutil.rmtree(part)
    part.mkdir()
    try:
        _write_directory(_open(source), part)
        check_directory(part)
        for file in part.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        part.rename(target)
    except BaseException:
        shutil.rmtree(part)
        raise


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel frees it when its holder dies."""
    deadline = time.monotonic() + IMPORT_WAIT_S_MAX
    with (target.parent / f".{target.name}.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    problem = f"another process still imports it after {IMPORT_WAIT_S_MAX:.0f} s"
                    raise ModelLoadError(path=target, file=file.name, field="lock", problem=problem) from error
                time.sleep(_LOCK_POLL_S)
        yield


def _open(source: Path) -> _Gguf:
    try:
        reader = GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        problem = f"is missing, truncated or not a GGUF file: {error}"
        raise ModelLoadError(path=source.parent, file=source.name, field="header", problem=problem) from error
    gguf = _Gguf(path=source, fields=fields, tensors={tensor.name: tensor for tensor in reader.tensors})
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise gguf.error("general.architecture", f"is {architecture!r}; supported: llama")
    return gguf


def _write_directory(gguf: _Gguf, directory: Path) -> None:
    try:
        tokenizer = read_tokenizer(gguf.fields, int(gguf.require("context_length")))
    except TokenizerFieldError as error:
        raise gguf.error(error.field, error.problem) from error
    config = _config(gguf, tokenizer)
    generation: dict[str, object] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(directory / CONFIG_FILE, config)
    _write_json(directory / GENERATION_CONFIG_FILE, generation)
    _write_json(directory / TOKENIZER_CONFIG_FILE, tokenizer.config)
    (directory / TOKENIZER_FILE).write_text(tokenizer.tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_weights(gguf, directory / SINGLE_FILE)


def _config(gguf: _Gguf, tokenizer: GgufTokenizer) -> dict[str, Any]:
    heads, hidden = int(gguf.require("attention.head_count")), int(gguf.require("embedding_length"))
    head_dim = int(gguf.fields.get("llama.attention.key_length") or hidden // heads)
    if (rotated := int(gguf.fields.get("llama.rope.dimension_count") or head_dim)) != head_dim:
        raise gguf.error("llama.rope.dimension_count", f"is {rotated}; supported: all {head_dim} of a head")
    if "token_embd.weight" not in gguf.tensors:
        raise gguf.error("token_embd.weight", "tensor is missing")
    kinds = {tensor.tensor_type for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    theta = _shortest(gguf.fields.get("llama.rope.freq_base", 10_000.0))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(gguf.tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": int(gguf.require("feed_forward_length")),
        "num_hidden_layers": int(gguf.require("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(gguf.fields.get("llama.attention.head_count_kv") or heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(gguf.require("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(gguf, theta, head_dim),
        "max_position_embeddings": int(gguf.require("context_length")),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "torch_dtype": "bfloat16" if kinds == {GGMLQuantizationType.BF16} else "float32",
    }
    if tokenizer.bos_token_id is not None:
        config["bos_token_id"] = tokenizer.bos_token_id
    if tokenizer.eos_token_id is not None:
        config["eos_token_id"] = tokenizer.eos_token_id
    return config


def _rope_scaling(gguf: _Gguf, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = gguf.fields.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(gguf.require("rope.scaling.factor"))}
    if kind != "none":
        raise gguf.error("llama.rope.scaling.type", f"is {kind!r}; supported: none, linear")
    if _ROPE_FACTORS not in gguf.tensors:
        return None
    # GGUF keeps only the divisors that Llama 3's scaling comes to; the models share all its parameters but the factor.
    factors = np.asarray(gguf.tensors[_ROPE_FACTORS].data, dtype=np.float32)
    factor = _shortest(factors.max())
    if not np.allclose(factors, _llama3_divisors(theta, head_dim, factor), rtol=1e-4):
        raise gguf.error(_ROPE_FACTORS, "does not match Llama 3's rope scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """float64[head_dim / 2]: what Llama 3.1's scaling divides each rotary frequency by."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _write_weights(gguf: _Gguf, file: Path) -> None:
    """Two passes: names, dtypes and shapes into the header, then one tensor after the other."""
    sources = {_hf_name(gguf, name): tensor for name, tensor in gguf.tensors.items() if name != _ROPE_FACTORS}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in sources.items():
        dtype = _PLAIN_DTYPES.get(tensor.tensor_type, "F32")
        begin, end = end, end + int(tensor.n_elements) * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": list(_shape(tensor)), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in sources.items():
            out.write(_content(gguf, name, tensor).tobytes())


def _hf_name(gguf: _Gguf, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        mapped = _LAYER_NAMES.get(match[2])
        hf_stem = mapped and f"model.layers.{match[1]}.{mapped}"
    else:
        hf_stem = _TOP_NAMES.get(stem)
    if hf_stem is None or kind not in ("weight", "bias"):
        raise gguf.error(name, "tensor has no place in a Llama model")
    return f"{hf_stem}.{kind}"


def _shape(tensor: ReaderTensor) -> Shape:
    return tuple(int(size) for size in reversed(tensor.shape))


def _content(gguf: _Gguf, name: str, tensor: ReaderTensor) -> NDArray[Any]:
    """float32, float16, or bfloat16 as uint16; in Hugging Face's order of rows."""
    try:
        if tensor.tensor_type in _PLAIN_DTYPES:
            values = np.ascontiguousarray(tensor.data).view(np.uint16).reshape(_shape(tensor))
        else:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
    except (NotImplementedError, ValueError) as error:
        raise gguf.error(tensor.name, f"cannot be dequantised: {error}") from error
    heads = int(gguf.require("attention.head_count"))
    if ".q_proj." in name:
        return _unpermute(values, heads)
    if ".k_proj." in name:
        return _unpermute(values, int(gguf.fields.get("llama.attention.head_count_kv") or heads))
    return values


def _unpermute(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """llama.cpp interleaves the two halves of each head's rotary pairs: [head, pair, half] -> [head, half, pair]."""
    split = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def _shortest(value: Any) -> float:
    """GGUF holds float32; its shortest decimal is the number that was meant (1e-05, not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
