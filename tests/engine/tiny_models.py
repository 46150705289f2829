"""Small random models made with transformers, and their configuration as the engine reads it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.model.config import ModelConfig, RopeScaling
from engine.model.families import interpret_config
from engine.model.fields import Fields

LLAMA3 = RopeScaling(
    kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
LINEAR = RopeScaling(kind="linear", factor=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A reference model, its configuration and its weights by name."""

    reference: Any
    config: ModelConfig
    weights: dict[str, torch.Tensor]

    def reference_logits(self, token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> torch.Tensor:
        """[positions, vocab size] of transformers for one whole sequence."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.from_numpy(token_ids).long()[None]).logits[0]
        return logits


def make_tiny_model(
    *, tied: bool = True, bias: bool = False, head_dim: int = 16, rope_scaling: RopeScaling | None = None, seed: int = 0
) -> TinyModel:
    """Six query heads over two KV heads (grouped), three layers, large random weights."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 10_000.0}
    if rope_scaling is not None:
        rope |= {"rope_type": rope_scaling.kind, "factor": rope_scaling.factor}
    if rope_scaling is LLAMA3:
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    torch.manual_seed(seed)
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=head_dim,
            max_position_embeddings=1024,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            attention_bias=bias,
            mlp_bias=bias,
            rope_parameters=rope,
            rms_norm_eps=1e-6,
        )
    ).eval()
    weights = _randomise(reference)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=rope_scaling,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        bos_token_id=None,
        eos_token_ids=(),
        dtype="float32",
    )
    return TinyModel(reference=reference, config=config, weights=weights)


FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}


def make_tiny_family(family: Literal["qwen2", "qwen3", "gemma3"], *, seed: int = 0, **changes: Any) -> TinyModel:
    """Like `make_tiny_model`; heads of 20 except Qwen2's. changes: of transformers' configuration."""
    config_class, model_class = FAMILIES[family]
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family != "qwen2":
        values["head_dim"] = 20
    if family == "gemma3":
        values["query_pre_attn_scalar"] = 24  # not head_dim, as in the large models of the family
    torch.manual_seed(seed)
    reference = model_class(config_class(**(values | changes))).eval()
    reference.set_attn_implementation("eager")
    reference.config.architectures = [model_class.__name__]
    fields = Fields(Path("tiny"), "config.json", json.loads(reference.config.to_json_string(use_diff=False)))
    return TinyModel(reference=reference, config=interpret_config(fields), weights=_randomise(reference))


def gemma_layers(kinds: str) -> dict[str, Any]:
    """Changes for `make_tiny_family`: one letter per layer, f for full attention and w for a window."""
    types = {"f": "full_attention", "w": "sliding_attention"}
    return {"num_hidden_layers": len(kinds), "layer_types": [types[kind] for kind in kinds]}


def _randomise(reference: Any) -> dict[str, torch.Tensor]:
    """Its weights by name, shared with it; biases and norms made random, too."""
    weights = {name: tensor.detach() for name, tensor in reference.state_dict().items()}
    for name, tensor in weights.items():
        if name.endswith((".bias", "norm.weight")):
            tensor.add_(torch.randn(tensor.shape) * 0.2)
    return weights


def random_tokens(length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32[length] ids below 97."""
    return np.random.default_rng(seed).integers(0, 97, length).astype(np.int32)
