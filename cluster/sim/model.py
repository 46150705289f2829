"""The model that simulated clusters serve: tokens that are letters, a runner whose answer depends on every byte of KV
that it reads back (`engine.standin`) and whose steps cost time.

Knows nothing about clusters.
"""

from collections.abc import Callable, Sequence

from cluster.assembly import ServedModel
from core.ids import WeightIdentity
from core.layout import FULL_ATTENTION, Windows
from engine.standin import StandinRunner, standin_layout
from engine.step import StepOutput, StepPlan

StepCost = Callable[[StepPlan], float]
"""Seconds that a step takes."""
NUM_LETTERS = 90


def letters_model(
    *, block_size: int, max_model_len: int, vocab_size: int, windows: Windows = FULL_ATTENTION
) -> ServedModel:
    """What a worker needs to know of it."""
    return ServedModel(
        name="letters",
        vocab_size=vocab_size,
        eos_token_ids=frozenset(),
        max_model_len=max_model_len,
        layout=standin_layout(block_size, windows),
        weight_identity=WeightIdentity("letters"),
    )


class LetterCodec:
    """Every token is one letter; a `router.text.TextCodec` that needs no tokenizer."""

    token_bytes_max = 1
    is_byte_level = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) % self.vocab_size for c in text]

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(m["content"] for m in messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.token_name, token_ids))

    def spell(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    def is_special(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_name(token_id).encode()

    def token_name(self, token_id: int) -> str:
        return chr(33 + token_id % NUM_LETTERS)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return self.token_name(token_id), self.token_bytes(token_id)


class PacedRunner(StandinRunner):
    """Tells what its steps cost."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        windows: Windows,
        cost: StepCost,
        spend: Callable[[float], None],
    ) -> None:
        """`spend` is called with the seconds of each step."""
        super().__init__(num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size, windows=windows)
        self._cost = cost
        self._spend = spend

    def execute(self, plan: StepPlan) -> StepOutput:
        self._spend(self._cost(plan))
        return super().execute(plan)
