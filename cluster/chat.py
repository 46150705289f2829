"""Talking to a running cluster through its own HTTP API: one streamed answer, a conversation, and where the time went.

Knows nothing about clusters or terminals: the caller gives an `httpx.Client` and a function that takes text.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from core.errors import ClusterError

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0
"""Between two chunks; the first one waits for the queue and the whole prompt."""
TIMING_HEADER = "x-pdcluster-timing"
TIMING_KEY = "pdcluster_timing"
TIMING_ROWS = (
    ("queue", "queue_s"),
    ("credit", "credit_s"),
    ("prefill", "prefill_s"),
    ("  its queue", "prefill_queue_s"),
    ("transfer", "transfer_s"),
    ("tail", "tail_s"),
    ("decode", "decode_s"),
    ("total", "total_s"),
    ("first token", "ttft_s"),
    ("per token", "tpot_s"),
)
"""The six phases add up to the total; one row is a part of the row above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How an answer is sampled; None leaves a value to the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    has_timing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One complete answer."""

    text: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    timing: Mapping[str, float | None] | None
    """Seconds by the keys of TIMING_ROWS, when asked for."""


def open_client(url: str) -> httpx.Client:
    """A client of the API at `url`, direct, whatever proxy the environment names. Raises ClusterError for no URL."""
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    try:
        return httpx.Client(base_url=url, timeout=timeout, trust_env=False)
    except httpx.InvalidURL as error:
        raise ClusterError(name=url, problem=f"is no URL: {error}") from error


def fetch_model_name(client: httpx.Client) -> str:
    """Id of the model that is served. Raises ClusterError."""
    with _errors(client):
        response = client.get("/v1/models")
        _require_success(client, response)
        return str(response.json()["data"][0]["id"])


def stream_answer(
    client: httpx.Client,
    model: str,
    messages: Sequence[Mapping[str, str]],
    options: ChatOptions,
    show: Callable[[str], None],
) -> Answer:
    """Ask; hand each piece of the answer to `show` as it comes. Raises ClusterError when refused, failed or cut."""
    text: list[str] = []
    finish_reason: str | None = None
    last: Mapping[str, Any] = {}
    with (
        _errors(client),
        client.stream("POST", "/v1/chat/completions", **_request(model, messages, options)) as response,
    ):
        if not response.is_success:
            response.read()
        _require_success(client, response)
        for chunk in _chunks(client, _lines(response)):
            last = chunk if chunk.get("usage") else last
            for choice in chunk.get("choices", ()):
                if piece := choice.get("delta", {}).get("content"):
                    text.append(piece)
                    show(piece)
                finish_reason = choice.get("finish_reason") or finish_reason
    usage = last.get("usage") or {}
    return Answer(
        text="".join(text),
        finish_reason=finish_reason,
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_output_tokens=usage.get("completion_tokens", 0),
        timing=last.get(TIMING_KEY),
    )


def _request(model: str, messages: Sequence[Mapping[str, str]], options: ChatOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }
    return {
        "json": {key: value for key, value in body.items() if value is not None},
        "headers": {TIMING_HEADER: "true"} if options.has_timing else {},
    }


def _lines(response: httpx.Response) -> Iterator[str]:
    """Lines as server-sent events have them: text may hold other characters that Python takes for ends of lines."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode().removesuffix("\r") for line in lines)


def _chunks(client: httpx.Client, lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """The JSON of each server-sent event up to the end marker."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue  # blank lines between events, and comments
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise _failure(client, chunk["error"].get("message", "the request failed"))
        yield chunk
    raise _failure(client, "the connection closed before the answer was complete")


@contextmanager
def _errors(client: httpx.Client) -> Iterator[None]:
    """Turns what httpx and JSON raise into a ClusterError that names the URL."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise _failure(client, "nothing answers there; `pdcluster status` shows what runs") from error
    except httpx.HTTPError as error:
        raise _failure(client, f"{type(error).__name__}: {error}") from error
    except (ValueError, LookupError) as error:
        raise _failure(client, f"the answer could not be understood ({error})") from error


def _require_success(client: httpx.Client, response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200]
    raise _failure(client, f"answered {response.status_code}: {message}")


def _failure(client: httpx.Client, problem: str) -> ClusterError:
    return ClusterError(name=str(client.base_url).rstrip("/"), problem=problem)


def render_timing(answer: Answer) -> str:
    """Where the time went, one line per part; a part that did not happen shows a dash."""
    if answer.timing is None:
        return "the server reported no timing"
    lines = []
    for label, key in TIMING_ROWS:
        value = answer.timing.get(key)
        lines.append(f"  {label:<12}{'-' if value is None else f'{value:9.3f} s'}")
    lines.append(f"  {'tokens':<12}{answer.num_prompt_tokens} in, {answer.num_output_tokens} out")
    return "\n".join(lines)
