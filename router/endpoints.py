"""The two generating endpoints: a body in, a whole answer or a stream of events out.

Waits for the first event before it answers, so that a failure until then has its HTTP status. Knows nothing about
routes.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import Request
from starlette.responses import Response

from core.errors import InvalidRequestError, PdclusterError
from router.answers import AnswerOptions, AnswerWriter, ChatWriter, Choice, CompletionWriter
from router.generation import GenerationEvent, PreparedRequest, Summary
from router.openai import RequestPreparer
from router.protocol.base import ErrorResponse
from router.protocol.generate import ChatCompletionRequest, CompletionRequest, GenerateRequest, parse_request
from router.service import RouterService
from router.sse import DONE, EventStream, encode_event, run_until_disconnect

BODY_BYTES_MAX = 8 * 1024 * 1024
BODY_TIMEOUT_S = 60.0
_TIMING_HEADER = "x-pdcluster-timing"

IndexedEvent = tuple[int, GenerationEvent]
"""Index of the prompt, and an event of it."""
Events = AsyncGenerator[IndexedEvent, None]


class GenerateEndpoints:
    """POST /v1/completions and POST /v1/chat/completions."""

    def __init__(self, service: RouterService, preparer: RequestPreparer) -> None:
        self._service = service
        self._preparer = preparer

    async def completions(self, http: Request) -> Response:
        request = parse_request(CompletionRequest, await read_body(http))
        prompts = self._preparer.prepare_completion(request, self._service.pool.require_max_model_len())
        options = self._options(http, request, prompts, "cmpl", request.logprobs)
        return await self._answer(http, request, options, CompletionWriter(options, self._service.text))

    async def chat_completions(self, http: Request) -> Response:
        request = parse_request(ChatCompletionRequest, await read_body(http))
        prompt = self._preparer.prepare_chat(request, self._service.pool.require_max_model_len())
        options = self._options(http, request, [prompt], "chatcmpl", prompt.sampling.num_logprobs)
        return await self._answer(http, request, options, ChatWriter(options, self._service.text))

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
        self, http: Request, request: GenerateRequest, options: AnswerOptions, writer: AnswerWriter
    ) -> Response:
        events = merge([self._service.generate(prompt, http.state.request_id) for prompt in options.prompts])
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


async def collect(options: AnswerOptions, writer: AnswerWriter, events: Events) -> str:
    """The whole answer as JSON."""
    choices = [Choice() for _ in range(options.num_choices)]
    summaries: list[Summary] = []
    async for prompt, event in events:
        if isinstance(event, Summary):
            summaries.append(event)
        else:
            choices[prompt * options.num_children + event.child].add(event)
    return writer.whole(choices, summaries).to_json()


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


async def merge(sources: Sequence[AsyncGenerator[GenerationEvent, None]]) -> Events:
    """Events of all prompts as they come. The first failure ends all of them."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for event in source:
                yield 0, event
        return
    queue: asyncio.Queue[IndexedEvent | PdclusterError | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_pump(index, source, queue)) for index, source in enumerate(sources)]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, PdclusterError):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    source: AsyncGenerator[GenerationEvent, None],
    queue: "asyncio.Queue[IndexedEvent | PdclusterError | None]",
) -> None:
    async with aclosing(source):
        try:
            async for event in source:
                queue.put_nowait((index, event))
        except PdclusterError as error:
            queue.put_nowait(error)
            return
    queue.put_nowait(None)


async def read_body(http: Request) -> bytes:
    """The body of a JSON request, within its limits. Raises InvalidRequestError."""
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequestError(message="Content-Type must be application/json.")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in http.stream():
                body += part
                if len(body) > BODY_BYTES_MAX:
                    raise InvalidRequestError(message=f"The body is larger than {BODY_BYTES_MAX} bytes.")
    except TimeoutError:
        raise InvalidRequestError(message=f"The body did not arrive within {BODY_TIMEOUT_S:g} s.") from None
    return bytes(body)
