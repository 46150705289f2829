"""The Llama family as a function over the flat tokens of a plan.

    one layer:  norm, q|k|v product, rotate q and k, attention, o product, add;
                norm, gate|up product, silu(gate) * up, down product, add

Products side by side are fused at load. The last layer goes on after attention only with the rows that sample, and so
does the LM head. Knows nothing about plans, sequences or sampling.
"""

from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F

from engine.attention.base import Attention, Metadata
from engine.model.config import ModelConfig
from engine.model.rotary import Rotary
from engine.numerics import Kernel, Numerics, Product

Weights = dict[str, torch.Tensor]


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32.

    It is the layer norm of (x, -x), whose mean is zero and whose variance is mean(x^2): one kernel instead of five, and
    between two products each kernel costs as much as fetching its code does.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float().expand(2, -1).contiguous()
        self._signs = {
            dtype: torch.tensor([[1.0], [-1.0]], dtype=dtype, device=weight.device)
            for dtype in (torch.float32, torch.bfloat16)
        }
        self._eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [T, hidden size]; returns a view of a fresh tensor in the same dtype."""
        both = hidden.unsqueeze(1) * self._signs[hidden.dtype]
        return F.layer_norm(both, self._weight.shape, self._weight, None, self._eps)[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """One decoder layer, its products fused."""

    attention_norm: RmsNorm
    qkv: Kernel
    output: Kernel
    mlp_norm: RmsNorm
    gate_up: Kernel
    down: Kernel


def product_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(N, K) of the fused products of a layer and of the LM head."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        (queries + 2 * keys, config.hidden_size),
        (config.hidden_size, queries),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
        (config.vocab_size, config.hidden_size),
    )


class Llama(Generic[Metadata]):
    """Weights of one model and its forward pass. `layers`, `attention` and `head` may be wrapped, for measurements."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        numerics: Numerics,
        attention: Attention[Metadata],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._config = config
        self.attention = attention
        self._embeddings = weights["model.embed_tokens.weight"].to(device)
        self.layers = [self._load_layer(weights, index, numerics, device) for index in range(config.num_layers)]
        self._norm = RmsNorm(weights["model.norm.weight"].to(device), config.rms_norm_eps)
        head = self._embeddings if config.tie_word_embeddings else weights["lm_head.weight"].to(device)
        self.head: Kernel = Product(head, None, numerics)
        self._rotary = Rotary(config, max_model_len=max_model_len, device=device)

    def _load_layer(self, weights: Weights, index: int, numerics: Numerics, device: torch.device) -> LlamaLayer:
        prefix = f"model.layers.{index}."

        def product(*names: str) -> Product:
            parts = [weights[f"{prefix}{name}.weight"] for name in names]
            biases = [weights[key] for name in names if (key := f"{prefix}{name}.bias") in weights]
            bias = torch.cat(biases).to(device) if biases else None
            return Product(torch.cat(parts).to(device), bias, numerics)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights[f"{prefix}{name}.weight"].to(device), self._config.rms_norm_eps)

        return LlamaLayer(
            attention_norm=norm("input_layernorm"),
            qkv=product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            output=product("self_attn.o_proj"),
            mlp_norm=norm("post_attention_layernorm"),
            gate_up=product("mlp.gate_proj", "mlp.up_proj"),
            down=product("mlp.down_proj"),
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Metadata,
        sample_tokens: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Store the KV of T tokens; logits of the B tokens that sample.

        token_ids, positions: int64[T]; sample_tokens: int64[B], indices into T; dtype: of the activations. Returns
        float32[B, vocab size].
        """
        hidden = F.embedding(token_ids, self._embeddings).to(dtype)
        tables = self._rotary.at(positions, dtype)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, layer, hidden, tables, metadata)
            if index == last and len(sample_tokens) < len(hidden):
                attended, hidden = attended[sample_tokens], hidden[sample_tokens]
            if len(hidden):
                hidden = self._finish_layer(layer, attended, hidden)
        if not len(hidden):
            return torch.empty(0, self._config.vocab_size, device=hidden.device)
        return self.head(self._norm(hidden)).float()

    def _attend(
        self,
        index: int,
        layer: LlamaLayer,
        hidden: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        metadata: Metadata,
    ) -> torch.Tensor:
        config = self._config
        qkv = layer.qkv(layer.attention_norm(hidden)).view(tables[0].shape)
        rotated = self._rotary.rotate(qkv, tables)
        queries, keys_values = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        return self.attention.attend(index, queries, keys_values, metadata)

    def _finish_layer(self, layer: LlamaLayer, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        hidden = layer.output(attended).add_(hidden)
        gate_up = layer.gate_up(layer.mlp_norm(hidden))
        gate, up = gate_up.chunk(2, dim=1)
        return layer.down(F.silu(gate).mul_(up)).add_(hidden)
