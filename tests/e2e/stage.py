"""What clusters on stand-in runners and virtual time share: a model of letters, its tokenizer, the passing of time."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from cluster.assembly import ServedModel
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


class LetterCodec:
    """Every token is one letter; no tokenizer needed."""

    vocab_size = VOCAB
    token_bytes_max = 1
    is_byte_level = True

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(m["content"] for m in messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.token_text(t)[0] for t in token_ids)

    def spell(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    def is_special(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id)[1]

    def token_name(self, token_id: int) -> str:
        return self.token_text(token_id)[0]

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        letter = chr(33 + token_id % 90)
        return letter, letter.encode()


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
