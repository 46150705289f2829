"""Requests and answers of the endpoints around generation: token ids of a text, text of token ids, ending requests.

Knows nothing about how they are served.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from core.errors import InvalidRequestError
from router.protocol.base import AnswerModel, HarmlessValues, RequestModel
from router.protocol.fields import TOKENIZE_UNSUPPORTED
from router.protocol.generate import MESSAGES_MAX, PROMPT_TOKENS_MAX, ChatMessage, ModelName, TokenId

REQUEST_IDS_MAX = 1024
"""In one POST /abort_requests."""
REQUEST_ID_CHARS_MAX = 128

ClientRequestId = Annotated[str, Field(pattern=r"^[\x21-\x7e]+$", max_length=REQUEST_ID_CHARS_MAX)]


class TokenizeRequest(RequestModel):
    """Body of POST /tokenize: a text, or a conversation as the chat template renders it."""

    unsupported: ClassVar[HarmlessValues] = TOKENIZE_UNSUPPORTED

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Those that the tokenizer puts around a text; true for a prompt and false for messages if not given."""
    return_token_strs: bool = False

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError(message="Send exactly one of 'prompt' and 'messages'.", param="prompt")


class TokenizeResponse(AnswerModel):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    """Tokens of prompt plus output at most."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Body of POST /detokenize."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=PROMPT_TOKENS_MAX, fail_fast=True)]


class DetokenizeResponse(AnswerModel):
    """Answer of POST /detokenize."""

    prompt: str
    """Special tokens are spelled out."""


class AbortRequest(RequestModel):
    """Body of POST /abort_requests."""

    request_ids: Annotated[list[ClientRequestId], Field(max_length=REQUEST_IDS_MAX, fail_fast=True)]
    """X-Request-Id values."""


class AbortResponse(AnswerModel):
    """Answer of POST /abort_requests."""

    num_aborted: int
    """Prompts that were ended; an id that names none is no error."""
