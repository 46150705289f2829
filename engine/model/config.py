"""The shape of a supported model, read from a Hugging Face `config.json` by the loader. Imports no torch.

Knows nothing about where weights lie or how layers compute.
"""

from dataclasses import dataclass
from typing import Literal

from core.layout import BlockLayout, GroupLayout, KvDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3 style frequency scaling, linear scaling, or none of both."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder of the Llama family."""

    architecture: Literal["LlamaForCausalLM"]
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
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Union of config.json's and generation_config.json's."""
    dtype: KvDtype
    """Of the checkpoint; the YAML's `model.dtype` may choose another to run in."""

    def block_layout(self, block_size: int, dtype: KvDtype) -> BlockLayout:
        """Layout of one KV block when run in `dtype`."""
        group = GroupLayout(
            kind="full", num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype
        )
        return BlockLayout(block_size=block_size, groups=(group,))
