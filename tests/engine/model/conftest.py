"""Tiny models on disk: a Hugging Face directory and a GGUF file, both with seeded weights."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from engine.model.catalog import CACHE_VARIABLE, import_model
from engine.model.checkpoint import INDEX_FILE, SINGLE_FILE, expected_tensors
from engine.model.directory import read_config

Tensors = dict[str, NDArray[Any]]
WriteDirectory = Callable[..., Path]
WriteGguf = Callable[..., Path]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TOKENIZER: dict[str, Any] = {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 11}, "merges": []}}


@pytest.fixture
def write_directory(tmp_path: Path) -> WriteDirectory:
    """Returns a function that writes a whole directory, with changes: a value of None removes the key or tensor."""

    def write(
        name: str = "model",
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, NDArray[Any] | None] | None = None,
        num_shards: int = 1,
        dtype: str = "float32",
    ) -> Path:
        path = tmp_path / name
        path.mkdir()
        merged = {key: value for key, value in {**CONFIG, **(config or {})}.items() if value is not None}
        (path / "config.json").write_text(json.dumps(merged))
        (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
        rng = np.random.default_rng(7)
        shapes = expected_tensors(read_config(path))
        weights: Mapping[str, NDArray[Any] | None] = {
            name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()
        }
        _write_weights(path, {k: v for k, v in {**weights, **(tensors or {})}.items() if v is not None}, num_shards)
        return path

    return write


def _write_weights(path: Path, tensors: Tensors, num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, path / SINGLE_FILE)
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for index in range(num_shards):
        file = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[index::num_shards]}, path / file)
        weight_map |= dict.fromkeys(names[index::num_shards], file)
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


GGUF_HIDDEN, GGUF_HEADS, GGUF_KV_HEADS, GGUF_INNER = 32, 4, 2, 64


def byte_level_tokens() -> list[str]:
    """Two control tokens, the 256 bytes, two merges and a user-defined token."""
    return ["<s>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab", "<tool>"]


@pytest.fixture
def gguf_tensors() -> Tensors:
    """Seeded weights by GGUF name, one layer, untied, in llama.cpp's row order."""
    rng = np.random.default_rng(11)
    hidden, key = GGUF_HIDDEN, GGUF_HIDDEN // GGUF_HEADS * GGUF_KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(byte_level_tokens()), hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (len(byte_level_tokens()), hidden),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (hidden, hidden),
        "blk.0.attn_k.weight": (key, hidden),
        "blk.0.attn_v.weight": (key, hidden),
        "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.ffn_gate.weight": (GGUF_INNER, hidden),
        "blk.0.ffn_up.weight": (GGUF_INNER, hidden),
        "blk.0.ffn_down.weight": (hidden, GGUF_INNER),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def write_gguf(tmp_path: Path, gguf_tensors: Tensors) -> WriteGguf:
    """Returns a function that writes a GGUF file; changes of None remove a tensor, `quantized` names Q8_0 tensors."""

    def write(
        name: str = "tiny.gguf",
        *,
        architecture: str = "llama",
        pre: str = "smollm",
        rope_theta: float = 10_000.0,
        strings: Mapping[str, str] | None = None,
        tensors: Mapping[str, NDArray[Any] | None] | None = None,
        quantized: frozenset[str] = frozenset(),
    ) -> Path:
        writer = GGUFWriter(tmp_path / name, architecture)
        writer.add_context_length(128)
        writer.add_embedding_length(GGUF_HIDDEN)
        writer.add_block_count(1)
        writer.add_feed_forward_length(GGUF_INNER)
        writer.add_head_count(GGUF_HEADS)
        writer.add_head_count_kv(GGUF_KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(rope_theta)
        for key, value in (strings or {}).items():
            writer.add_string(key, value)
        _add_tokenizer(writer, pre)
        for key, values in {**gguf_tensors, **(tensors or {})}.items():
            if values is None:
                continue
            if key in quantized:
                kind = GGMLQuantizationType.Q8_0
                writer.add_tensor(key, quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(key, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


def _add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    tokens = byte_level_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 3), 4])
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bundled model's directory: in the cache that `PDCLUSTER_CACHE` names, else in one of this run."""
    with pytest.MonkeyPatch.context() as patch:
        if CACHE_VARIABLE not in os.environ:
            patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("models")))
        yield import_model("smollm2")
