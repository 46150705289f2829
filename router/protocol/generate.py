"""Requests of the two generating endpoints, with every range checked.

Extensions to OpenAI's fields: top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, return_token_ids. `user` is
accepted and ignored; the role `developer` means `system`; text parts of one message are joined by newlines.
Knows nothing about HTTP, tokenizers or workers: `router.openai` checks what needs the model (vocabulary, length).
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from core.errors import InvalidRequestError
from router.protocol.base import HarmlessValues, RequestModel, StrictModel
from router.protocol.fields import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED

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
    dict[TokenIdText, Bias],
    Field(max_length=LOGIT_BIAS_ENTRIES_MAX, json_schema_extra={"additionalProperties": False}),
    BeforeValidator(_few_biases),
]
ModelName = Annotated[str, Field(min_length=1, max_length=MODEL_NAME_CHARS_MAX)]


class StreamOptions(StrictModel):
    """Of a streamed answer."""

    include_usage: bool | None = None
    """Send one more chunk with usage and no choices."""
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerateRequest(RequestModel):
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

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(message="'stream_options' needs 'stream': true.", param="stream_options")


class CompletionRequest(GenerateRequest):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[HarmlessValues] = COMPLETION_UNSUPPORTED

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

    unsupported: ClassVar[HarmlessValues] = CHAT_UNSUPPORTED

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(message="'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            text = "'max_tokens' and 'max_completion_tokens' differ. Send one of them."
            raise InvalidRequestError(message=text, param="max_completion_tokens")
