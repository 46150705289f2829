"""Every route of the API: what it takes, what it answers, and each status it can answer with.

The application's routes and the OpenAPI document are both made from this table. Knows nothing about handlers.
"""

from dataclasses import dataclass
from typing import Literal

from router.protocol.answer import ChatCompletionChunk, ChatCompletionResponse, CompletionResponse
from router.protocol.base import AnswerModel, ModelCard, ModelList, RequestModel
from router.protocol.generate import ChatCompletionRequest, CompletionRequest
from router.protocol.tokens import (
    AbortRequest,
    AbortResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


class HealthReport(AnswerModel):
    """Answer of GET /health."""

    status: Literal["ok"]


class ReadyReport(AnswerModel):
    """Answer of GET /ready, with 503 as well as with 200."""

    ready: bool
    mode: Literal["disaggregated", "colocated"]
    draining: bool
    workers: dict[str, int]
    """Those that take requests, by role."""
    pairs: int
    """Pairs of workers that could serve a request."""
    refusals: list[str]
    """Why some live pairs cannot exchange KV."""


class VersionReport(AnswerModel):
    """Answer of GET /version."""

    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route."""

    name: str
    """The handler's, and the document's `operationId`."""
    method: Literal["GET", "POST"]
    path: str
    summary: str
    answer: type[AnswerModel] | Literal["text/plain", "application/json"]
    """Of status 200: JSON of a model, or a media type that has none."""
    body: type[RequestModel] | None = None
    chunk: type[AnswerModel] | None = None
    """What the events of a streamed answer hold."""
    errors: tuple[int, ...] = ()
    """Statuses with the error envelope."""
    not_ready: type[AnswerModel] | None = None
    """Of status 503 where that is not the envelope."""


_BODY_ERRORS = (400, 408, 413, 415, 500, 503)
_GENERATE_ERRORS = (400, 404, 408, 413, 415, 499, 500, 503, 504)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="completions",
        method="POST",
        path="/v1/completions",
        summary="Complete one or more prompts.",
        body=CompletionRequest,
        answer=CompletionResponse,
        chunk=CompletionResponse,
        errors=_GENERATE_ERRORS,
    ),
    Operation(
        name="chat_completions",
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        body=ChatCompletionRequest,
        answer=ChatCompletionResponse,
        chunk=ChatCompletionChunk,
        errors=_GENERATE_ERRORS,
    ),
    Operation(
        name="tokenize",
        method="POST",
        path="/tokenize",
        summary="Token ids of a text, or of a conversation as the model gets it.",
        body=TokenizeRequest,
        answer=TokenizeResponse,
        errors=(404, *_BODY_ERRORS),
    ),
    Operation(
        name="detokenize",
        method="POST",
        path="/detokenize",
        summary="Text of token ids.",
        body=DetokenizeRequest,
        answer=DetokenizeResponse,
        errors=(404, *_BODY_ERRORS),
    ),
    Operation(
        name="abort",
        method="POST",
        path="/abort_requests",
        summary="End requests by their X-Request-Id, those that this router process serves.",
        body=AbortRequest,
        answer=AbortResponse,
        errors=_BODY_ERRORS,
    ),
    Operation(name="models", method="GET", path="/v1/models", summary="The served model.", answer=ModelList),
    Operation(
        name="model",
        method="GET",
        path="/v1/models/{model}",
        summary="The served model, by its name.",
        answer=ModelCard,
        errors=(404,),
    ),
    Operation(name="health", method="GET", path="/health", summary="This process answers.", answer=HealthReport),
    Operation(
        name="ready",
        method="GET",
        path="/ready",
        summary="A request could be served now.",
        answer=ReadyReport,
        not_ready=ReadyReport,
    ),
    Operation(name="version", method="GET", path="/version", summary="This server's version.", answer=VersionReport),
    Operation(
        name="metrics",
        method="GET",
        path="/metrics",
        summary="Metrics in Prometheus' text format.",
        answer="text/plain",
    ),
    Operation(name="openapi", method="GET", path="/openapi.json", summary="This document.", answer="application/json"),
)
