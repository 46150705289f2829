"""What a client sends with a request: its id and its body, within their limits.

A refusal comes as early as it can be known: from the headers, or from the first byte too many. Knows nothing about what
a body says.
"""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.types import Scope

from core.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidRequestError,
    OverloadedError,
    UnsupportedMediaTypeError,
)
from router.protocol.tokens import REQUEST_ID_CHARS_MAX

BODY_BYTES_MAX = 8 * 1024 * 1024
BODY_TIMEOUT_S = 60.0
"""A body must have arrived within."""
BODIES_BYTES_MAX = 128 * 1024 * 1024
"""Of all bodies that one router process holds because they arrive, or are parsed."""
REQUEST_ID_HEADER = "x-request-id"

_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{REQUEST_ID_CHARS_MAX}}}")


def request_id_of(scope: Scope) -> str:
    """The client's request id, or a new one when it has none that can be used."""
    given = _given_id(scope)
    return given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def require_request_id(http: Request) -> str:
    """The id of this request. Raises InvalidRequestError when the client sent one that cannot be used."""
    given = _given_id(http.scope)
    if given is not None and not _REQUEST_ID.fullmatch(given):
        text = f"X-Request-Id must be 1 to {REQUEST_ID_CHARS_MAX} printable ASCII characters without spaces."
        raise InvalidRequestError(message=text, param="X-Request-Id")
    return str(http.state.request_id)


def _given_id(scope: Scope) -> str | None:
    values = (value for name, value in scope["headers"] if name == REQUEST_ID_HEADER.encode())
    first = next(values, None)
    return None if first is None else str(first.decode("latin-1"))


class BodyReader:
    """Reads the bodies of JSON requests."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of all bodies held now."""

    @asynccontextmanager
    async def body(self, http: Request) -> AsyncIterator[bytes]:
        """The body, which counts as held until the end of the block. Raises a PdclusterError, or ClientDisconnect."""
        _check_headers(http)
        body = bytearray()
        try:
            await self._receive(http, body)
            yield bytes(body)
        finally:
            self.num_bytes -= len(body)

    async def _receive(self, http: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in http.stream():
                    self.num_bytes += len(part)
                    body += part
                    self._check_size(len(body))
        except TimeoutError:
            raise BodyTimeoutError(message=f"The body did not arrive within {BODY_TIMEOUT_S:g} s.") from None

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > BODY_BYTES_MAX:
            raise BodyTooLargeError(message=f"The body is larger than {BODY_BYTES_MAX} bytes.")
        if self.num_bytes > BODIES_BYTES_MAX:
            raise OverloadedError(
                reason=f"bodies of {self.num_bytes} bytes are arriving, at most {BODIES_BYTES_MAX} may"
            )


def _check_headers(http: Request) -> None:
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise UnsupportedMediaTypeError(message="Content-Type must be application/json.", param="Content-Type")
    encoding = http.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        text = "Compressed bodies are not supported. Send the body without Content-Encoding."
        raise UnsupportedMediaTypeError(message=text, param="Content-Encoding")
    length = http.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > BODY_BYTES_MAX):
        raise BodyTooLargeError(message=f"The body is larger than {BODY_BYTES_MAX} bytes.", param="Content-Length")
