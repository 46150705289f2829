"""The attention interface: one call per layer stores new keys and values and attends; a plan's share is prepared once.

Knows nothing about weights, norms or rotary embedding: queries and keys arrive rotated.
"""

from typing import Protocol, TypeVar

import torch

from engine.step import StepPlan

Metadata = TypeVar("Metadata")


class Attention(Protocol[Metadata]):
    """Causal attention over the KV cache.

    Token t of a plan attends to positions [0, positions[t]] of its sequence; in layers with a window w, to the last w
    of them.
    """

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> Metadata:
        """Everything of a plan that all layers share, for queries in `dtype`. Valid for this plan only."""
        ...

    def attend(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        """Store the plan's keys and values of `layer`, then attend.

        queries: [T, heads, head dim]; keys_values: [T, 2 * kv heads, head dim], keys first; returns
        [T, heads * head dim]; all in the dtype that `prepare` was given.
        """
        ...
