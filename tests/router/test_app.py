"""The HTTP surface, called without sockets: shapes, statuses, headers, streams, and clients that leave."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.messages import Offer, Prefill, Refused, Submit
from router.app import build_app
from router.incoming import BODY_BYTES_MAX
from tests.router.scripted import IM_END, Stage, open_stage, settle

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
COMPLETION = {"model": "tiny", "prompt": "hello world, this is a prompt of some length"}

REAL_TIME_S_MAX = 60.0
Scenario = Callable[[Stage, httpx.AsyncClient], Awaitable[None]]


def play(directory: Path, scenario: Scenario, **limits: Any) -> None:
    """Run a scenario against a router with one prefill and one decode worker, while time passes."""

    async def main() -> None:
        async with open_stage(directory, **limits) as stage:
            transport = httpx.ASGITransport(app=build_app(stage.service), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                task = asyncio.ensure_future(scenario(stage, client))
                for _ in range(200):
                    await settle()
                    if task.done():
                        break
                    stage.clock.advance(0.05)
                async with asyncio.timeout(REAL_TIME_S_MAX):  # large bodies are read on another thread
                    await task
            assert stage.service.admission.num_in_flight == 0

    asyncio.run(main())


def events_of(body: str) -> list[Any]:
    """The events of a stream that ended properly."""
    lines = body.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_chat_answer_has_openai_shape_when_not_streamed(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
        choice = body["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Hi there", "refusal": None}
        assert (choice["finish_reason"], choice["logprobs"], choice["stop_reason"]) == ("stop", None, None)
        rendered = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        assert body["usage"]["prompt_tokens"] == len(stage.text.encode(rendered, False))
        assert body["usage"]["completion_tokens"] == 9
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
        assert "pdcluster_timing" not in body

    play(model_directory, scenario)


def test_chat_stream_has_role_text_usage_and_done_when_asked(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/chat/completions", json=body, headers={"x-pdcluster-timing": "true"})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "Hi there"
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-2:] == [None, "stop"]
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 9
        timing = events[-1]["pdcluster_timing"]
        assert set(timing) == {
            "queue_s", "credit_s", "prefill_s", "transfer_s", "tail_s", "decode_s",
            "retry_s", "prefill_queue_s", "tail_queue_s", "ttft_s", "tpot_s", "total_s",
        }  # fmt: skip
        phases = [timing[f"{phase}_s"] for phase in ("queue", "credit", "prefill", "transfer", "tail", "decode")]
        assert sum(phases) == pytest.approx(timing["total_s"])
        assert len({e["id"] for e in events}) == 1

    play(model_directory, scenario)


def test_stream_has_no_usage_when_not_asked(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
        events = events_of(response.text)
        assert "".join(e["choices"][0]["text"] for e in events) == "Hi there"
        assert all("usage" not in e for e in events)

    play(model_directory, scenario)


def test_completion_has_parallel_logprob_lists_when_asked(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        body = {**COMPLETION, "logprobs": 2, "max_tokens": 3, "return_token_ids": True}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["finish_reason"] == "length" and choice["text"] == "Hi "
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["H", "i", " "] and logprobs["text_offset"] == [0, 1, 2]
        assert logprobs["token_logprobs"] == [-0.5] * 3
        assert [next(iter(top)) for top in logprobs["top_logprobs"]] == ["H", "i", " "]
        assert choice["token_ids"] == stage.text.encode("Hi ", False)
        assert choice["prompt_token_ids"] == stage.text.encode(COMPLETION["prompt"], True)

    play(model_directory, scenario)


def test_chat_has_logprobs_with_bytes_when_asked(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2, "stop_token_ids": [IM_END]}
        choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert choice["stop_reason"] == IM_END
        assert [entry["token"] for entry in content] == [*"Hi there", "<|im_end|>"]
        assert content[0]["bytes"] == [72] and len(content[0]["top_logprobs"]) == 2

    play(model_directory, scenario)


def test_choices_are_numbered_by_prompt_then_child_when_prompts_are_many(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        body = {"prompt": ["first prompt", "second prompt"], "n": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert all(choice["text"] == "Hi there" for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 36
        answer = await client.post("/v1/completions", json={"prompt": [[1, 2], [3]], "stream": True})
        assert {e["choices"][0]["index"] for e in events_of(answer.text)} == {0, 1}

    play(model_directory, scenario)


@pytest.mark.parametrize(
    ("change", "status", "kind", "param"),
    [
        ({"temperature": 3}, 400, "BadRequestError", "temperature"),
        ({"tools": [{"type": "function"}]}, 400, "BadRequestError", "tools"),
        ({"max_token": 3}, 400, "BadRequestError", "max_token"),
        ({"model": "other"}, 404, "NotFoundError", None),
        ({"max_tokens": 600}, 400, "BadRequestError", "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "BadRequestError", "messages"),
        ({"logit_bias": {"300": 1}}, 400, "BadRequestError", "logit_bias"),
        ({"n": 128}, 400, "BadRequestError", "n"),
    ],
)
def test_bad_request_is_named_when_a_field_is_wrong(
    model_directory: Path, change: dict[str, object], status: int, kind: str, param: str | None
) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/chat/completions", json={**CHAT, **change})
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"], error["code"]) == (status, kind, param, status)
        assert not stage.workers["decode-0"].sent(Submit)

    play(model_directory, scenario, max_running_sequences=100)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"messages": ',
        b'{"a": NaN}',
        b'{"messages": "\xff"}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": "\\ud800"}',
    ],
)
def test_body_is_refused_when_it_is_not_json(model_directory: Path, body: bytes) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 400 and response.json()["error"]["type"] == "BadRequestError"

    play(model_directory, scenario)


def test_body_is_refused_when_it_is_too_large_or_of_another_type(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=b" " * (BODY_BYTES_MAX + 1), headers=headers)
        assert response.status_code == 413 and "larger" in response.json()["error"]["message"]
        response = await client.post("/v1/completions", data={"prompt": "x"})
        assert response.status_code == 415 and "Content-Type" in response.json()["error"]["message"]

    play(model_directory, scenario)


def test_errors_have_the_envelope_when_no_route_matches(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        response = await client.get("/v1/nothing", headers={"x-request-id": "abc-1"})
        assert response.status_code == 404 and response.json()["error"]["code"] == 404
        assert response.headers["x-request-id"] == "abc-1"
        response = await client.get("/v1/completions")
        assert response.status_code == 405 and response.headers["allow"] == "POST"
        assert response.json()["error"]["type"] == "MethodNotAllowedError"
        assert len(response.headers["x-request-id"]) == 32

    play(model_directory, scenario)


def test_overload_says_when_to_come_back(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        decode = stage.workers["decode-0"]
        decode.replies = lambda m: [
            Refused(request_id=m.request_id, attempt=m.attempt, kind="overloaded", reason="full", retry_after_s=7)
        ]
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert response.status_code == 503 and response.headers["retry-after"] == "7"
        assert response.json()["error"]["type"] == "ServiceUnavailable"

    play(model_directory, scenario)


def test_stream_ends_with_an_error_event_when_decode_dies(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        decode = stage.workers["decode-0"]
        decode.replies = lambda m: decode.ordinary(m)[:3] if isinstance(m, Offer) else None
        task = asyncio.ensure_future(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        await settle()
        stage.kill("decode-0")
        response = await task
        events = events_of(response.text)
        assert response.status_code == 200 and events[-1]["error"]["code"] == 503
        ready = await client.get("/ready")
        assert ready.status_code == 503 and int(ready.headers["retry-after"]) >= 1
        assert (await client.get("/health")).status_code == 200

    play(model_directory, scenario)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("stays_silent_at", [Prefill, Offer])
def test_workers_are_cancelled_when_the_client_hangs_up(
    model_directory: Path, is_stream: bool, stays_silent_at: type[Any]
) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            decode, prefill = stage.workers["decode-0"], stage.workers["prefill-0"]
            prefill.replies = lambda m: [] if isinstance(m, stays_silent_at) else None
            decode.replies = lambda m: decode.ordinary(m)[:3] if isinstance(m, stays_silent_at) else None
            hang_up = asyncio.Event()
            task = asyncio.ensure_future(call_raw(stage, {**CHAT, "stream": is_stream}, hang_up))
            await settle()
            assert stage.service.admission.num_in_flight == 1
            hang_up.set()
            await settle()
            assert task.done() and stage.service.admission.num_in_flight == 0
            assert len(stage.cancels("decode-0")) == 1
            assert len(stage.cancels("prefill-0")) == (1 if stays_silent_at is Prefill else 0)

    asyncio.run(main())


async def call_raw(stage: Stage, body: dict[str, object], hang_up: asyncio.Event) -> None:
    """One request over bare ASGI, whose client hangs up on demand."""
    inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, object]:
        if inbox:
            return inbox.pop()
        await hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        assert not hang_up.is_set() or "more_body" not in str(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("test", 1),
        "server": ("router", 80),
    }
    await build_app(stage.service)(scope, receive, send)


def test_operators_see_models_readiness_and_version(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        card = (await client.get("/v1/models")).json()["data"][0]
        assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
        assert (await client.get("/v1/models/tiny")).json() == card
        assert (await client.get("/v1/models/other")).status_code == 404
        ready = await client.get("/ready")
        assert ready.status_code == 200 and ready.json()["workers"] == {"prefill": 1, "decode": 1}
        assert (await client.get("/version")).json()["version"]

    play(model_directory, scenario)


def test_metrics_count_requests_and_show_workers(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        await client.post("/v1/chat/completions", json=CHAT)
        text = (await client.get("/metrics")).text
        router, vllm = 'router="router-0"', 'model_name="tiny",router="router-0"'
        assert f'pdcluster_requests_total{{outcome="finished",{router}}} 1.0' in text
        assert f"pdcluster_output_tokens_total{{{router}}} 9.0" in text
        assert f'pdcluster_steps_total{{role="decode",{router},worker="decode-0"}} 5.0' in text
        assert f'pdcluster_kv_used_blocks{{role="prefill",{router},worker="prefill-0"}} 1.0' in text
        assert f'vllm:time_to_first_token_seconds_count{{engine="router-0",{vllm}}} 1.0' in text
        assert f'vllm:kv_cache_usage_perc{{engine="decode-0",{vllm}}} 0.015625' in text

    play(model_directory, scenario)
