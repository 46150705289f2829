"""Limits: the page lists what the code has, and reaching each of those that depend on others is the stated refusal.

Limits of single fields are tried in `test_bad_input` and `protocol.test_generate`, those of connections in
`test_connections`, that of unread tokens in `test_slow_reader`.
"""

import asyncio
import importlib
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.config import RouterSection
from core.errors import OverloadedError
from core.messages import Submit
from tests.router.scripted import Stage, open_stage, settle, write_model
from tests.router.test_app import COMPLETION, play
from tests.router.test_service import prepared

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
ROW = re.compile(r"^\| (.+?) \| `([a-z_.]+)(?:\.([A-Z_]+))?` \| `?([\d,.]+)`?( [A-Za-z]+)? \| (.+) \|$", re.M)
UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "s": 1}


def test_page_has_the_limits_of_the_code() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) >= 30
    for what, place, constant, number, unit, _answer in rows:
        if constant:
            actual = getattr(importlib.import_module(place), constant)
        else:
            actual = RouterSection.model_fields[place.removeprefix("router.")].default
        assert float(number.replace(",", "")) * UNITS[unit.strip()] == actual, f"{what}: {actual}"


def test_page_misses_no_limit_of_the_router() -> None:
    page = PAGE.read_text()
    listed = {constant for _, _, constant, _, _, _ in ROW.findall(page)}
    for path in sorted((PAGE.parents[1] / "router").rglob("*.py")):
        for name in re.findall(r"^([A-Z][A-Z_]*_MAX)\b", path.read_text(), re.M):
            assert name in listed or f"`{name}`" in page, f"docs/limits.md misses {name} of {path.name}"


@pytest.mark.parametrize(
    ("limits", "change", "param"),
    [
        ({"max_requests": 2}, {"prompt": ["a", "b", "c"]}, "prompt"),
        ({"max_running_sequences": 5}, {"prompt": ["a", "b"], "n": 3}, "n"),
        ({"max_running_sequences": 5}, {"n": 6}, "n"),
    ],
)
def test_request_is_refused_for_good_when_no_wait_would_help(
    model_directory: Path, limits: dict[str, int], change: dict[str, Any], param: str
) -> None:
    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json={**COMPLETION, **change})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert not stage.workers["decode-0"].sent(Submit)

    play(model_directory, scenario, **limits)


@pytest.mark.parametrize(
    ("limits", "change", "reason"),
    [
        ({"max_requests": 4}, {"prompt": ["a", "b"]}, "3 of at most 4 requests"),
        ({"max_running_sequences": 6}, {"n": 4}, "3 of at most 6 choices"),
        ({"max_running_sequences": 6}, {"prompt": ["a", "b"], "n": 2}, "3 of at most 6 choices"),
        ({"max_queued_prompt_tokens": 200}, {"prompt": ["a" * 50, "b" * 50]}, "120 of at most 200 prompt tokens"),
    ],
)
def test_request_is_refused_as_a_whole_when_there_is_no_room_now(
    model_directory: Path, limits: dict[str, int], change: dict[str, Any], reason: str
) -> None:
    """Three prompts of 40 tokens wait; what is refused leaves them alone, and has taken nothing when they are gone."""

    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        decode = stage.workers["decode-0"]
        decode.replies = lambda message: [] if isinstance(message, Submit) else None
        body = {"prompt": [[1] * 40, [2] * 40, [3] * 40]}
        waiting = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await settle()
        response = await client.post("/v1/completions", json={**COMPLETION, **change})
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert reason in response.json()["error"]["message"]
        admission = stage.service.admission
        assert (admission.num_in_flight, admission.num_sequences) == (3, 3)
        assert len(decode.sent(Submit)) == 3
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        decode.replies = lambda message: None
        assert (await client.post("/v1/completions", json={**COMPLETION, **change})).status_code == 200

    play(model_directory, scenario, **limits)


def test_prompts_of_one_request_are_never_admitted_in_part(model_directory: Path) -> None:
    """Many clients with several prompts each, more than there is room for: each finishes or is refused as a whole."""

    async def scenario(stage: Stage, client: httpx.AsyncClient) -> None:
        bodies: list[dict[str, Any]] = [{"prompt": [[n + 1] * 20] * (1 + n % 4), "n": 1 + n % 2} for n in range(24)]
        responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        statuses = {response.status_code for response in responses}
        assert statuses == {200, 503}
        for body, response in zip(bodies, responses, strict=True):
            if response.status_code == 200:
                assert len(response.json()["choices"]) == len(body["prompt"]) * body["n"]
        num_admitted = sum(
            len(body["prompt"]) for body, response in zip(bodies, responses, strict=True) if response.status_code == 200
        )
        assert len(stage.workers["decode-0"].sent(Submit)) == num_admitted

    play(model_directory, scenario, max_requests=10, max_running_sequences=14)


def test_other_prompts_are_cancelled_when_one_of_their_request_fails(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            stage.workers["decode-0"].replies = lambda message: [] if isinstance(message, Submit) else None
            async with aclosing(stage.service.generate_all([prepared(), prepared()])) as events:
                task = asyncio.ensure_future(anext(events))
                await settle()
                assert stage.service.admission.num_in_flight == 2
                first = next(iter(stage.service.runs.values()))
                stage.service._apply(first, first.flow.abort(OverloadedError(reason="test")))
                with pytest.raises(OverloadedError):
                    await task
            await settle()
            assert len(stage.cancels("decode-0")) == 2 and stage.service.admission.num_in_flight == 0
            stage.service.check()

    asyncio.run(main())


def test_no_place_is_lost_when_a_request_cannot_be_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RQ-1: a bug between admission and the first step costs that request, not its places for ever."""

    async def body() -> None:
        async with open_stage(write_model(tmp_path / "model")) as stage:
            opened = stage.service._open

            def broken(*arguments: Any) -> Any:
                if stage.service.runs:
                    raise RuntimeError("planted")
                return opened(*arguments)

            monkeypatch.setattr(stage.service, "_open", broken)
            with pytest.raises(RuntimeError, match="planted"):
                await anext(stage.service.generate_all([prepared(), prepared()]))
            assert set(stage.service.books().values()) == {0}
            stage.service.check()

    asyncio.run(body())
