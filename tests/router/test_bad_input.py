"""Whatever a client sends, it is refused with a 4xx whose envelope names the field, and nothing reaches a worker.

Method: a table of bodies against the application on the manual clock, and every wrong value for every field.
"""

import asyncio
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from core.messages import Submit
from router.incoming import BODY_BYTES_MAX
from router.protocol.base import ErrorResponse
from router.protocol.document import JSON_CONTAINERS_MAX, JSON_KEYS_MAX, JSON_MARKS_MAX
from router.protocol.generate import CompletionRequest
from tests.router.scripted import Stage
from tests.router.test_app import CHAT, COMPLETION, play

JSON_TYPE = {"content-type": "application/json"}
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_requests")


def refused(response: httpx.Response, status: int = 400) -> ErrorResponse:
    """The envelope of a refusal."""
    assert response.status_code == status, response.text[:500]
    envelope = ErrorResponse.model_validate_json(response.content)
    assert envelope.error.code == status and envelope.error.message
    assert "Traceback" not in response.text and len(response.content) < 2000
    assert response.headers["x-request-id"]
    return envelope


Case = tuple[bytes, str | None, str]
"""A body, the param of its refusal, and words of the message."""


def check(directory: Path, path: str, cases: Sequence[Case], status: int = 400, **headers: str) -> None:
    """Send every body; each must be refused, and no worker may have heard of it."""

    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        for body, param, words in cases:
            response = await client.post(path, content=body, headers={**JSON_TYPE, **headers})
            error = refused(response, status).error
            assert error.param == param and words.lower() in error.message.lower(), (body[:80], error)
        assert not stage.workers["decode-0"].sent(Submit)

    play(directory, scenario)


NO_OBJECT: tuple[Case, ...] = (
    (b"", None, "not valid JSON"),
    (b"   ", None, "not valid JSON"),
    (b"[]", None, "must be a JSON object"),
    (b"5", None, "must be a JSON object"),
    (b"null", None, "must be a JSON object"),
    (b'"x"', None, "must be a JSON object"),
    (b'{"a":', None, "not valid JSON"),
    (b"{} {}", None, "Extra data"),
    (b"{'a': 1}", None, "not valid JSON"),
    (b"\xef\xbb\xbf{}", None, "BOM"),
    (b"{}".decode().encode("utf-16"), None, "not UTF-8"),
    (b'{"model": "\xff"}', None, "not UTF-8"),
    (b'{"model": "\xed\xa0\x80"}', None, "not UTF-8"),
    (b'{"model": "a\x00b"}', None, "control character"),
    (b'{"model": "\\ud800"}', "model", "lone surrogate"),
    (b'{"model": ["\\udfff"]}', "model", "lone surrogate"),
    (b'{"\\udfff": 1}', None, "lone surrogate"),
    (b'{"model": "a", "model": "b"}', "model", "more than once"),
    (b'{"model": {"a": 1, "a": 2}}', "a", "more than once"),
    (b'{"model": ' + b"[" * 100_000, None, "nested too deeply"),
    (b'{"model": ' + b"[" * 40 + b"]" * 40 + b"}", "model", "levels deep"),
    (b'{"model": ' + b'{"a":' * 40 + b"1" + b"}" * 41, "model", "levels deep"),
)
HUGE_BODIES: tuple[Case, ...] = (
    (b'{"prompt": [' + b"[]," * JSON_CONTAINERS_MAX + b"1]}", "prompt", "lists and objects"),
    (b'{"prompt": [' + b"1," * JSON_MARKS_MAX + b"1]}", None, "commas and brackets"),
    (
        b'{"prompt": {' + b",".join(b'"x%d":1' % i for i in range(JSON_KEYS_MAX + 1)) + b"}}",
        None,
        f"{JSON_KEYS_MAX} fields",
    ),
)
ODD_FIELDS: tuple[Case, ...] = (
    (b'{"promt": 1}', "promt", "Did you mean 'prompt'"),
    (b'{"prompt": 1e400}', "prompt", "must be"),
    (b'{"prompt": ' + b"9" * 10_000 + b"}", "prompt", "must be"),
    (b'{"\\u0000": 1}', "\0", "Unknown field"),
)


@pytest.mark.parametrize("path", POSTS)
def test_body_is_refused_when_it_is_no_plain_object(model_directory: Path, path: str) -> None:
    check(model_directory, path, NO_OBJECT)


