"""Config, tokenizer and identity of a directory: what is read, and what is refused with file and field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ModelLoadError
from engine.model.config import RopeScaling
from engine.model.directory import IDENTITY_FILE, check_directory, read_config, weight_identity

WriteDirectory = Callable[..., Path]
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def change(path: Path, file: str, **values: Any) -> None:
    content = json.loads((path / file).read_text()) if (path / file).exists() else {}
    (path / file).write_text(json.dumps({**content, **values}))


def expect_refusal(path: Path, file: str, field: str, problem: str = "") -> None:
    with pytest.raises(ModelLoadError) as caught:
        check_directory(path)
    assert (caught.value.fields["file"], caught.value.fields["field"]) == (file, field)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


def test_facts_are_read_when_the_directory_is_whole(write_directory: WriteDirectory) -> None:
    config = check_directory(write_directory())
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 2, 1, 4)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 500.0, None)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (0, (1,), False)


def test_defaults_are_llamas_when_fields_are_absent(write_directory: WriteDirectory) -> None:
    absent = ("num_key_value_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings", "torch_dtype")
    config = read_config(write_directory(config={**dict.fromkeys(absent), "head_dim": 6}))
    assert (config.num_kv_heads, config.rope_theta, config.rms_norm_eps) == (2, 10_000.0, 1e-6)
    assert (config.max_position_embeddings, config.dtype, config.head_dim) == (2048, "float32", 6)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 500.0, RopeScaling(kind="linear", factor=2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, 500.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        ({"rope_parameters": {"rope_theta": 7.0}}, 7.0, None),
        (
            {"rope_parameters": {"rope_theta": 7.0, **LLAMA3}, "rope_theta": None},
            7.0,
            RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=32),
        ),
    ],
)
def test_rope_is_read_when_written_in_either_style(
    write_directory: WriteDirectory, changes: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    config = read_config(write_directory(config=changes))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 6}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 6,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8,
    "num_hidden_layers": 3,
    "rope_theta": None,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def test_qwen_facts_are_read_when_config_does_not_state_them(write_directory: WriteDirectory) -> None:
    qwen2 = check_directory(write_directory("qwen2", config={**QWEN2, "attention_bias": False}))
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = check_directory(write_directory("qwen3", config=QWEN3))
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, None, True, 6)


@pytest.mark.parametrize(
    ("changes", "windows", "thetas", "scaling"),
    [
        ({"sliding_window_pattern": 2}, (8, None, 8), (1_000_000.0, 10_000.0), None),
        ({}, (8, 8, 8), (1_000_000.0, 10_000.0), None),
        ({"sliding_window_pattern": 2, "rope_theta": 50, "rope_local_base_freq": 7}, (8, None, 8), (50.0, 7.0), None),
        ({"layer_types": LAYER_TYPES}, (8, None, 8), (1_000_000.0, 10_000.0), None),
        ({"layer_types": ["full_attention"] * 3, "sliding_window": None}, (), (1_000_000.0, 10_000.0), None),
        (
            {"layer_types": LAYER_TYPES, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            (8, None, 8),
            (1_000_000.0, 10_000.0),
            RopeScaling(kind="linear", factor=8.0),
        ),
        (
            {
                "layer_types": LAYER_TYPES,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
                },
            },
            (8, None, 8),
            (50.0, 7.0),
            RopeScaling(kind="linear", factor=8.0),
        ),
    ],
)
def test_gemma_windows_and_rope_are_read_in_either_style(
    write_directory: WriteDirectory,
    changes: dict[str, Any],
    windows: tuple[int | None, ...],
    thetas: tuple[float, float],
    scaling: RopeScaling | None,
) -> None:
    config = check_directory(write_directory(config={**GEMMA3, "tie_word_embeddings": None, **changes}))
    assert config.layer_windows == windows
    assert (config.rope_theta, config.window_rope_theta, config.rope_scaling) == (*thetas, scaling)
    assert (config.activation, config.norm_offset, config.post_norms, config.qk_norm) == ("gelu_tanh", 1.0, True, True)
    assert (config.scale_embeddings, config.query_pre_attn_scalar, config.tie_word_embeddings) == (True, 256, True)


def test_eos_ids_are_united_when_generation_config_has_more(write_directory: WriteDirectory) -> None:
    path = write_directory(config={"eos_token_id": [1, 3]})
    change(path, "generation_config.json", eos_token_id=[3, 5])
    assert read_config(path).eos_token_ids == (1, 3, 5)


@pytest.mark.parametrize(
    ("key", "stored", "run"),
    [("torch_dtype", "bfloat16", "bfloat16"), ("dtype", "bfloat16", "bfloat16"), ("dtype", "float16", "float32")],
)
def test_run_dtype_follows_the_checkpoint(write_directory: WriteDirectory, key: str, stored: str, run: str) -> None:
    assert read_config(write_directory(config={key: stored})).dtype == run


@pytest.mark.parametrize(
    ("values", "field", "problem"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures", "'MistralForCausalLM', which is not supported; "),
        ({"architectures": None}, "architectures", "supported: LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "names 'gptq'"),
        ({"hidden_act": "gelu"}, "hidden_act", "supported: silu"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype", "supported checkpoints: float32, bfloat16, float16"),
        ({"dtype": "int8"}, "dtype", "is 'int8'"),
        ({"hidden_size": None}, "hidden_size", "is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers", "must be a positive integer, is '2'"),
        ({"num_attention_heads": True}, "num_attention_heads", "must be a positive integer"),
        ({"num_key_value_heads": 4}, "num_key_value_heads", "does not divide"),
        ({"head_dim": 3}, "head_dim", "must be even"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "head_dim", "has a rest"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps", "must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "must be true or false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type", "is 'yarn'; supported"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.type", "is 'dynamic'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type", "is missing"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "is missing"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_parameters.high_freq_factor", "must exceed"),
        ({"rope_scaling": "linear"}, "rope_scaling", "must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "is not supported"),
        ({"eos_token_id": 12}, "eos_token_id", "in [0, 12), holds 12"),
        ({"model_type": "mistral"}, "model_type", "is 'mistral', which is not what LlamaForCausalLM has: llama"),
        ({"num_local_experts": 8}, "num_local_experts", "is 8, which is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types", "must be a list of 2 entries"),
        ({"layer_types": LAYER_TYPES[:2]}, "layer_types", "LlamaForCausalLM supports: full_attention"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention", "layers of different rotary"),
        ({"rope_parameters": {}, "rope_scaling": {"rope_type": "default"}}, "rope_scaling", "one of the two"),
        ({**QWEN2, "use_sliding_window": True}, "use_sliding_window", "is True, which is not supported"),
        ({**QWEN2, "num_key_value_heads": None}, "num_key_value_heads", "is missing"),
        ({**QWEN2, "max_position_embeddings": None}, "max_position_embeddings", "is missing"),
        ({**QWEN3, "head_dim": None}, "head_dim", "is missing"),
        ({**QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "is 'yarn'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architectures", "which is not supported; supported: Llama"),
        ({**GEMMA3, "final_logit_softcapping": 30.0}, "final_logit_softcapping", "is 30.0, which is not supported"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "is 50.0, which is not supported"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention", "is not supported"),
        ({**GEMMA3, "hidden_activation": "silu"}, "hidden_activation", "supported: gelu_pytorch_tanh"),
        ({**GEMMA3, "sliding_window": None}, "sliding_window", "is missing"),
        ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern", "must be a positive integer"),
        ({**GEMMA3, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar", "must be a positive integer"),
        ({**GEMMA3, "layer_types": [*LAYER_TYPES[:2], "chunked_attention"]}, "layer_types", "'chunked_attention' for"),
        ({**GEMMA3, "rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta", "the keys are full_att"),
        (
            {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention.rope_type",
            "supported for layers with a window: default",
        ),
    ],
)
def test_field_is_named_when_config_is_not_supported(
    write_directory: WriteDirectory, values: dict[str, Any], field: str, problem: str
) -> None:
    path = write_directory()
    change(path, "config.json", **values)
    expect_refusal(path, "config.json", field, problem)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_file_is_named_when_it_is_not_a_json_object(write_directory: WriteDirectory, file: str, content: bytes) -> None:
    path = write_directory()
    (path / file).write_bytes(content)
    expect_refusal(path, file, "JSON")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_file_is_named_when_it_is_missing(write_directory: WriteDirectory, file: str) -> None:
    path = write_directory()
    (path / file).unlink()
    expect_refusal(path, file, "file", "is missing")


@pytest.mark.parametrize(
    ("values", "field", "problem"),
    [
        ({"model": {"vocab": {"a": 0, "b": 12}}}, "model.vocab", "holds token id 12, outside config.json's vocab_size"),
        ({"model": {"vocab": [["a", 0.0]] * 13}}, "model.vocab", "holds token id 12"),
        ({"model": {"vocab": {}}}, "model.vocab", "is missing or empty"),
        ({"added_tokens": [{"id": 40, "content": "<x>"}]}, "added_tokens", "holds token id 40"),
        ({"added_tokens": ["<x>"]}, "added_tokens", "must be a list of objects"),
    ],
)
def test_tokenizer_is_named_when_it_does_not_fit(
    write_directory: WriteDirectory, values: dict[str, Any], field: str, problem: str
) -> None:
    path = write_directory()
    change(path, "tokenizer.json", **values)
    expect_refusal(path, "tokenizer.json", field, problem)


def test_chat_template_may_be_absent_but_not_of_another_type(write_directory: WriteDirectory) -> None:
    path = write_directory()
    (path / "tokenizer_config.json").write_text("{}")
    check_directory(path)
    change(path, "tokenizer_config.json", chat_template=1)
    expect_refusal(path, "tokenizer_config.json", "chat_template", "must be a string")


def test_path_is_named_when_it_is_not_a_directory(tmp_path: Path) -> None:
    expect_refusal(tmp_path / "absent", ".", "path", "is not a directory")


def test_identity_is_equal_when_only_sharding_or_serving_facts_differ(write_directory: WriteDirectory) -> None:
    identity = weight_identity(write_directory("one"))
    assert weight_identity(write_directory("sharded", num_shards=3)) == identity
    assert weight_identity(write_directory("serving", config={"eos_token_id": [2, 3]})) == identity


def test_identity_differs_when_the_window_or_the_scale_of_scores_does(write_directory: WriteDirectory) -> None:
    changes: list[dict[str, Any]] = [{}, {"sliding_window": 9}, {"query_pre_attn_scalar": 6}]
    paths = [write_directory(f"m{i}", config={**GEMMA3, **values}) for i, values in enumerate(changes)]
    assert len({weight_identity(path) for path in paths}) == 3


@pytest.mark.parametrize("values", [{"rope_theta": 501.0}, {"rms_norm_eps": 1e-6}, {"rope_scaling": LLAMA3}])
def test_identity_differs_when_the_mathematics_do(write_directory: WriteDirectory, values: dict[str, Any]) -> None:
    assert weight_identity(write_directory("one")) != weight_identity(write_directory("other", config=values))


def test_identity_differs_when_one_weight_does(write_directory: WriteDirectory) -> None:
    norms = [np.full(8, value, np.float32) for value in (1.0, 1.0000001)]
    first, second = (
        weight_identity(write_directory(f"m{i}", tensors={"model.norm.weight": norm})) for i, norm in enumerate(norms)
    )
    assert first != second


def test_kept_identity_is_used_only_while_the_files_are_unchanged(write_directory: WriteDirectory) -> None:
    path = write_directory()
    identity = weight_identity(path)
    change(path, IDENTITY_FILE, identity="kept")
    assert weight_identity(path) == "kept"
    change(path, "config.json", rope_theta=501.0)
    assert weight_identity(path) not in ("kept", identity)
    (path / IDENTITY_FILE).write_text("{torn")
    change(path, "config.json", rope_theta=500.0)
    assert weight_identity(path) == identity
