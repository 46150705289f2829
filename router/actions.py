"""What a request's flow asks its driver to do, and what it learned on the way. Values only."""

from dataclasses import dataclass

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


@dataclass(slots=True, kw_only=True)
class FlowFacts:
    """What was learned on the way, of the latest attempt. Times are the router's monotonic seconds."""

    arrived_s: float
    credited_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    was_prefilled: bool = False
    """A prefill worker computed the prompt."""
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    num_prefill_cached_blocks: int = 0
    num_decode_cached_tokens: int = 0
