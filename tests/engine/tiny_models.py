"""Small random Llamas made with transformers, and their configuration as the engine reads it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model.config import ModelConfig, RopeScaling

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
    weights = {name: tensor.detach() for name, tensor in reference.state_dict().items()}
    for name, tensor in weights.items():
        if name.endswith((".bias", "norm.weight")):
            tensor.add_(torch.randn(tensor.shape) * 0.2)
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


def random_tokens(length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32[length] ids below 97."""
    return np.random.default_rng(seed).integers(0, 97, length).astype(np.int32)
