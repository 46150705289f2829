"""What clusters on stand-in runners and virtual time share: a model of letters, its tokenizer, the passing of time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cluster.assembly import ServedModel
from cluster.sim import model as letters
from core.clock import ManualClock
from core.ids import WeightIdentity
from engine.standin import standin_layout

VOCAB = 101
LETTERS = ServedModel(
    name="standin",
    vocab_size=VOCAB,
    eos_token_ids=frozenset(),
    max_model_len=200,
    layout=standin_layout(4),
    weight_identity=WeightIdentity("standin"),
)
"""Blocks of 4 tokens."""
T = TypeVar("T")


class LetterCodec(letters.LetterCodec):
    """Of the VOCAB letters."""

    def __init__(self) -> None:
        super().__init__(VOCAB)


def play(scene: Callable[[], Coroutine[Any, Any, T]], clock: ManualClock) -> T:
    """Run a coroutine while virtual time passes; 600 virtual seconds at most."""

    async def run() -> T:
        task = asyncio.ensure_future(scene())
        for _ in range(60_000):
            for _turn in range(8):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            clock.advance(0.01)
        raise AssertionError("the scene did not end within 600 virtual seconds")

    return asyncio.run(run())
