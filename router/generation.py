"""What the service takes in and hands out for one prompt, whatever endpoint it came from. Values only."""

from dataclasses import dataclass
from typing import Literal

from core.messages import TokenLogprobs
from core.request import SamplingParams
from router.actions import FlowFacts, RequestPhase

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
    """Where the time of a finished request went, in seconds of the router's clock. The six phases are disjoint and add
    up to `total_s`; see `router.protocol.answer.TimingInfo`. None: the phase was not needed.
    """

    queue_s: float
    credit_s: float
    prefill_s: float | None
    transfer_s: float | None
    tail_s: float
    decode_s: float
    retry_s: float
    """Part of queue_s."""
    prefill_queue_s: float | None
    """Part of prefill_s."""
    tail_queue_s: float
    """Part of tail_s."""
    ttft_s: float
    tpot_s: float
    total_s: float

    def phases(self) -> dict[RequestPhase, float | None]:
        """By name, in order."""
        return {
            "queue": self.queue_s,
            "credit": self.credit_s,
            "prefill": self.prefill_s,
            "transfer": self.transfer_s,
            "tail": self.tail_s,
            "decode": self.decode_s,
        }

    @property
    def until_first_step_s(self) -> float:
        """From arrival to the first step that some worker made for the prompt."""
        wait_s = self.prefill_queue_s if self.prefill_queue_s is not None else self.tail_queue_s
        return self.queue_s + self.credit_s + wait_s


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


def make_timing(facts: FlowFacts, num_tokens_longest: int) -> Timing:
    """The times of a finished request; `num_tokens_longest`: output tokens of its longest choice."""
    arrived, submitted, credited = facts.arrived_s, facts.submitted_s, facts.credited_s
    first, last = facts.first_token_s, facts.last_token_s
    assert submitted is not None and credited is not None and first is not None and last is not None, (
        "RQ-1: a request finished without having been served"
    )
    prefill_s = transfer_s = prefill_queue_s = None
    tail_from = credited
    if facts.needs_prefill:
        pulled = facts.pulled_s if facts.pulled_s is not None else first
        offered = facts.offered_s if facts.offered_s is not None else pulled
        prefill_s, transfer_s, tail_from = offered - credited, pulled - offered, pulled
        prefill_queue_s = min(facts.prefill_queue_s, prefill_s)
    return Timing(
        queue_s=submitted - arrived,
        credit_s=credited - submitted,
        prefill_s=prefill_s,
        transfer_s=transfer_s,
        tail_s=first - tail_from,
        decode_s=last - first,
        retry_s=(facts.retried_s if facts.retried_s is not None else arrived) - arrived,
        prefill_queue_s=prefill_queue_s,
        tail_queue_s=min(facts.tail_queue_s, first - tail_from),
        ttft_s=first - arrived,
        tpot_s=(last - first) / (num_tokens_longest - 1) if num_tokens_longest > 1 else 0.0,
        total_s=last - arrived,
    )
