"""Requests of the two generating endpoints, with every range checked, and how a body becomes one of them.

Extensions to OpenAI's fields: top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, return_token_ids. `user` is
accepted and ignored; the role `developer` means `system`; text parts of one message are joined by newlines.
Knows nothing about HTTP, tokenizers or workers: `router.openai` checks what needs the model (vocabulary, length).
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from core.errors import InvalidRequestError, UnsupportedFieldError
from router.protocol.base import FIELD_NAME_CHARS_MAX, StrictModel, nearest_name
from router.protocol.document import parse_object
from router.protocol.fields import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, drop_harmless_fields

CHILDREN_MAX = 128
"""Largest `n`."""
PROMPTS_MAX = 128
"""Prompts in one /v1/completions request."""
MESSAGES_MAX = 4096
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 256
STOP_TOKEN_IDS_MAX = 128
LOGPROBS_MAX = 20
LOGIT_BIAS_ENTRIES_MAX = 1024
LOGIT_BIAS_MAX = 100.0
REPETITION_PENALTY_MIN = 0.01
REPETITION_PENALTY_MAX = 100.0
TOKEN_ID_MAX = 2**31 - 1
PROMPT_TOKENS_MAX = 2**20
"""Of one prompt given as token ids, whatever the model takes."""
MODEL_NAME_CHARS_MAX = 256
USER_CHARS_MAX = 512
MESSAGE_NAME_CHARS_MAX = 256
CONTENT_PARTS_MAX = 1024
"""Of one message."""


def _few_biases(value: Any) -> Any:
    """Refuses a huge `logit_bias` at once: one problem per entry would take seconds to collect."""
    if isinstance(value, dict) and len(value) > LOGIT_BIAS_ENTRIES_MAX:
        raise PydanticCustomError("too_long", f"There may be at most {LOGIT_BIAS_ENTRIES_MAX} entries")
    return value


# Lists stop at their first problem (fail_fast): a million problems would take minutes to collect.
TokenId = Annotated[int, Field(ge=0, le=TOKEN_ID_MAX)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-LOGIT_BIAS_MAX, le=LOGIT_BIAS_MAX)]
StopString = Annotated[str, Field(min_length=1, max_length=STOP_STRING_CHARS_MAX)]
TokenPrompt = Annotated[list[TokenId], Field(min_length=1, max_length=PROMPT_TOKENS_MAX, fail_fast=True)]
TextBatch = Annotated[list[str], Field(min_length=1, max_length=PROMPTS_MAX, fail_fast=True)]
TokenBatch = Annotated[list[TokenPrompt], Field(min_length=1, max_length=PROMPTS_MAX, fail_fast=True)]
LogitBias = Annotated[
    dict[TokenIdText, Bias], Field(max_length=LOGIT_BIAS_ENTRIES_MAX), BeforeValidator(_few_biases)
]
ModelName = Annotated[str, Field(min_length=1, max_length=MODEL_NAME_CHARS_MAX)]


class StreamOptions(StrictModel):
    """Of a streamed answer."""

    include_usage: bool | None = None
    """Send one more chunk with usage and no choices."""
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerateRequest(StrictModel):
    """Fields of both endpoints."""

    model: ModelName | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=TOKEN_ID_MAX)] = 0
    """0 and -1 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTY_MIN, le=REPETITION_PENALTY_MAX)] = 1.0
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=CHILDREN_MAX)] = 1
    stop: StopString | Annotated[list[StopString], Field(max_length=STOP_STRINGS_MAX, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOP_TOKEN_IDS_MAX, fail_fast=True)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: Annotated[str, Field(max_length=USER_CHARS_MAX)] | None = None
    """Accepted and ignored."""


class CompletionRequest(GenerateRequest):
    """Body of POST /v1/completions."""

    prompt: str | TokenPrompt | TextBatch | TokenBatch
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None


class TextPart(StrictModel):
    """The one kind of content part supported."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=CONTENT_PARTS_MAX, fail_fast=True)]
    name: Annotated[str, Field(max_length=MESSAGE_NAME_CHARS_MAX)] | None = None
    """Handed to the chat template."""
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatCompletionRequest(GenerateRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None


AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatCompletionRequest)

_UNIONS = {
    "prompt": f"a string, a list of token ids, or a list of at most {PROMPTS_MAX} of either, none of them empty",
    "stop": f"a string or a list of at most {STOP_STRINGS_MAX} strings of 1 to {STOP_STRING_CHARS_MAX} characters",
    "content": "a string or a list of text parts",
}
_UNSUPPORTED: dict[type[GenerateRequest], dict[str, tuple[object, ...]]] = {
    CompletionRequest: COMPLETION_UNSUPPORTED,
    ChatCompletionRequest: CHAT_UNSUPPORTED,
}


def parse_request(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """A body as a request. Raises InvalidRequestError naming the field at fault."""
    fields = drop_harmless_fields(parse_object(body), frozenset(kind.model_fields), _UNSUPPORTED[kind])
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(kind, error) from None
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(message="'stream_options' needs 'stream': true.", param="stream_options")
    if isinstance(request, ChatCompletionRequest):
        _check_chat(request)
    return request


def _check_chat(request: ChatCompletionRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError(message="'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    limits = (request.max_tokens, request.max_completion_tokens)
    if None not in limits and limits[0] != limits[1]:
        text = "'max_tokens' and 'max_completion_tokens' differ. Send one of them."
        raise InvalidRequestError(message=text, param="max_completion_tokens")


def _refusal(kind: type[GenerateRequest], error: ValidationError) -> InvalidRequestError:
    """The first thing wrong, in our words, with a path a client recognises."""
    problems = error.errors(include_url=False, include_context=False)
    problem = min(problems, key=lambda e: (-len(_path(e["loc"])), e["type"] != "extra_forbidden"))
    path = [part[:FIELD_NAME_CHARS_MAX] for part in _path(problem["loc"])]
    param = ".".join(path)
    value = problem["input"]
    if problem["type"] == "extra_forbidden":
        near = nearest_name(path[-1], _names_beside(path))
        hint = f" Did you mean '{near}'?" if near else ""
        return InvalidRequestError(message=f"Unknown field '{param}'.{hint}", param=param)
    if path[-1] in {"tool_calls", "function_call", "audio", "include_obfuscation", "continuous_usage_stats"}:
        return UnsupportedFieldError(field=param)
    if path[-1] == "role" and value in ("tool", "function"):
        text = f"Messages of role '{value}' are not supported by this server yet."
        return UnsupportedFieldError(field=param, message=text)
    if path[-1] == "type" and "content" in path and isinstance(value, str):
        text = f"Content parts of type '{value[:FIELD_NAME_CHARS_MAX]}' are not supported by this server yet."
        return UnsupportedFieldError(field=param, message=text)
    if problem["type"] == "missing":
        return InvalidRequestError(message=f"The field '{param}' is missing.", param=param)
    if path[-1] in _UNIONS:
        return InvalidRequestError(message=f"'{param}' must be {_UNIONS[path[-1]]}.", param=param)
    return InvalidRequestError(message=f"'{param}': {problem['msg']}.", param=param)


def _path(location: tuple[int | str, ...]) -> list[str]:
    """A pydantic location without the names of union members, which mean nothing to a client."""
    names = [str(part) for part in location]
    return [n for i, n in enumerate(names) if i == 0 or n.isdigit() or (n.isidentifier() and n not in ("str", "int"))]


def _names_beside(path: list[str]) -> list[str]:
    model: type[StrictModel] = ChatMessage if path[0] == "messages" else StreamOptions
    return list((TextPart if "content" in path else model).model_fields)
