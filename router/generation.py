"""What the service takes in and hands out for one prompt, whatever endpoint it came from. Values only."""

from dataclasses import dataclass
from typing import Literal

from core.messages import TokenLogprobs
from core.request import SamplingParams
from router.actions import FlowFacts

ChildEnd = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A validated prompt, final from here on."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_children: int
    stop: tuple[str, ...]
    """Stop strings, matched by the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildDelta:
    """What is new of one choice. Text may lag behind tokens: incomplete characters and possible stop strings wait."""

    child: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token when asked for, else empty."""
    finish_reason: ChildEnd | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that the client named; None for the model's own end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time went, in seconds; see `router.protocol.answer.TimingInfo`."""

    queue_s: float
    prefill_s: float
    transfer_s: float
    ttft_s: float
    tpot_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The last event of a generation that ended well."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Over all choices, stop tokens included."""
    num_cached_tokens: int
    """Prompt tokens that no worker had to compute."""
    timing: Timing


GenerationEvent = ChildDelta | Summary


def make_timing(facts: FlowFacts, now: float, num_tokens_longest: int) -> Timing:
    """The times of a request that ended now; `num_tokens_longest`: output tokens of its longest choice."""
    first = facts.first_token_s if facts.first_token_s is not None else now
    last = facts.last_token_s if facts.last_token_s is not None else now
    credited = facts.credited_s if facts.credited_s is not None else facts.arrived_s
    wait_s = facts.prefill_queue_s if facts.was_prefilled else facts.decode_queue_s
    prefill_s = facts.prefill_s if facts.was_prefilled else max(0.0, first - credited - wait_s)
    return Timing(
        queue_s=credited - facts.arrived_s + wait_s,
        prefill_s=prefill_s,
        transfer_s=facts.transfer_s,
        ttft_s=first - facts.arrived_s,
        tpot_s=(last - first) / (num_tokens_longest - 1) if num_tokens_longest > 1 else 0.0,
        total_s=now - facts.arrived_s,
    )
