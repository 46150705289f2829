"""A client's bytes as one JSON object, checked for everything that can be wrong before its fields mean anything.

Bounds what a body costs to look at, whatever it says. Numbers that are not finite pass, so that the check of their
field can name it. Knows nothing about fields, HTTP or models.
"""

import json
import math
from collections.abc import Iterator

from core.errors import InvalidRequestError
from router.protocol.base import FIELD_NAME_CHARS_MAX

JSON_DEPTH_MAX = 32
JSON_KEYS_MAX = 4096
"""Of one object."""
JSON_CONTAINERS_MAX = 100_000
"""Lists and objects in one body."""
JSON_MARKS_MAX = 500_000
"""Commas and opening brackets in one body, those of its texts included: a bound on its values before it is parsed."""
DIGITS_MAX = 400
"""Of an integer; a longer one is larger than any number, and taken as infinite."""


def parse_object(body: bytes) -> dict[str, object]:
    """The object. Raises InvalidRequestError, naming the field at fault where there is one."""
    if sum(body.count(mark) for mark in b",[{") > JSON_MARKS_MAX:
        raise InvalidRequestError(message=f"The body has more than {JSON_MARKS_MAX} commas and brackets.")
    try:
        value = _load(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(message=f"The body is not UTF-8: {error.reason} at byte {error.start}.") from None
    except RecursionError:
        raise InvalidRequestError(message="The body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequestError(message=f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(message="The body must be a JSON object.")
    num_containers = 0
    for name, field in value.items():
        _check_text(name, None)
        for container in _containers(field, name):
            num_containers += 1
            if num_containers > JSON_CONTAINERS_MAX:
                text = f"The body has more than {JSON_CONTAINERS_MAX} lists and objects."
                raise InvalidRequestError(message=text, param=_short(name))
            _check_container(container, name)
    return value


def _load(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more digits than Python takes
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidRequestError(message=f"The field '{_short(name)}' is there more than once.", param=_short(name))
    if len(fields) > JSON_KEYS_MAX:
        raise InvalidRequestError(message=f"An object of the body has more than {JSON_KEYS_MAX} fields.")
    return fields


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= DIGITS_MAX else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


def _containers(field: object, name: str) -> Iterator[list[object]]:
    """Contents of every list and object in `field`, keys included, breadth first; of `field` itself if it is plain."""
    layer: list[object] = [field]
    if not isinstance(field, dict | list):
        yield layer
        return
    for _ in range(JSON_DEPTH_MAX):
        below: list[object] = []
        for node in layer:
            contents = [*node, *node.values()] if isinstance(node, dict) else node
            assert isinstance(contents, list), "only lists and objects are looked into"
            yield contents
            below += [value for value in contents if isinstance(value, dict | list)]
        if not below:
            return
        layer = below
    text = f"'{_short(name)}' is nested more than {JSON_DEPTH_MAX} levels deep."
    raise InvalidRequestError(message=text, param=_short(name))


def _check_container(contents: list[object], name: str) -> None:
    param = _short(name)
    for value in contents:
        if type(value) is str:
            _check_text(value, param)


def _check_text(text: str, param: str | None) -> None:
    """JSON can spell half of a character; no text has one."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"'{param}'" if param else "A field's name"
        message = f"{where} has a lone surrogate (\\u{ord(text[error.start]):04x}), which is no text."
        raise InvalidRequestError(message=message, param=param) from None


def _short(name: str) -> str:
    return name[:FIELD_NAME_CHARS_MAX].encode("utf-8", "replace").decode()
