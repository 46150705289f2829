"""Types that every endpoint shares: the strict base model, the error envelope, usage and model cards.

Imports `core.errors` and pydantic only. Knows nothing about generation, HTTP or workers.
"""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from core.errors import PdclusterError

FIELD_NAME_CHARS_MAX = 64
"""Of a client's own names in our messages; the rest is cut off."""


class StrictModel(BaseModel):
    """A value read from a client: unknown fields, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


HarmlessValues = Mapping[str, tuple[object, ...]]
"""Field -> values of it that change nothing."""


class RequestModel(StrictModel):
    """The body of a request."""

    unsupported: ClassVar[HarmlessValues] = MappingProxyType({})
    """Fields that clients know and this server does not support."""

    def check(self) -> None:
        """Raises InvalidRequestError for fields that do not go together."""


class AnswerModel(BaseModel):
    """A value written to a client. Fields that were not set are left out, so that optional extras cost nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class ErrorInfo(AnswerModel):
    """The inside of the error envelope."""

    message: str
    type: str
    param: str | None
    """Dotted path of the field at fault, if there is one."""
    code: int
    """Equals the HTTP status."""


class ErrorResponse(AnswerModel):
    """OpenAI's error envelope, the body of every answer that is not a success."""

    error: ErrorInfo

    @classmethod
    def of(cls, error: PdclusterError) -> "ErrorResponse":
        return cls.make(
            message=str(error),
            type=error.error_type,
            param=getattr(error, "param", None),
            code=error.http_status,
        )

    @classmethod
    def make(cls, *, message: str, type: str, code: int, param: str | None = None) -> "ErrorResponse":
        return cls(error=ErrorInfo(message=message, type=type, param=param, code=code))


class PromptTokensDetails(AnswerModel):
    """What of the prompt was free."""

    cached_tokens: int
    """Prompt tokens that no worker had to compute."""


class Usage(AnswerModel):
    """Token counts of one request over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ModelCard(AnswerModel):
    """One served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None
    """Tokens of prompt plus output at most; null until a worker is there."""


class ModelList(AnswerModel):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
