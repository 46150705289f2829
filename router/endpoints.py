"""The generating endpoints and those around them: a body in, a whole answer or a stream of events out.

Waits for the first event before it answers, so that a failure until then has its HTTP status. Knows nothing about
routes.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response

from core.errors import PdclusterError
from router.answers import AnswerOptions, AnswerWriter, ChatWriter, Choice, CompletionWriter
from router.buffer import IndexedEvent
from router.generation import PreparedRequest, Summary
from router.incoming import BodyReader, require_request_id
from router.openai import RequestPreparer
from router.protocol.base import ErrorResponse
from router.protocol.generate import ChatCompletionRequest, CompletionRequest, GenerateRequest
from router.protocol.parse import AnyRequest, parse_request
from router.protocol.tokens import (
    AbortRequest,
    AbortResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from router.service import RouterService
from router.sse import DONE, EventStream, encode_event, run_until_disconnect

LARGE_BODY_BYTES = 16 * 1024
"""Larger bodies are parsed and tokenised on another thread, so that other requests go on meanwhile."""
LARGE_ANSWER_ENTRIES = 4096
"""Whole answers with more token ids and logprobs are written on another thread, too."""
_TIMING_HEADER = "x-pdcluster-timing"

Events = AsyncGenerator[IndexedEvent, None]
_Prepared = TypeVar("_Prepared")


class BodyWork:
    """Reads a body, and does what its size may make slow where it delays nobody else."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._bodies = BodyReader()

    async def read(
        self, http: Request, kind: type[AnyRequest], prepare: Callable[[AnyRequest, int], _Prepared]
    ) -> tuple[AnyRequest, _Prepared]:
        """The request, and what `prepare` makes of it; `prepare` also gets the model's length in tokens.

        Raises a PdclusterError: for the body, for its fields, without a decode worker, and what `prepare` raises.
        """
        async with self._bodies.body(http) as body:
            is_large = len(body) > LARGE_BODY_BYTES
            request = await _apart_if(is_large, lambda: parse_request(kind, body))
            max_model_len = self._service.pool.require_max_model_len()
            return request, await _apart_if(is_large, lambda: prepare(request, max_model_len))

    async def parse(self, http: Request, kind: type[AnyRequest]) -> AnyRequest:
        """The request alone. Raises a PdclusterError for the body and its fields."""
        async with self._bodies.body(http) as body:
            return await _apart_if(len(body) > LARGE_BODY_BYTES, lambda: parse_request(kind, body))


async def _apart_if(is_large: bool, work: Callable[[], _Prepared]) -> _Prepared:
    """Large work is done on another thread."""
    return await asyncio.to_thread(work) if is_large else work()


class GenerateEndpoints:
    """POST /v1/completions and POST /v1/chat/completions."""

    def __init__(self, service: RouterService, preparer: RequestPreparer, work: BodyWork) -> None:
        self._service = service
        self._preparer = preparer
        self._work = work

    async def completions(self, http: Request) -> Response:
        request_id = require_request_id(http)
        request, prompts = await self._work.read(http, CompletionRequest, self._preparer.prepare_completion)
        options = self._options(http, request, prompts, "cmpl", request.logprobs)
        return await self._answer(http, request, options, CompletionWriter(options, self._service.text), request_id)

    async def chat_completions(self, http: Request) -> Response:
        request_id = require_request_id(http)
        request, prompt = await self._work.read(http, ChatCompletionRequest, self._preparer.prepare_chat)
        options = self._options(http, request, [prompt], "chatcmpl", prompt.sampling.num_logprobs)
        return await self._answer(http, request, options, ChatWriter(options, self._service.text), request_id)

    def _options(
        self,
        http: Request,
        request: GenerateRequest,
        prompts: Sequence[PreparedRequest],
        prefix: str,
        num_logprobs: int | None,
    ) -> AnswerOptions:
        stream_options = request.stream_options
        return AnswerOptions(
            answer_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(self._service.clock.wall()),
            model=self._service.model_name,
            include_usage=bool(stream_options and stream_options.include_usage),
            return_token_ids=request.return_token_ids,
            has_logprobs=num_logprobs is not None,
            has_timing=http.headers.get(_TIMING_HEADER, "").lower() == "true",
            num_top_logprobs=num_logprobs or 0,
            num_children=request.n,
            prompts=tuple(prompts),
        )

    async def _answer(
        self,
        http: Request,
        request: GenerateRequest,
        options: AnswerOptions,
        writer: AnswerWriter,
        request_id: str,
    ) -> Response:
        events = self._service.generate_all(options.prompts, request_id)
        if not request.stream:
            async with aclosing(events):
                text = await run_until_disconnect(http.receive, collect(options, writer, events))
            return Response(text, media_type="application/json")
        is_streaming = False
        try:
            first = await run_until_disconnect(http.receive, anext(events))
            is_streaming = True
        finally:
            if not is_streaming:
                await events.aclose()
        return EventStream(stream(options, writer, first, events))


