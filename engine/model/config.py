"""The shape of a supported model, read from a Hugging Face `config.json` by `families`. Imports no torch.

Knows nothing about where weights lie or how layers compute.
"""

from dataclasses import dataclass
from typing import Literal

from core.layout import BlockLayout, GroupLayout, KvDtype

Architecture = Literal["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3 style frequency scaling, linear scaling, or none of both."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that keep their KV in the same blocks: they need the same positions."""

    window: int | None
    """Positions that a position of these layers attends to, itself included; None: all before it."""
    layers: tuple[int, ...]
    """Their place in this tuple is their place in a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder. The defaults are Llama's; what differs between families are values, not classes."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    """Of the layers without a window."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """Of the products of queries, keys and values, and of the output unless `output_bias` says otherwise."""
    output_bias: bool | None = None
    """Of attention's output product; None: as `attention_bias`."""
    mlp_bias: bool
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qk_norm: bool = False
    """Queries and keys are normed per head before they are rotated."""
    norm_offset: float = 0.0
    """A norm scales by this plus its stored weight."""
    post_norms: bool = False
    """Attention's and the MLP's results are normed before they are added."""
    scale_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size), rounded to their dtype."""
    query_pre_attn_scalar: int | None = None
    """Scores are divided by the root of this; None: of `head_dim`."""
    layer_windows: tuple[int | None, ...] = ()
    """Per layer, the positions it attends to, None for all; empty: all layers attend to all."""
    window_rope_theta: float | None = None
    """Of layers with a window, whose rotary frequencies are not scaled."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Union of config.json's and generation_config.json's."""
    dtype: KvDtype
    """Of the checkpoint; the YAML's `model.dtype` may choose another to run in."""

    @property
    def attention_scale(self) -> float | None:
        """What scores are multiplied with; None: 1 / sqrt(head_dim)."""
        return None if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar**-0.5

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Every layer in exactly one group; layers without a window first.

            F full layers, W window layers:   [full: F)[window: F)[window: F) ... [window: the rest)

        Groups are as long as the first, so that blocks of all groups are of one size. A model whose layers all have the
        same window, or none, is one group.
        """
        by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.layer_windows or (None,) * self.num_layers):
            by_window.setdefault(window, []).append(layer)
        kinds = sorted(by_window.items(), key=lambda item: -1 if item[0] is None else item[0])
        size = len(kinds[0][1])
        return tuple(
            LayerGroup(window=window, layers=tuple(layers[start : start + size]))
            for window, layers in kinds
            for start in range(0, len(layers), size)
        )

    def block_layout(self, block_size: int, dtype: KvDtype) -> BlockLayout:
        """Layout of the KV blocks when run in `dtype`, one entry per group of `layer_groups`."""
        groups = self.layer_groups()
        return BlockLayout(
            block_size=block_size,
            groups=tuple(
                GroupLayout(
                    kind="full" if group.window is None else "window",
                    num_layers=len(groups[0].layers),
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    dtype=dtype,
                    window=group.window,
                )
                for group in groups
            ),
        )
