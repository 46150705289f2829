"""Generation events as OpenAI answers: the chunks of a stream, or one whole answer.

Choice index = prompt index * n + child. Knows nothing about HTTP, requests' checks or workers.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from core.messages import TokenLogprobs
from router.generation import ChildDelta, ChildEnd, PreparedRequest, Summary
from router.protocol import answer
from router.protocol.base import AnswerModel, PromptTokensDetails, Usage
from router.text import TextCodec

LOGPROB_MIN = -9999.0
"""JSON has no minus infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What every part of one answer repeats, and what the client asked to see."""

    answer_id: str
    created: int
    model: str
    include_usage: bool
    return_token_ids: bool
    has_logprobs: bool
    has_timing: bool
    num_top_logprobs: int
    num_children: int
    prompts: tuple[PreparedRequest, ...]

    @property
    def num_choices(self) -> int:
        return self.num_children * len(self.prompts)


@dataclass(slots=True)
class Choice:
    """All of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: ChildEnd | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChildDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class AnswerWriter(Protocol):
    """Writes the answers of one endpoint to one request."""

    def opening(self) -> list[AnswerModel]:
        """Chunks before the first token."""
        ...

    def chunk(self, index: int, delta: ChildDelta) -> AnswerModel | None:
        """The chunk of one event of a choice; None when there is nothing to say yet."""
        ...

    def closing(self, summaries: Sequence[Summary]) -> AnswerModel | None:
        """The last chunk, with usage, if the client wants it."""
        ...

    def whole(self, choices: Sequence[Choice], summaries: Sequence[Summary]) -> AnswerModel:
        """The answer that is not streamed."""
        ...


