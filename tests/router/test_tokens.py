"""Token ids of a text, text of token ids, and ending requests by their id, over HTTP."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.messages import Cancel, Offer, Prefill
from router import endpoints
from router.answers import CompletionWriter
from router.incoming import REQUEST_ID_HEADER
from router.protocol.parse import parse_request
from router.text import TextProcessor
from tests.router.scripted import Stage, settle
from tests.router.test_app import CHAT, COMPLETION, events_of, play


def test_tokens_are_those_that_a_request_would_use(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        answer = (await client.post("/tokenize", json={"prompt": "hello, é", "model": "tiny"})).json()
        assert answer == {
            "count": len(answer["tokens"]),
            "max_model_len": 512,
            "tokens": stage.text.encode("hello, é", True),
        }
        assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": "hello, é"}
        chat = (await client.post("/tokenize", json={"messages": CHAT["messages"], "return_token_strs": True})).json()
        generated = await client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})
        assert chat["tokens"] == generated.json()["prompt_token_ids"]
        assert chat["token_strs"][0] == "<|im_start|>" and len(chat["token_strs"]) == chat["count"]
        spelled = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
        assert spelled.startswith("<|im_start|>user\nWhat is")
        empty = (await client.post("/tokenize", json={"prompt": ""})).json()
        assert (empty["count"], empty["tokens"]) == (0, [])
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}

    play(model_directory, scenario)


def test_text_longer_than_the_model_takes_is_counted_unless_far_longer(model_directory: Path) -> None:
    async def scenario(_stage: Stage, client: httpx.AsyncClient) -> None:
        assert (await client.post("/tokenize", json={"prompt": "x" * 600})).json()["count"] == 600
        assert (await client.post("/tokenize", json={"prompt": "x" * 30_000})).status_code == 400

    play(model_directory, scenario)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokens_are_refused_for_another_model_and_without_workers(model_directory: Path, path: str) -> None:
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}

    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        assert (await client.post(path, json={**body, "model": "other"})).status_code == 404
        stage.kill("decode-0")
        await settle()
        response = await client.post(path, json=body)
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1

    play(model_directory, scenario)


def silent(kind: type[Any]) -> Any:
    return lambda message: [] if isinstance(message, kind) else None


@pytest.mark.parametrize("is_stream", [False, True])
def test_request_ends_at_once_when_it_is_aborted_before_its_first_token(model_directory: Path, is_stream: bool) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        stage.workers["prefill-0"].replies = silent(Prefill)
        body, headers = {**CHAT, "stream": is_stream}, {REQUEST_ID_HEADER: "mine"}
        task = asyncio.ensure_future(client.post("/v1/chat/completions", json=body, headers=headers))
        await settle()
        before_s = stage.clock.now()
        answer = await client.post("/abort_requests", json={"request_ids": ["mine", "unknown", "mine"]})
        assert answer.json() == {"num_aborted": 1}
        response = await task
        assert stage.clock.now() == before_s
        assert (response.status_code, response.json()["error"]["type"]) == (499, "RequestCancelled")
        assert response.headers[REQUEST_ID_HEADER] == "mine"
        assert len(stage.cancels("decode-0")) == len(stage.cancels("prefill-0")) == 1
        again = await client.post("/abort_requests", json={"request_ids": ["mine"]})
        assert again.json() == {"num_aborted": 0}

    play(model_directory, scenario)


def test_stream_ends_with_an_error_event_when_it_is_aborted(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        decode = stage.workers["decode-0"]
        decode.replies = lambda m: decode.ordinary(m)[:3] if isinstance(m, Offer) else None
        headers = {REQUEST_ID_HEADER: "mine"}
        task = asyncio.ensure_future(
            client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
        )
        await settle()
        answer = await client.post("/abort_requests", json={"request_ids": ["mine"]})
        assert answer.json() == {"num_aborted": 1}
        events = events_of((await task).text)
        assert events[-1]["error"] == {
            "message": "The request was cancelled on demand.",
            "type": "RequestCancelled",
            "param": None,
            "code": 499,
        }
        assert len(decode.sent(Cancel)) == 1

    play(model_directory, scenario)


def test_all_prompts_end_when_their_request_is_aborted(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        stage.workers["prefill-0"].replies = silent(Prefill)
        body = {**COMPLETION, "prompt": ["a" * 40, "b" * 40], "n": 2}
        headers = {REQUEST_ID_HEADER: "mine"}
        task = asyncio.ensure_future(client.post("/v1/completions", json=body, headers=headers))
        await settle()
        assert (stage.service.admission.num_in_flight, stage.service.admission.num_sequences) == (2, 4)
        answer = await client.post("/abort_requests", json={"request_ids": ["mine"]})
        assert answer.json() == {"num_aborted": 2}
        assert (await task).status_code == 499
        assert len(stage.cancels("decode-0")) == 2

    play(model_directory, scenario)


def test_all_requests_of_an_id_end_and_no_others(model_directory: Path) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        stage.workers["prefill-0"].replies = silent(Prefill)
        tasks = [
            asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT, headers={REQUEST_ID_HEADER: name}))
            for name in ("same", "other", "same")
        ]
        await settle()
        answer = await client.post("/abort_requests", json={"request_ids": ["same"]})
        assert answer.json() == {"num_aborted": 2}
        await settle()
        assert [task.done() for task in tasks] == [True, False, True]
        await client.post("/abort_requests", json={"request_ids": ["other"]})
        assert [(await task).status_code for task in tasks] == [499] * 3

    play(model_directory, scenario)


@pytest.mark.parametrize(("num_chars", "is_apart"), [(100, False), (20_000, True)])
def test_long_text_is_tokenised_beside_the_loop(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, num_chars: int, is_apart: bool
) -> None:
    threads: list[threading.Thread] = []
    encode = TextProcessor.encode

    def watched(self: TextProcessor, text: str, add_special_tokens: bool) -> list[int]:
        threads.append(threading.current_thread())
        return encode(self, text, add_special_tokens)

    async def scenario(_stage: Stage, client: httpx.AsyncClient) -> None:
        threads.clear()
        response = await client.post("/tokenize", json={"prompt": "x" * num_chars})
        assert response.status_code == (400 if is_apart else 200)

    monkeypatch.setattr(TextProcessor, "encode", watched)
    play(model_directory, scenario)
    assert [thread is not threading.main_thread() for thread in threads] == [is_apart]


@pytest.mark.parametrize(("num_ids", "is_apart"), [(1, False), (400, True)])
def test_large_list_of_requests_to_abort_is_parsed_beside_the_loop(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, num_ids: int, is_apart: bool
) -> None:
    threads: list[threading.Thread] = []
    parse = parse_request

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*arguments)

    async def scenario(_stage: Stage, client: httpx.AsyncClient) -> None:
        ids = [f"{number:050}" for number in range(num_ids)]
        assert (await client.post("/abort_requests", json={"request_ids": ids})).json() == {"num_aborted": 0}

    monkeypatch.setattr(endpoints, "parse_request", watched)
    play(model_directory, scenario)
    assert [thread is not threading.main_thread() for thread in threads] == [is_apart]


@pytest.mark.parametrize(("most", "is_apart"), [(endpoints.LARGE_ANSWER_ENTRIES, False), (1, True)])
def test_large_answer_is_written_beside_the_loop(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, most: int, is_apart: bool
) -> None:
    threads: list[threading.Thread] = []
    whole = CompletionWriter.whole

    def watched(self: CompletionWriter, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return whole(self, *arguments)

    async def scenario(_stage: Stage, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    monkeypatch.setattr(endpoints, "LARGE_ANSWER_ENTRIES", most)
    monkeypatch.setattr(CompletionWriter, "whole", watched)
    play(model_directory, scenario)
    assert [thread is not threading.main_thread() for thread in threads] == [is_apart]
