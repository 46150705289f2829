"""A request as the cluster sees it after the router has made it final, and the states it may pass through.

The prompt is token ids, truncated once and immutable from here on. Knows nothing about HTTP, text or where it runs.
"""

import enum
from typing import Literal

import msgspec

from core.ids import Attempt, RequestId

FinishReason = Literal["stop", "length", "cancelled", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How each token is chosen. Validated by the router; the order of application is the order of the fields below.

    A token is `argmax(logits / temperature + gumbel(seed, child, position))` after penalties, bias and filters;
    temperature 0 is plain argmax.
    """

    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids, in [-100, 100]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output, > 0."""
    frequency_penalty: float = 0.0
    """Subtracted once per earlier occurrence in the output, in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted if the token occurs in the output, in [-2, 2]."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one, in [0, 1]."""
    seed: int = 0
    """Of the noise; fixed by the router when the client gave none. Unsigned 64 bits."""
    num_logprobs: int | None = None
    """None: no log-probabilities; k >= 0: the chosen token's and those of the k most likely. Of the raw distribution
    (before penalties, bias, temperature and filters)."""
    max_tokens: int
    """Tokens to sample at most, >= 1."""
    stop_token_ids: tuple[int, ...] = ()
    """A sampled token among these ends the sequence and is part of its output ids (not of its text)."""
    ignore_eos: bool = False
    """Do not end at the model's own end-of-sequence ids."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client request. Child i of `num_children` samples with noise (seed, i, position)."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    """The final prompt, at least one id."""
    sampling: SamplingParams
    num_children: int = 1
    salt: bytes = b""
    """Non-empty: part of the first block's hash, so that tenants do not share prefixes."""
    deadline_s: float = 600.0
    """Seconds from reception within which the request must end, rebased by each receiver on its own clock."""


class RequestState(enum.Enum):
    """Where a request is, as its router sees it."""

    SELECTED = "selected"
    CREDITED = "credited"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL_STATES = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})

_ENDINGS = frozenset({RequestState.FAILED, RequestState.CANCELLED})
LEGAL_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.SELECTED: frozenset({RequestState.CREDITED, RequestState.SELECTED}) | _ENDINGS,
    RequestState.CREDITED: frozenset({RequestState.PREFILLING, RequestState.DECODING, RequestState.SELECTED})
    | _ENDINGS,
    RequestState.PREFILLING: frozenset({RequestState.DECODING, RequestState.SELECTED}) | _ENDINGS,
    RequestState.DECODING: frozenset({RequestState.SELECTED, RequestState.FINISHED}) | _ENDINGS,
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
}


class AttemptKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names one try at one request on every message about it."""

    request_id: RequestId
    attempt: Attempt