class TokenEndpoints:
    """POST /tokenize and POST /detokenize: exactly what the generating endpoints would do with the same text."""

    def __init__(self, service: RouterService, preparer: RequestPreparer, work: BodyWork) -> None:
        self._text = service.text
        self._preparer = preparer
        self._work = work

    async def tokenize(self, http: Request) -> Response:
        require_request_id(http)
        _, answer = await self._work.read(http, TokenizeRequest, self._tokenize)
        return Response(answer.to_json(), media_type="application/json")

    async def detokenize(self, http: Request) -> Response:
        require_request_id(http)
        _, answer = await self._work.read(http, DetokenizeRequest, self._detokenize)
        return Response(answer.to_json(), media_type="application/json")

    def _tokenize(self, request: TokenizeRequest, max_model_len: int) -> TokenizeResponse:
        self._preparer.check_model(request.model)
        if request.messages is not None:
            tokens = self._preparer.encode_chat(request.messages, max_model_len, request.add_special_tokens or False)
        else:
            assert request.prompt is not None, "one of the two is there"
            has_specials = request.add_special_tokens is not False
            tokens = self._preparer.encode_text(request.prompt, max_model_len, has_specials)
        extras = {"token_strs": [self._text.token_name(i) for i in tokens]} if request.return_token_strs else {}
        return TokenizeResponse(count=len(tokens), max_model_len=max_model_len, tokens=tokens, **extras)

    def _detokenize(self, request: DetokenizeRequest, max_model_len: int) -> DetokenizeResponse:
        self._preparer.check_model(request.model)
        self._preparer.check_ids(request.tokens, "tokens")
        return DetokenizeResponse(prompt=self._text.spell(request.tokens))


class AbortEndpoint:
    """POST /abort_requests."""

    def __init__(self, service: RouterService, work: BodyWork) -> None:
        self._service = service
        self._work = work

    async def abort(self, http: Request) -> Response:
        """Ends what this router process serves under the ids; another process of the same port is not asked."""
        require_request_id(http)
        request = await self._work.parse(http, AbortRequest)
        num_aborted = sum(self._service.abort(request_id) for request_id in dict.fromkeys(request.request_ids))
        return Response(AbortResponse(num_aborted=num_aborted).to_json(), media_type="application/json")


async def collect(options: AnswerOptions, writer: AnswerWriter, events: Events) -> str:
    """The whole answer as JSON."""
    choices = [Choice() for _ in range(options.num_choices)]
    summaries: list[Summary] = []
    async for prompt, event in events:
        if isinstance(event, Summary):
            summaries.append(event)
        else:
            choices[prompt * options.num_children + event.child].add(event)
    num_entries = sum(len(choice.token_ids) for choice in choices) * (1 + options.num_top_logprobs)
    if options.return_token_ids:  # every choice repeats its prompt's
        num_entries += options.num_children * sum(len(prompt.token_ids) for prompt in options.prompts)
    return await _apart_if(num_entries > LARGE_ANSWER_ENTRIES, lambda: writer.whole(choices, summaries).to_json())


async def stream(
    options: AnswerOptions, writer: AnswerWriter, first: IndexedEvent, events: Events
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. A failure becomes an error event; [DONE] always ends it."""
    summaries: list[Summary] = []
    async with aclosing(events):
        for chunk in writer.opening():
            yield encode_event(chunk.to_json())
        try:
            item: IndexedEvent | None = first
            while item is not None:
                prompt, event = item
                if isinstance(event, Summary):
                    summaries.append(event)
                else:
                    chunk_or_none = writer.chunk(prompt * options.num_children + event.child, event)
                    if chunk_or_none is not None:
                        yield encode_event(chunk_or_none.to_json())
                item = await anext(events, None)
            last = writer.closing(summaries)
            if last is not None:
                yield encode_event(last.to_json())
        except PdclusterError as error:
            yield encode_event(ErrorResponse.of(error).to_json())
        yield DONE