class CompletionWriter:
    """For /v1/completions."""

    def __init__(self, options: AnswerOptions, text: TextCodec) -> None:
        self._options = options
        self._text = text
        self._offsets = [0] * options.num_choices
        self._is_begun = [False] * options.num_choices

    def opening(self) -> list[AnswerModel]:
        return []

    def chunk(self, index: int, delta: ChildDelta) -> AnswerModel | None:
        options = self._options
        has_ids = (options.return_token_ids or options.has_logprobs) and delta.token_ids
        if not delta.text and not has_ids and delta.finish_reason is None:
            return None
        choice = Choice()
        choice.add(delta)
        return self._response([self._choice(index, choice)])

    def closing(self, summaries: Sequence[Summary]) -> AnswerModel | None:
        if not self._options.include_usage:
            return None
        return self._response([], usage=usage_of(summaries), **timing_of(self._options, summaries))

    def whole(self, choices: Sequence[Choice], summaries: Sequence[Summary]) -> AnswerModel:
        return self._response(
            [self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage_of(summaries),
            **timing_of(self._options, summaries),
        )

    def _response(self, choices: list[answer.CompletionChoice], **extras: Any) -> answer.CompletionResponse:
        options = self._options
        return answer.CompletionResponse(
            id=options.answer_id,
            object="text_completion",
            created=options.created,
            model=options.model,
            choices=choices,
            **extras,
        )

    def _choice(self, index: int, choice: Choice) -> answer.CompletionChoice:
        options = self._options
        extras: dict[str, Any] = {}
        if options.return_token_ids:
            extras["token_ids"] = choice.token_ids
            if not self._is_begun[index]:
                extras["prompt_token_ids"] = list(options.prompts[index // options.num_children].token_ids)
        self._is_begun[index] = True
        return answer.CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=self._logprobs(index, choice) if options.has_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            **extras,
        )

    def _logprobs(self, index: int, choice: Choice) -> answer.CompletionLogprobs:
        tokens = [self._text.token_text(token_id)[0] for token_id in choice.token_ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        top: list[dict[str, float]] = []
        for token, entry in zip(tokens, choice.logprobs, strict=True):
            names = {token: finite(entry.logprob)}
            for token_id, value in _top(entry, self._options.num_top_logprobs):
                names.setdefault(self._text.token_text(token_id)[0], finite(value))
            top.append(names)
        return answer.CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[finite(entry.logprob) for entry in choice.logprobs],
            top_logprobs=top,
            text_offset=offsets,
        )


class ChatWriter:
    """For /v1/chat/completions."""

    def __init__(self, options: AnswerOptions, text: TextCodec) -> None:
        self._options = options
        self._text = text

    def opening(self) -> list[AnswerModel]:
        """The role of each choice, and the prompt's ids with the first."""
        chunks: list[AnswerModel] = []
        for index in range(self._options.num_choices):
            delta = answer.MessageDelta(role="assistant", content="")
            choice = answer.ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
            chunks.append(self._chunk([choice], **(self._prompt_ids() if index == 0 else {})))
        return chunks

    def chunk(self, index: int, delta: ChildDelta) -> AnswerModel | None:
        options = self._options
        has_ids = (options.return_token_ids or options.has_logprobs) and delta.token_ids
        if not delta.text and not has_ids and delta.finish_reason is None:
            return None
        choice = Choice()
        choice.add(delta)
        message = answer.MessageDelta(content=delta.text) if delta.text else answer.MessageDelta()
        extras: dict[str, Any] = {"token_ids": choice.token_ids} if options.return_token_ids else {}
        if choice.finish_reason is not None:
            extras["stop_reason"] = choice.stop_reason
        chunk_choice = answer.ChatChunkChoice(
            index=index,
            delta=message,
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            **extras,
        )
        return self._chunk([chunk_choice])

    def closing(self, summaries: Sequence[Summary]) -> AnswerModel | None:
        if not self._options.include_usage:
            return None
        return self._chunk([], usage=usage_of(summaries), **timing_of(self._options, summaries))

    def whole(self, choices: Sequence[Choice], summaries: Sequence[Summary]) -> AnswerModel:
        options = self._options
        return answer.ChatCompletionResponse(
            id=options.answer_id,
            object="chat.completion",
            created=options.created,
            model=options.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage_of(summaries),
            **self._prompt_ids(),
            **timing_of(options, summaries),
        )

    def _chunk(self, choices: list[answer.ChatChunkChoice], **extras: Any) -> answer.ChatCompletionChunk:
        options = self._options
        return answer.ChatCompletionChunk(
            id=options.answer_id,
            object="chat.completion.chunk",
            created=options.created,
            model=options.model,
            choices=choices,
            **extras,
        )

    def _choice(self, index: int, choice: Choice) -> answer.ChatChoice:
        extras = {"token_ids": choice.token_ids} if self._options.return_token_ids else {}
        return answer.ChatChoice(
            index=index,
            message=answer.AssistantMessage(role="assistant", content=choice.text, refusal=None),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            **extras,
        )

    def _prompt_ids(self) -> dict[str, Any]:
        if not self._options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._options.prompts[0].token_ids)}

    def _logprobs(self, choice: Choice) -> answer.ChatLogprobs | None:
        if not self._options.has_logprobs:
            return None
        content: list[answer.ChatLogprob] = []
        for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
            token, raw = self._text.token_text(token_id)
            top = [self._top_logprob(*candidate) for candidate in _top(entry, self._options.num_top_logprobs)]
            content.append(
                answer.ChatLogprob(token=token, logprob=finite(entry.logprob), bytes=list(raw), top_logprobs=top)
            )
        return answer.ChatLogprobs(content=content, refusal=None)

    def _top_logprob(self, token_id: int, logprob: float) -> answer.TopLogprob:
        token, raw = self._text.token_text(token_id)
        return answer.TopLogprob(token=token, logprob=finite(logprob), bytes=list(raw))


def usage_of(summaries: Sequence[Summary]) -> Usage:
    """Token counts of all prompts of one request."""
    num_prompt = sum(s.num_prompt_tokens for s in summaries)
    num_output = sum(s.num_output_tokens for s in summaries)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(s.num_cached_tokens for s in summaries)),
    )


def timing_of(options: AnswerOptions, summaries: Sequence[Summary]) -> dict[str, Any]:
    """The `pdcluster_timing` field, if asked for; of the slowest prompt when there are several."""
    if not options.has_timing:
        return {}
    slowest = max((summary.timing for summary in summaries), key=lambda timing: timing.total_s)
    return {"pdcluster_timing": answer.TimingInfo.model_validate({k: _rounded(v) for k, v in asdict(slowest).items()})}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return logprob if logprob > LOGPROB_MIN else LOGPROB_MIN  # NaN, too, is not greater


def _top(entry: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:count]
