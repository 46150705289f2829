"""The decoder that all supported families are, as a function over the flat tokens of a plan.

    one layer:  norm, q|k|v product, [norm q and k], rotate q and k, attention, o product, [norm], add;
                norm, gate|up product, activation(gate) * up, down product, [norm], add

What stands in brackets only some families have; a `ModelConfig` says what. Products side by side are fused at load. The
last layer goes on after attention only with the rows that sample, and so does the LM head. Knows nothing about plans,
sequences or sampling.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F

from engine.attention.base import Attention, Metadata
from engine.model.config import ModelConfig
from engine.model.rotary import Rotary
from engine.numerics import Kernel, Numerics, Product, row_exact

Weights = dict[str, torch.Tensor]


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, computed in float32.

    It is the layer norm of (x, -x), whose mean is zero and whose variance is mean(x^2): one kernel instead of five, and
    between two products each kernel costs as much as fetching its code does.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self._weight = (weight.float() + offset).expand(2, -1).contiguous()
        self._signs = {
            dtype: torch.tensor([[1.0], [-1.0]], dtype=dtype, device=weight.device)
            for dtype in (torch.float32, torch.bfloat16)
        }
        self._eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., length of the weight]; returns a view of a fresh tensor in the same dtype."""
        both = hidden.unsqueeze(-2) * self._signs[hidden.dtype]
        return F.layer_norm(both, self._weight.shape, self._weight, None, self._eps).select(-2, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer, its products fused. What a family lacks is None."""

    attention_norm: RmsNorm
    qkv: Kernel
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    rotary: int
    """Which of the decoder's rotary embeddings it uses."""
    output: Kernel
    output_norm: RmsNorm | None
    mlp_norm: RmsNorm
    gate_up: Kernel
    down: Kernel
    down_norm: RmsNorm | None


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


class Decoder(Generic[Metadata]):
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
        self._device = device
        self.attention = attention
        self._embeddings = weights["model.embed_tokens.weight"].to(device)
        scale = torch.tensor(config.hidden_size**0.5).to(self._embeddings.dtype)
        self._embedding_scale = float(scale) if config.scale_embeddings else None
        self.activation = choose_activation(config, numerics)
        self.layers = [self._load_layer(weights, index, numerics) for index in range(config.num_layers)]
        self._norm = self._make_norm(weights["model.norm.weight"])
        head = self._embeddings if config.tie_word_embeddings else weights["lm_head.weight"].to(device)
        self.head: Kernel = Product(head, None, numerics)
        ropes = [(config.rope_theta, config.rope_scaling)]
        if config.window_rope_theta is not None:
            ropes.append((config.window_rope_theta, None))
        self._rotaries = [
            Rotary(config, theta=theta, scaling=scaling, max_model_len=max_model_len, device=device)
            for theta, scaling in ropes
        ]

    def _make_norm(self, weight: torch.Tensor) -> RmsNorm:
        return RmsNorm(weight.to(self._device), self._config.rms_norm_eps, self._config.norm_offset)

    def _load_layer(self, weights: Weights, index: int, numerics: Numerics) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        has_window = bool(config.layer_windows) and config.layer_windows[index] is not None

        def product(*names: str) -> Product:
            parts = [weights[f"{prefix}{name}.weight"] for name in names]
            biases = [weights[key] for name in names if (key := f"{prefix}{name}.bias") in weights]
            bias = torch.cat(biases).to(self._device) if biases else None
            return Product(torch.cat(parts).to(self._device), bias, numerics)

        def norm(name: str) -> RmsNorm:
            return self._make_norm(weights[f"{prefix}{name}.weight"])

        return DecoderLayer(
            attention_norm=norm("input_layernorm"),
            qkv=product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            query_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            key_norm=norm("self_attn.k_norm") if config.qk_norm else None,
            rotary=1 if has_window and config.window_rope_theta is not None else 0,
            output=product("self_attn.o_proj"),
            output_norm=norm("post_attention_layernorm") if config.post_norms else None,
            mlp_norm=norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
            gate_up=product("mlp.gate_proj", "mlp.up_proj"),
            down=product("mlp.down_proj"),
            down_norm=norm("post_feedforward_layernorm") if config.post_norms else None,
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
        hidden = F.embedding(token_ids, self._embeddings)
        if self._embedding_scale is not None:
            hidden = hidden.mul_(self._embedding_scale)
        hidden = hidden.to(dtype)
        tables = [rotary.at(positions, dtype) for rotary in self._rotaries]
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, layer, hidden, tables[layer.rotary], metadata)
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
        layer: DecoderLayer,
        hidden: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        metadata: Metadata,
    ) -> torch.Tensor:
        num_heads = self._config.num_heads
        qkv = layer.qkv(layer.attention_norm(hidden)).view(tables[0].shape)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = qkv[:, :num_heads], qkv[:, num_heads : -self._config.num_kv_heads]
            queries.copy_(layer.query_norm(queries))
            keys.copy_(layer.key_norm(keys))
        rotated = self._rotaries[layer.rotary].rotate(qkv, tables)
        return self.attention.attend(index, rotated[:, :num_heads], rotated[:, num_heads:], metadata)

    def _finish_layer(self, layer: DecoderLayer, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        output = layer.output(attended)
        if layer.output_norm is not None:
            output = layer.output_norm(output)
        hidden = output.add_(hidden)
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=1)
        output = layer.down(self.activation(gate).mul_(up))
        if layer.down_norm is not None:
            output = layer.down_norm(output)
        return output.add_(hidden)


def choose_activation(config: ModelConfig, numerics: Numerics) -> Callable[[torch.Tensor], torch.Tensor]:
    """The MLP's activation; with `exact` in a form that gives a row the same bits in any batch."""
    function = F.silu if config.activation == "silu" else functools.partial(F.gelu, approximate="tanh")
    return row_exact(function) if numerics.mode == "exact" else function