def test_body_is_refused_when_it_has_more_values_than_any_prompt(model_directory: Path) -> None:
    check(model_directory, "/v1/completions", [*HUGE_BODIES, *ODD_FIELDS])


@pytest.mark.parametrize("path", POSTS)
def test_body_is_refused_when_it_is_of_another_type_or_too_large(model_directory: Path, path: str) -> None:
    good = json.dumps(COMPLETION).encode()
    for kind in ("", "text/plain", "multipart/form-data", "application/jsonp"):
        check(model_directory, path, [(good, "Content-Type", "application/json")], 415, **{"content-type": kind})
    for encoding in ("gzip", "deflate, gzip"):
        case = (gzip.compress(good), "Content-Encoding", "compressed")
        check(model_directory, path, [case], 415, **{"content-encoding": encoding})
    check(model_directory, path, [(good, "Content-Length", "larger")], 413, **{"content-length": "9" * 30})


def test_body_is_refused_when_it_is_larger_than_the_limit(model_directory: Path) -> None:
    check(model_directory, "/tokenize", [(b" " * (BODY_BYTES_MAX + 1), "Content-Length", "larger")], 413)


def test_body_in_chunks_is_refused_at_the_first_byte_too_many(model_directory: Path) -> None:
    sent = [0]

    async def parts() -> Any:
        for _ in range(100):
            sent[0] += 1024 * 1024
            yield b" " * (1024 * 1024)

    async def scenario(_stage: Stage, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", content=parts(), headers=JSON_TYPE) as response:
            await response.aread()
        refused(response, 413)

    play(model_directory, scenario)
    assert sent[0] <= BODY_BYTES_MAX + 2 * 1024 * 1024


def test_bodies_are_refused_when_many_arrive_at_once(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json=COMPLETION)
        refused(response, 503)
        assert response.headers["retry-after"] == "1"
        monkeypatch.undo()
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    monkeypatch.setattr("router.incoming.BODIES_BYTES_MAX", 10)
    play(model_directory, scenario)


def test_bodies_count_only_while_they_are_read(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_stage: Stage, client: httpx.AsyncClient) -> None:
        for _ in range(10):
            refused(await client.post("/tokenize", content=b"[" + b" " * 90, headers=JSON_TYPE))
            assert (await client.post("/tokenize", json={"prompt": "x" * 80})).status_code == 200

    monkeypatch.setattr("router.incoming.BODIES_BYTES_MAX", 100)
    play(model_directory, scenario)


def test_body_is_refused_when_it_does_not_arrive(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> Any:
        yield b'{"prompt":'
        await asyncio.Event().wait()

    async def scenario(_stage: Stage, client: httpx.AsyncClient) -> None:
        refused(await client.post("/v1/completions", content=never(), headers=JSON_TYPE), 408)

    monkeypatch.setattr("router.incoming.BODY_TIMEOUT_S", 0.02)
    play(model_directory, scenario)


HUGE = 10**300
NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", str(HUGE), f"-{HUGE}", "-5", "9" * 5000)
INTEGERS = ("top_k", "max_tokens", "n", "seed", "logprobs")
NO_INTEGERS = ("NaN", "Infinity", "1e400", str(HUGE), f"-{HUGE}", "1.5", "9" * 5000, "-" + "9" * 5000)


def test_number_is_refused_by_name_when_it_is_no_sane_number(model_directory: Path) -> None:
    pairs = [(field, value) for field in NUMBERS for value in NO_NUMBERS]
    pairs += [(field, value) for field in INTEGERS for value in NO_INTEGERS]
    cases = [(f'{{"prompt": "a", "{field}": {value}}}'.encode(), field, field) for field, value in pairs]
    check(model_directory, "/v1/completions", cases)


WRONG: tuple[object, ...] = (True, -1, 1.5, "x", [], ["x"], [None], {}, {"a": {}}, [[1]], "\0", [HUGE])
ALLOWED: dict[str, tuple[object, ...]] = {
    "prompt": ("x", ["x"], [[1]], "\0"),
    "stop": ("x", [], ["x"], "\0"),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "ignore_eos": (True,),
    "stream": (True,),
    "return_token_ids": (True,),
    "user": ("x", "\0"),
    "seed": (-1,),
    "top_k": (-1,),
    "temperature": (1.5,),
    "frequency_penalty": (-1, 1.5),
    "presence_penalty": (-1, 1.5),
    "repetition_penalty": (1.5,),
}


def test_value_of_a_wrong_type_is_refused_by_name(model_directory: Path) -> None:
    async def scenario(_stage: Stage, client: httpx.AsyncClient) -> None:
        for field in CompletionRequest.model_fields:
            for value in WRONG:
                if any(type(value) is type(good) and value == good for good in ALLOWED.get(field, ())):
                    continue
                response = await client.post("/v1/completions", json={**COMPLETION, field: value})
                if field == "model" and isinstance(value, str):
                    assert refused(response, 404).error.type == "NotFoundError"
                    continue
                param = refused(response).error.param
                assert param is not None and param.partition(".")[0] == field, (value, param)

    play(model_directory, scenario)


CANNOT_BE_SERVED: tuple[tuple[str, dict[str, Any], int, str | None], ...] = (
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [""]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, 400, "prompt.0"),
    ("/v1/completions", {"prompt": None}, 400, "prompt"),
    ("/v1/completions", {"prompt": [300]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt.0"),
    ("/v1/completions", {"prompt": [2**31]}, 400, "prompt.0"),
    ("/v1/completions", {"prompt": [[1], [10**30]]}, 400, "prompt.1.0"),
    ("/v1/completions", {"prompt": "x" * 600}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1] * 600}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x" * 4_000_000}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x" * 15_000}, 400, "prompt"),
    ("/v1/completions", {"stop": ["x"] * 1000}, 400, "stop"),
    ("/v1/completions", {"stop": "x" * 1000}, 400, "stop"),
    ("/v1/completions", {"stop": [""]}, 400, "stop.0"),
    ("/v1/completions", {"stop_token_ids": [1] * 1000}, 400, "stop_token_ids"),
    ("/v1/completions", {"stop_token_ids": [300]}, 400, "stop_token_ids"),
    ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias"),
    ("/v1/completions", {"logit_bias": {"1": 10**300}}, 400, "logit_bias.1"),
    ("/v1/completions", {"logit_bias": {"299999": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"logprobs": 21}, 400, "logprobs"),
    ("/v1/completions", {"n": 129}, 400, "n"),
    ("/v1/completions", {"best_of": 2}, 400, "best_of"),
    ("/v1/completions", {"stream_options": {}}, 400, "stream_options"),
    ("/v1/completions", {"model": "y" * 300}, 400, "model"),
    ("/v1/completions", {"model": "other"}, 404, None),
    ("/v1/completions", {"user": "y" * 600}, 400, "user"),
    ("/v1/completions", {"kv_transfer_params": {"a": 1}}, 400, "kv_transfer_params"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 4097}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": []}]}, 400, "messages.0.content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content"),
    ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, 400, "messages.0.role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "", "a b": 1}]}, 400, "messages.0.a b"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 4_000_000}]}, 400, "messages"),
    ("/v1/chat/completions", {"tools": [{"type": "function"}]}, 400, "tools"),
    ("/v1/chat/completions", {"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": "x" * 4_000_000}, 400, "prompt"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [300]}, 400, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
    ("/abort_requests", {}, 400, "request_ids"),
    ("/abort_requests", {"request_ids": ["a b"]}, 400, "request_ids.0"),
    ("/abort_requests", {"request_ids": ["a"] * 1025}, 400, "request_ids"),
)


def test_request_is_refused_by_name_when_it_cannot_be_served(model_directory: Path) -> None:
    bases: dict[str, dict[str, Any]] = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}

    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        for path, change, status, param in CANNOT_BE_SERVED:
            base = bases.get(path, {})
            error = refused(await client.post(path, json={**base, **change}), status).error
            assert error.param == param, (path, str(change)[:80], error)
        assert not stage.workers["decode-0"].sent(Submit)

    play(model_directory, scenario)


def test_request_id_is_refused_when_it_cannot_be_used(model_directory: Path) -> None:
    async def scenario(_stage: Stage, client: httpx.AsyncClient) -> None:
        for path in POSTS:
            for request_id in ("", "a b", "x" * 129, "é", "\t"):
                response = await client.post(path, json=COMPLETION, headers={b"x-request-id": request_id.encode()})
                assert refused(response).error.param == "X-Request-Id"
                assert len(response.headers["x-request-id"]) == 32

    play(model_directory, scenario)


def test_problems_of_a_list_are_not_collected_one_by_one() -> None:
    prompts: tuple[list[object], ...] = ([1] * 2000 + ["a"], ["a"] * 2000 + [1], [[]] * 2000, [None] * 2000)
    for prompt in prompts:
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate({"prompt": prompt})
        assert caught.value.error_count() < 10
