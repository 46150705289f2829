"""What `validate` and `up` refuse before anything starts, and with which line and key."""

import json
import struct
from pathlib import Path

import pytest

from cluster.cli_prepare import prepare
from core.errors import ConfigError, ModelLoadError

BLOCK_BYTES = 16 * 1 * 2 * 1 * 8 * 4
"""16 positions, 1 layer, keys and values, 1 head of 8 float32."""


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    """A YAML beside the smallest possible model: one layer, 9 tokens, 64 positions."""
    model = tmp_path / "tiny"
    model.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 1, "model_type": "llama",
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(_safetensors())
    vocab = {"model": {"type": "BPE", "vocab": {chr(97 + index): index for index in range(9)}, "merges": []}}
    (model / "tokenizer.json").write_text(json.dumps(vocab | {"added_tokens": []}))
    (model / "tokenizer_config.json").write_text("{}")
    file = tmp_path / "tiny.yaml"
    file.write_text("schema_version: 1\nname: tiny\nmodel:\n  path: tiny\nkv:\n  device_blocks: 4\n")
    return file


def _safetensors() -> bytes:
    layer = "model.layers.0"
    shapes = {"model.embed_tokens.weight": [9, 8], "model.norm.weight": [8]}
    shapes |= {f"{layer}.{norm}_layernorm.weight": [8] for norm in ("input", "post_attention")}
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": [8, 8] for name in "qkvo"}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": [8, 8] for name in ("gate", "up", "down")}
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


def test_cluster_is_described_when_everything_fits(cluster_file: Path) -> None:
    prepared = prepare(cluster_file, ["kv.device_blocks=1048576"])
    assert prepared.block_bytes() == BLOCK_BYTES
    assert prepared.model_path == cluster_file.parent / "tiny"
    assert prepared.describe().splitlines() == [
        "cluster tiny: disaggregated, 1 prefill and 1 decode worker(s), exact numerics",
        f"model tiny: LlamaForCausalLM of 1 layers in {cluster_file.parent}/tiny",
        "KV per worker: 1048576 blocks of 16 tokens, 1.00 GiB",
    ]


def test_block_is_half_as_large_when_the_yaml_chooses_bfloat16(cluster_file: Path) -> None:
    assert prepare(cluster_file, ["model.dtype=bfloat16"]).block_bytes() == BLOCK_BYTES // 2


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.max_model_len=65", "kv.device_blocks=9"], "--set:1: model.max_model_len: 65 tokens are more"),
        (["kv.device_blocks=null", "kv.device_gib=1.0e-9"], "--set:2: kv.device_gib: the pool holds 0 tokens"),
        (["transfer.transport=memory"], "--set:1: transfer.transport: memory moves KV inside one process only"),
    ],
)  # fmt: skip
def test_configuration_is_refused_when_it_does_not_fit_the_model(
    cluster_file: Path, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(cluster_file, overrides)
    assert str(caught.value).startswith(expected)


def test_error_names_the_field_when_the_model_is_damaged(cluster_file: Path) -> None:
    weights = cluster_file.parent / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        prepare(cluster_file, [])
    with pytest.raises(ModelLoadError, match=r"model\.path"):
        prepare(cluster_file, ["model.path=missing"])
