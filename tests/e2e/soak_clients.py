"""Clients of a soak: random requests over HTTP against one router address, each judged by what it should have got.

A request ends well (its tokens equal the undisturbed ones), with a stated error after a correct beginning, by its own
hang-up, or wrongly. Knows nothing about who disturbs the cluster.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

STATED_STATUSES = frozenset({499, 503, 504})
HANG_S = 240.0
"""A client that waits so long without an end has found a hang."""
RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One fixed request."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    num_choices: int

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(self.token_ids),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.num_choices,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }


def make_questions(rng: random.Random, count: int, longest: int) -> list[Question]:
    """Prompts of 1 to `longest` tokens, many with a common beginning, greedy and sampled ones."""
    beginnings = [[rng.randrange(100, 40_000) for _ in range(longest // 2)] for _ in range(3)]
    questions = []
    for _ in range(count):
        shared = rng.choice(beginnings)[: rng.choice([0, 0, 16, 100, longest // 2])]
        own = [rng.randrange(100, 40_000) for _ in range(rng.choice([1, 15, 40, longest // 2]))]
        questions.append(
            Question(
                token_ids=tuple(shared + own),
                max_tokens=rng.choice([1, 4, 12, 40]),
                temperature=float(rng.randrange(2)),
                seed=rng.randrange(1000),
                num_choices=rng.choice([1, 1, 1, 2]),
            )
        )
    return questions


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a client got: token ids by choice, and how it ended (`done`, `stated`, `connection`, `left`, `wrong`)."""

    tokens: list[list[int]]
    ending: str = "connection"
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What became of all requests."""

    endings: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def enter(self, question: Question, expected: list[list[int]], outcome: Outcome) -> None:
        """Judge: everything delivered is a beginning of what was expected, and all of it when the stream was ended."""
        for got, whole in zip(outcome.tokens, expected, strict=True):
            if got != whole[: len(got)] or (outcome.ending == "done" and got != whole):
                outcome.ending, outcome.reason = "wrong", f"{question}: got {got}, expected {whole}"
        self.endings[outcome.ending] += 1
        if outcome.reason:
            self.errors[f"{outcome.ending}: {outcome.reason[:60]}"] += 1
        if outcome.ending == "wrong":
            self.wrong.append(outcome.reason)


async def ask(
    client: httpx.AsyncClient, model: str, question: Question, request_id: str, outcome: Outcome | None = None
) -> Outcome:
    """Send a question and read to whatever end there is. `outcome`: filled while the answer comes."""
    outcome = outcome or Outcome(tokens=[[] for _ in range(question.num_choices)])
    try:
        async with asyncio.timeout(HANG_S):
            await _read(client, model, question, request_id, outcome)
    except TimeoutError:
        outcome.ending, outcome.reason = "wrong", f"no end within {HANG_S} s of {request_id}"
    except httpx.HTTPError as error:
        outcome.ending, outcome.reason = "connection", type(error).__name__
    except asyncio.CancelledError:
        outcome.ending = "left"
    return outcome


async def _read(client: httpx.AsyncClient, model: str, question: Question, request_id: str, outcome: Outcome) -> None:
    headers = {"x-request-id": request_id}
    async with client.stream("POST", "/v1/completions", json=question.body(model), headers=headers) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode()
            is_stated = answer.status_code in STATED_STATUSES
            has_hint = answer.status_code != 503 or "retry-after" in answer.headers
            outcome.ending = "stated" if is_stated and has_hint else "wrong"
            outcome.reason = f"{answer.status_code} {text}"
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                outcome.ending = outcome.ending if outcome.reason else "done"
                return
            if line.startswith("data: "):
                _take(json.loads(line[6:]), outcome)


def _take(event: dict[str, Any], outcome: Outcome) -> None:
    if "error" in event:
        code = event["error"]["code"]
        outcome.ending = "stated" if code in STATED_STATUSES else "wrong"
        outcome.reason = f"event {code} {event['error']['message']}"
        return
    for choice in event["choices"]:
        outcome.tokens[choice["index"]] += choice.get("token_ids") or []


class Stream:
    """One of the soak's endless clients."""

    def __init__(
        self, index: int, url: str, model: str, answers: dict[Question, list[list[int]]], ledger: Ledger, seed: int
    ) -> None:
        self._index = index
        self._url = url
        self._model = model
        self._answers = answers
        self._ledger = ledger
        self._rng = random.Random(seed * 1000 + index)

    async def run(self, is_over: asyncio.Event) -> None:
        """Ask until it is over; every fourth request is left or aborted at a random moment."""
        number = 0
        async with httpx.AsyncClient(base_url=self._url, timeout=HANG_S, trust_env=False) as client:
            while not is_over.is_set():
                number += 1
                question = self._rng.choice(list(self._answers))
                request_id = f"soak-{self._index}-{number}"
                asking = asyncio.ensure_future(ask(client, self._model, question, request_id))
                if self._rng.random() < 0.25:
                    await self._disturb(client, asking, request_id)
                outcome = await asking
                self._ledger.enter(question, self._answers[question], outcome)
                if outcome.ending in ("connection", "stated"):
                    await asyncio.sleep(RETRY_S)

    async def _disturb(self, client: httpx.AsyncClient, asking: "asyncio.Future[Outcome]", request_id: str) -> None:
        done, _ = await asyncio.wait({asking}, timeout=self._rng.uniform(0, 6))
        if done:
            return
        if self._rng.random() < 0.6:
            asking.cancel()
            return
        try:
            await client.post("/abort_requests", json={"request_ids": [request_id]}, timeout=10)
        except httpx.HTTPError:
            asking.cancel()
