"""Requests over real sockets: times, bodies, and every way in which a server can fail. No failure is a fast answer."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from cluster.bench.client import RequestOptions, open_server
from cluster.bench.record import FailureReason, RequestRecord
from cluster.bench.workload import Prompt
from core.clock import SystemClock
from core.errors import BenchError
from tests.cluster.bench.fake_server import (
    DONE,
    Body,
    FakeAnswer,
    FakeServer,
    event,
    plain_answer,
    serving,
    token_event,
    usage_event,
)

pytestmark = pytest.mark.process

IDS = Prompt(content=(5, 6, 7), num_tokens=3, num_output_tokens=3)
TEXT = Prompt(content="the of and", num_tokens=3, num_output_tokens=3)


def ask(
    script: Callable[[Body], FakeAnswer], prompt: Prompt = IDS, api_key: str | None = None, **options: Any
) -> tuple[RequestRecord, FakeServer]:
    server = FakeServer(script)

    async def main() -> RequestRecord:
        async with open_server(server.url, SystemClock(), api_key) as client:
            return await client.send(prompt, RequestOptions(model="fake", **options))

    with serving(server):
        return asyncio.run(main()), server


def test_times_are_of_the_chunks_when_the_server_takes_its_time() -> None:
    record, _ = ask(lambda body: plain_answer(body, first_s=0.15, gap_s=0.05))
    assert record.is_complete, record.detail
    assert (record.num_prompt_tokens, record.num_output_tokens) == (3, 3)
    assert record.ttft_s >= 0.15
    assert len(record.itls_s) == 2 and all(gap >= 0.04 for gap in record.itls_s)
    assert record.e2el_s == pytest.approx(record.ttft_s + sum(record.itls_s))


def test_time_after_the_last_token_does_not_count() -> None:
    def script(body: Body) -> FakeAnswer:
        return FakeAnswer(pieces=[(0.0, token_event("a", "length")), (0.3, usage_event(3, 3) + DONE)])

    record, _ = ask(script)
    assert record.is_complete and record.e2el_s < 0.3


def test_chunks_that_arrive_together_are_as_many_tokens() -> None:
    def script(body: Body) -> FakeAnswer:
        burst = b"".join([token_event("a"), token_event("b"), token_event("c", "length"), usage_event(3, 3), DONE])
        return FakeAnswer(pieces=[(0.0, burst)])

    record, _ = ask(script)
    assert record.is_complete and record.itls_s == [0.0, 0.0]


def test_completion_body_is_what_the_options_say() -> None:
    _, server = ask(plain_answer, api_key="secret", extra_body={"temperature": 0}, has_token_ids=True)
    assert server.bodies == [
        {
            "model": "fake", "prompt": [5, 6, 7], "max_tokens": 3, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True, "temperature": 0,
        }
    ]  # fmt: skip
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1")
    assert "authorization: Bearer secret" in server.heads[0]


def test_chat_body_holds_the_text_as_a_message() -> None:
    def script(body: Body) -> FakeAnswer:
        def chunk(finish_reason: str | None = None, **delta: str) -> bytes:
            return event({"choices": [{"delta": delta, "finish_reason": finish_reason}]})

        pieces = [chunk(role="assistant"), chunk(content="Hi"), chunk("stop", content="."), usage_event(9, 2), DONE]
        return FakeAnswer(pieces=[(0.0, piece) for piece in pieces])

    record, server = ask(script, TEXT, endpoint="/v1/chat/completions", ignore_eos=False)
    assert record.is_complete, record.detail
    assert (record.num_prompt_tokens, record.num_output_tokens, len(record.token_times_s)) == (9, 2, 2)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "the of and"}]
    assert "ignore_eos" not in server.bodies[0]
    assert server.heads[0].startswith("POST /v1/chat/completions ")


def fail(*pieces: bytes, **answer: Any) -> Callable[[Body], FakeAnswer]:
    return lambda body: FakeAnswer(pieces=[(0.0, piece) for piece in pieces], **answer)


ONE, LAST, USAGE = token_event("a"), token_event("b", "length"), usage_event(3, 3)


@pytest.mark.parametrize(
    ("script", "reason", "part"),
    [
        (fail(b'{"error": {"message": "busy"}}', status=503), FailureReason.HTTP_STATUS, "503: busy"),
        (fail(b"<html>", status=502), FailureReason.HTTP_STATUS, "502: <html>"),
        (fail(ONE, ONE, ending="cut"), FailureReason.TRUNCATED, "Protocol"),
        (fail(ONE, LAST, USAGE, ending="cut"), FailureReason.TRUNCATED, "Protocol"),
        (fail(ending="cut"), FailureReason.CONNECTION, "Protocol"),
        (fail(ONE, ONE), FailureReason.TRUNCATED, "no [DONE]"),
        (fail(ONE, event({"error": {"message": "lost"}}), DONE), FailureReason.ERROR_EVENT, "lost"),
        (fail(ONE, LAST, usage_event(3, 2), DONE), FailureReason.WRONG_COUNT, "2 tokens instead of 3"),
        (fail(ONE, LAST, DONE), FailureReason.NO_USAGE, "usage"),
        (fail(b'{"choices": [{"text": "not a stream"}]}'), FailureReason.TRUNCATED, "no [DONE]"),
        (fail(ONE, ending="hang"), FailureReason.TIMEOUT, "0.5 s"),
        (fail(ending="hang"), FailureReason.TIMEOUT, "0.5 s"),
    ],
)
def test_request_is_a_failure_when_the_server(
    script: Callable[[Body], FakeAnswer], reason: FailureReason, part: str
) -> None:
    record, _ = ask(script, timeout_s=0.5)
    assert record.failure is reason, record.detail
    assert part in record.detail
    assert record.num_output_tokens == 0


def test_request_is_a_failure_when_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = "http://{}:{}".format(*taken.getsockname())

        async def main() -> RequestRecord:
            async with open_server(url, SystemClock()) as client:
                with pytest.raises(BenchError, match="is the server up"):
                    await client.first_model()
                return await client.send(IDS, RequestOptions(model="fake"))

        record = asyncio.run(main())
    assert record.failure is FailureReason.CONNECTION


def test_first_model_is_found_whether_or_not_the_url_ends_in_v1() -> None:
    server = FakeServer(plain_answer)

    async def main() -> list[str]:
        names = []
        for url in (server.url, f"{server.url}/v1/"):
            async with open_server(url, SystemClock()) as client:
                names.append(await client.first_model())
        return names

    with serving(server):
        assert asyncio.run(main()) == ["fake", "fake"]
