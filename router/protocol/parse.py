"""How a body becomes a request: one JSON object, its unknown and unsupported fields, every range, what goes together.

Whatever is wrong, the error names the field in the client's own terms. Knows nothing about HTTP, tokenizers or workers.
"""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from core.errors import InvalidRequestError, UnsupportedFieldError
from router.protocol.base import FIELD_NAME_CHARS_MAX, RequestModel, nearest_name
from router.protocol.document import parse_object
from router.protocol.fields import drop_harmless_fields
from router.protocol.generate import (
    CONTENT_PARTS_MAX,
    PROMPTS_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    ChatMessage,
    StreamOptions,
    TextPart,
)

AnyRequest = TypeVar("AnyRequest", bound=RequestModel)

_UNIONS = {
    "prompt": f"a string, a list of token ids, or a list of at most {PROMPTS_MAX} of either, none of them empty",
    "stop": f"a string or a list of at most {STOP_STRINGS_MAX} strings of 1 to {STOP_STRING_CHARS_MAX} characters",
    "content": f"a string or a list of at most {CONTENT_PARTS_MAX} text parts",
}


def parse_request(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """A body as a request. Raises InvalidRequestError naming the field at fault."""
    fields = drop_harmless_fields(parse_object(body), frozenset(kind.model_fields), kind.unsupported)
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None
    request.check()
    return request


def _refusal(error: ValidationError) -> InvalidRequestError:
    """The first thing wrong, in our words, with a path a client recognises."""
    problems = error.errors(include_url=False, include_context=False)
    problem = min(problems, key=lambda e: (-len(_path(e["loc"])), e["type"] != "extra_forbidden"))
    path = _path(problem["loc"])
    if problem["type"] == "extra_forbidden":
        path = [*_path(problem["loc"][:-1]), str(problem["loc"][-1])]
    path = [part[:FIELD_NAME_CHARS_MAX] for part in path]
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
    model: type[BaseModel] = ChatMessage if path[0] == "messages" else StreamOptions
    return list((TextPart if "content" in path else model).model_fields)
