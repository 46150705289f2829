"""What became of one request: when its tokens came and how many, or why it counts as failed.

Reads the bytes of a stream of server-sent events as they arrive; whoever reads the socket says what time it is. Knows
nothing about sockets, clocks or other requests.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

EVENT_BYTES_MAX = 8 * 1024 * 1024


class FailureReason(StrEnum):
    """Why a request counts as failed. The first that applies."""

    HTTP_STATUS = "http_status"
    """The answer was not 200."""
    CONNECTION = "connection"
    """No connection, or it broke before the first token."""
    TIMEOUT = "timeout"
    """Not complete within the limit."""
    ERROR_EVENT = "error_event"
    """The server said in the stream that it failed."""
    BAD_STREAM = "bad_stream"
    """What came is not a stream of JSON events."""
    TRUNCATED = "truncated"
    """The stream ended without its end marker, or without a finish reason."""
    NO_TOKENS = "no_tokens"
    NO_USAGE = "no_usage"
    """The server counted no tokens: nothing can be said about its speed."""
    WRONG_COUNT = "wrong_count"
    """Other tokens arrived than were counted, or than were asked for with ignore_eos."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, complete or failed. Times are seconds of one monotonic clock."""

    started_s: float
    """Just before it was sent."""
    num_prompt_tokens: int
    """As the server counted; as we did when it said nothing."""
    num_output_tokens: int = 0
    """As the server counted; 0 of a failed request."""
    token_times_s: Sequence[float] = ()
    """Arrival of each chunk that carried tokens; also of a failed request."""
    queue_s: float = 0.0
    """How long it waited in this client for the limit on concurrency, after it was due."""
    failure: FailureReason | None = None
    detail: str = ""
    """Of the failure."""

    @property
    def is_complete(self) -> bool:
        return self.failure is None

    @property
    def ttft_s(self) -> float:
        """Sending to first token. Of complete requests only, like the others below."""
        return self.token_times_s[0] - self.started_s

    @property
    def e2el_s(self) -> float:
        """Sending to last token."""
        return self.token_times_s[-1] - self.started_s

    @property
    def itls_s(self) -> list[float]:
        """Gaps between chunks with tokens; a chunk with several tokens counts once."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """None of a request with one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)


class StreamReader:
    """One answer as it arrives. Feed it every piece of the body, then ask for the failure, if there is one."""

    def __init__(self, has_token_ids: bool = False) -> None:
        """has_token_ids: the server was asked to send token ids, so chunks without any carry no token."""
        self.token_times_s: list[float] = []
        self.usage: Mapping[str, Any] | None = None
        self._has_token_ids = has_token_ids
        self._buffer = b""
        self._num_ids = 0
        self._num_text_chunks = 0
        self._is_finished = False
        self._is_done = False
        self._failure: tuple[FailureReason, str] | None = None

    def feed(self, data: bytes, now: float) -> None:
        """A piece of the body that arrived at `now`."""
        buffer = self._buffer + data
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        if b"\n\n" not in buffer:
            self._buffer = buffer
            if len(buffer) > EVENT_BYTES_MAX:
                self._fail(FailureReason.BAD_STREAM, f"an event of more than {EVENT_BYTES_MAX} bytes")
                self._buffer = b""
            return
        *events, self._buffer = buffer.split(b"\n\n")
        for event in events:
            self._read_event(event, now)

    def failure(self, num_asked: int | None) -> tuple[FailureReason, str] | None:
        """After the end of the body: why the answer counts as failed. num_asked: tokens it must have, if known."""
        if self._failure is not None:
            return self._failure
        if not self._is_done:
            return FailureReason.TRUNCATED, f"no [DONE] after {len(self.token_times_s)} chunks with tokens"
        if not self._is_finished:
            return FailureReason.TRUNCATED, "no finish reason"
        if not self.token_times_s:
            return FailureReason.NO_TOKENS, "no chunk with tokens"
        if self._has_token_ids and not self._num_ids:
            return FailureReason.BAD_STREAM, "the server sends no token_ids; do without --check-ids"
        return self._wrong_count(num_asked)

    def _wrong_count(self, num_asked: int | None) -> tuple[FailureReason, str] | None:
        counted = self.num_output_tokens
        if counted is None:
            return FailureReason.NO_USAGE, "no usage with completion_tokens"
        if self._has_token_ids and self._num_ids != counted:
            return FailureReason.WRONG_COUNT, f"{self._num_ids} token ids arrived, usage says {counted}"
        if self._num_text_chunks > counted:
            return FailureReason.WRONG_COUNT, f"{self._num_text_chunks} chunks with text, usage says {counted} tokens"
        if num_asked is not None and counted != num_asked:
            return FailureReason.WRONG_COUNT, f"{counted} tokens instead of {num_asked}"
        return None

    @property
    def num_output_tokens(self) -> int | None:
        return self._counted("completion_tokens")

    @property
    def num_prompt_tokens(self) -> int | None:
        return self._counted("prompt_tokens")

    def _counted(self, key: str) -> int | None:
        value = (self.usage or {}).get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _fail(self, reason: FailureReason, detail: str) -> None:
        self._failure = self._failure or (reason, detail)

    def _read_event(self, event: bytes, now: float) -> None:
        if event.startswith(b"data:") and b"\n" not in event:
            data = event[5:].strip()
        else:
            lines = event.split(b"\n")
            data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        if not data:
            return  # a comment, which keeps the connection open
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):
            self._fail(FailureReason.BAD_STREAM, f"an event that is no JSON: {data[:80]!r}")
            return
        if not isinstance(value, dict):
            self._fail(FailureReason.BAD_STREAM, f"an event that is no object: {data[:80]!r}")
        else:
            self._read_chunk(value, now)

    def _read_chunk(self, chunk: Mapping[str, Any], now: float) -> None:
        if chunk.get("error") is not None:
            self._fail(FailureReason.ERROR_EVENT, message_of(chunk))
            return
        if isinstance(usage := chunk.get("usage"), dict):
            self.usage = usage
        choices = chunk.get("choices") or ()
        if not choices:
            return
        choice = choices[0] if isinstance(choices, list) else None
        if not isinstance(choice, dict):
            self._fail(FailureReason.BAD_STREAM, "choices that are no list of objects")
            return
        self._read_choice(choice, now)

    def _read_choice(self, choice: Mapping[str, Any], now: float) -> None:
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        has_text = bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))
        has_finish = choice.get("finish_reason") is not None
        ids = choice.get("token_ids")
        num_ids = len(ids) if isinstance(ids, list) else 0
        self._num_ids += num_ids
        self._num_text_chunks += has_text
        self._is_finished |= has_finish
        # Without ids, a chunk without text still stands for a token: of half a character, or of the end of text.
        is_bare_role = "role" in delta and not has_text and not has_finish
        if num_ids or not (self._has_token_ids or is_bare_role):
            self.token_times_s.append(now)


def message_of(body: object) -> str:
    """The message in OpenAI's error envelope, or as much of the body as fits a line."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return str(error if isinstance(error, str) and error else body)[:200]
