"""Answers of the two generating endpoints: whole ones, and the chunks of a stream.

Extensions to OpenAI's fields: `stop_reason`, `token_ids`, `prompt_token_ids`, `pdcluster_timing`. Knows nothing about
how they are filled or sent.
"""

from typing import Literal

from router.protocol.base import AnswerModel, Usage

ChoiceFinishReason = Literal["stop", "length"]


class TimingInfo(AnswerModel):
    """Where the time of one request went, in seconds, as seen by the router. The phases queue, credit, prefill,
    transfer, tail and decode follow each other and add up to `total_s`; null: there was no such phase.
    """

    queue_s: float
    """Arrival until a pair of workers was asked: waiting for one, and attempts that failed."""
    credit_s: float
    """Waiting for the decode worker's credit."""
    prefill_s: float | None
    """From the credit to the prefill worker's last offer: its queue, and computing the prompt."""
    transfer_s: float | None
    """From the last offer until every block was verified at the decode worker: what moving KV added."""
    tail_s: float
    """From there (or from the credit, without prefill) to the first token: waiting for a step, and computing the rest
    of the prompt (all of it, without prefill)."""
    decode_s: float
    """First to last token."""
    retry_s: float
    """Part of queue_s that attempts took that failed."""
    prefill_queue_s: float | None
    """Part of prefill_s before the prefill worker's first step for the prompt."""
    tail_queue_s: float
    """Part of tail_s before the decode worker's first step for the request."""
    ttft_s: float
    """Arrival to first token: all phases but decode."""
    tpot_s: float
    """(E2E - TTFT) / (output tokens of the longest choice - 1); 0 with one token."""
    total_s: float
    """Arrival to last token."""


# ---- /v1/completions -------------------------------------------------------------------------------------------------


class CompletionLogprobs(AnswerModel):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Characters of output before the token."""


class CompletionChoice(AnswerModel):
    """One choice, or the new part of one in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: ChoiceFinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id, of those the client named, that ended the choice."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(AnswerModel):
    """A whole answer, or a chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    pdcluster_timing: TimingInfo | None = None


# ---- /v1/chat/completions --------------------------------------------------------------------------------------------


class TopLogprob(AnswerModel):
    """A candidate token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(AnswerModel):
    """The chosen token and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    """One entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(AnswerModel):
    """The answer of one choice."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class MessageDelta(AnswerModel):
    """The new part of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(AnswerModel):
    """One choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChoiceFinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatChunkChoice(AnswerModel):
    """The new part of one choice."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChoiceFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(AnswerModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    pdcluster_timing: TimingInfo | None = None


class ChatCompletionChunk(AnswerModel):
    """A chunk."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    pdcluster_timing: TimingInfo | None = None
