"""What a request's flow asks its driver to do, and what it learned on the way. Values only."""

from dataclasses import dataclass
from typing import Literal

from core.errors import PdclusterError
from core.ids import WorkerId
from core.messages import TokenUpdate, ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to a worker."""

    worker: WorkerId
    message: ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """New tokens, checked: dense per child, none of a child that has ended."""

    updates: tuple[TokenUpdate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """All children ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request ended with an error."""

    error: PdclusterError


FlowAction = Send | Deliver | Finish | Fail


RequestPhase = Literal["queue", "credit", "prefill", "transfer", "tail", "decode"]


@dataclass(slots=True, kw_only=True)
class FlowFacts:
    """What was learned on the way, of the latest attempt. Times `_s` with a moment's name are the router's monotonic
    seconds, those ending in `_queue_s` are durations that a worker reported.

        arrived   submitted   credited      offered (final)   pulled   first token   last token
           |-- queue --|-- credit --|-- prefill --|-- transfer --|-- tail --|-- decode --|
                                    |---------------- tail, without prefill -|
    """

    arrived_s: float
    retried_s: float | None = None
    """When the attempt before this one ended."""
    submitted_s: float | None = None
    credited_s: float | None = None
    needs_prefill: bool = False
    """A prefill worker was asked to compute the prompt."""
    offered_s: float | None = None
    pulled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prefill_queue_s: float = 0.0
    tail_queue_s: float = 0.0
    num_prefill_cached_blocks: int = 0
    num_pulled_blocks: int = 0
    num_decode_cached_tokens: int = 0

    def phase(self) -> RequestPhase:
        """Where the request is."""
        if self.submitted_s is None:
            return "queue"
        if self.credited_s is None:
            return "credit"
        if self.first_token_s is not None:
            return "decode"
        if not self.needs_prefill or self.pulled_s is not None:
            return "tail"
        return "prefill" if self.offered_s is None else "transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """How long a request may show no progress before its workers count as dead for it, however alive they are."""

    prompt_s: float = 300.0
    """Before the first token, between two signs of progress: credit, each offer, the end of the pull. Queueing at the
    workers counts."""
    stream_s: float = 120.0
    """After it, between two messages with tokens."""


DEFAULT_STALL_LIMITS = StallLimits()
