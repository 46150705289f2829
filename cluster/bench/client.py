"""One server as a bench sees it: which model it serves, and one streamed request after the other.

The only module of the bench that speaks HTTP. A request never raises for what the server does: it ends in a record,
complete or failed. Knows nothing about rates, rounds or statistics.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

from cluster.bench.record import FailureReason, RequestRecord, StreamReader, message_of
from cluster.bench.workload import Prompt
from core.clock import Clock
from core.errors import BenchError

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]

CONNECT_TIMEOUT_S = 10.0
MODELS_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 2.0
"""Idle connections are closed before servers do so (after 5 s and more), or a request might meet a closed one."""
ERROR_BODY_BYTES_MAX = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What every request of a run has in common."""

    endpoint: Endpoint = "/v1/completions"
    model: str
    ignore_eos: bool = True
    """Sent, and then a count of tokens other than asked for is a failure."""
    has_token_ids: bool = False
    """Ask for the ids of the tokens, and check usage against them."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    def body(self, prompt: Prompt) -> bytes:
        """JSON. Fields of extra_body win."""
        if self.endpoint == "/v1/completions":
            fields: dict[str, Any] = {"prompt": prompt.content}
        else:
            fields = {"messages": [{"role": "user", "content": prompt.content}]}
        fields |= {
            "model": self.model,
            "max_tokens": prompt.num_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.has_token_ids:
            fields["return_token_ids"] = True
        return msgspec.json.encode(fields | dict(self.extra_body))


class ServerClient:
    """Sends requests to one base URL. Open it with `open_server`."""

    def __init__(self, http: httpx.AsyncClient, base_url: str, clock: Clock) -> None:
        self.base_url = base_url
        self._http = http
        self._clock = clock

    async def first_model(self) -> str:
        """Id of the first model served. Raises BenchError: nobody there, or not this API."""
        try:
            answer = await self._http.get(f"{self.base_url}/v1/models", timeout=MODELS_TIMEOUT_S)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            problem = (
                f"GET /v1/models failed ({str(error) or type(error).__name__}); is the server up, and the URL right?"
            )
            raise BenchError(subject=self.base_url, problem=problem) from error
        except (ValueError, LookupError, TypeError) as error:
            problem = f"GET /v1/models names no model ({error}); name one with --model"
            raise BenchError(subject=self.base_url, problem=problem) from error

    async def send(
        self, prompt: Prompt, options: RequestOptions, *, queue_s: float = 0.0, reader: StreamReader | None = None
    ) -> RequestRecord:
        """One request, from sending to the end of its stream. `reader` lets a caller watch it under way."""
        reader = reader or StreamReader(options.has_token_ids)
        body = options.body(prompt)
        started_s = self._clock.now()
        try:
            async with asyncio.timeout(options.timeout_s):
                failure = await self._exchange(body, options, reader)
        except TimeoutError:
            failure = FailureReason.TIMEOUT, f"not complete within {options.timeout_s:g} s"
        except httpx.HTTPError as error:
            reason = FailureReason.TRUNCATED if reader.token_times_s else FailureReason.CONNECTION
            failure = reason, f"{type(error).__name__}: {error}"
        if failure is None:
            failure = reader.failure(prompt.num_output_tokens if options.ignore_eos else None)
        num_prompt = reader.num_prompt_tokens
        return RequestRecord(
            started_s=started_s,
            num_prompt_tokens=prompt.num_tokens if num_prompt is None else num_prompt,
            num_output_tokens=0 if failure else reader.num_output_tokens or 0,
            token_times_s=reader.token_times_s,
            queue_s=queue_s,
            failure=failure[0] if failure else None,
            detail=failure[1] if failure else "",
        )

    async def _exchange(
        self, body: bytes, options: RequestOptions, reader: StreamReader
    ) -> tuple[FailureReason, str] | None:
        url, now = f"{self.base_url}{options.endpoint}", self._clock.now
        async with self._http.stream("POST", url, content=body) as answer:
            if answer.status_code != httpx.codes.OK:
                return FailureReason.HTTP_STATUS, f"{answer.status_code}: {await _error_text(answer)}"
            # Raw bytes: splitting lines and decoding text would cost more than reading the events.
            async for data in answer.aiter_raw():
                reader.feed(data, now())
        return None


@asynccontextmanager
async def open_server(base_url: str, clock: Clock, api_key: str | None = None) -> AsyncIterator[ServerClient]:
    """A client of `base_url` with as many connections as requests; direct, whatever proxy the environment names."""
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    base_url = base_url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        # Reading the certificates takes most of a second, and a server without TLS needs none.
        verify=base_url.startswith("https:"),
        trust_env=False,
    ) as http:
        yield ServerClient(http, base_url, clock)


async def _error_text(answer: httpx.Response) -> str:
    """What the server says is wrong."""
    body = b""
    async for data in answer.aiter_raw():
        body += data
        if len(body) > ERROR_BODY_BYTES_MAX:
            break
    try:
        return message_of(msgspec.json.decode(body))
    except (msgspec.DecodeError, RecursionError):
        return message_of(body.decode(errors="replace"))


def rate_text(rate: float) -> float | str:
    """A rate as JSON can carry it."""
    return "inf" if math.isinf(rate) else rate
