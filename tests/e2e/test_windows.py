"""Hand-offs of models whose layers look back a window only: less moves, answers are right (TX-1, TX-3, KV-1)."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from core.ids import RequestId
from core.layout import FULL_ATTENTION, Windows
from core.messages import PullDone
from decode import worker as decode_module
from kvtransfer.plan import demand
from kvtransfer.transport.memory import MemoryFaults
from tests.e2e.conftest import Pair

MakePair = Callable[..., Pair]
LAYOUTS: list[Windows] = [(None, 6, 6), (6,), (None, 200), (None, 1), (9, None), (4, 12)]
BLOCK = 4


def _prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(90) for _ in range(60)]
    return [shared[: rng.choice([0, 8, length])][:length] + [rng.randrange(90) for _ in range(4)] for length in lengths]


@pytest.mark.parametrize("windows", LAYOUTS)
def test_exactly_the_demand_moves_and_the_tokens_are_right(make_pair: MakePair, windows: Windows) -> None:
    pair = make_pair(num_blocks=160, windows=windows, **{"prefill.max_batched_tokens": 8})
    expected_blocks = 0
    for number, length in enumerate((1, 4, 5, 8, 9, 13, 30, 57)):
        rng = random.Random(number)
        pair.submit(f"r{number}", [rng.randrange(90) for _ in range(length)], max_tokens=12)
        pair.run(steps_max=2000)
        assert pair.outputs[RequestId(f"r{number}")] == {0: pair.expected(f"r{number}")}
        expected_blocks += len(demand(length, windows, BLOCK))
    assert not pair.refusals
    moved = pair.count("decode", "pdcluster_pulled_bytes_total")
    assert moved == expected_blocks * pair.model.layout.block_bytes()
    pair.assert_nothing_held()


def test_window_moves_less_than_full_attention(make_pair: MakePair) -> None:
    moved = {}
    for windows in (FULL_ATTENTION * 2, (None, 6)):
        pair = make_pair(num_blocks=160, windows=windows)
        pair.submit("r", list(range(60)))
        pair.run()
        moved[windows] = pair.count("decode", "pdcluster_pulled_blocks_total")
    assert moved == {(None, None): 28, (None, 6): 16}


@pytest.mark.parametrize("windows", LAYOUTS)
def test_pulled_blocks_are_counted_once_however_many_groups_have_one(make_pair: MakePair, windows: Windows) -> None:
    pair = make_pair(num_blocks=160, windows=windows)
    beginning = list(range(20))
    for name, ending in (("first", [1] * 16), ("second", [2] * 16)):
        pair.submit(name, beginning + ending)
        pair.run()
    done = [message.num_blocks for message in pair.messages if isinstance(message, PullDone)]
    indexes = [index for _group, index in demand(36, windows, BLOCK)]
    assert done == [8 - indexes[0], 8 - next(index for index in indexes if index >= 5)]


@pytest.mark.parametrize("windows", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_shared_prompts_small_pools_and_bad_reads_give_right_tokens_or_refusals(
    make_pair: MakePair, windows: Windows, seed: int
) -> None:
    rng = random.Random(seed)
    pair = make_pair(num_blocks=26 * len(windows), windows=windows, **{"prefill.max_batched_tokens": 8})
    pair.fabric.faults = MemoryFaults(loss_rate=0.1, corruption_rate=0.1, delay_s=(0.0, 0.1))
    prompts = _prompts(seed, (9, 37, 37, 41, 5, 30, 57, 57))
    for number, prompt in enumerate(prompts):
        pair.submit(f"r{number}", prompt, max_tokens=rng.choice([1, 9, 20]), num_children=rng.choice([1, 1, 2]))
        for _ in range(rng.randrange(8)):
            pair.step()
            pair.clock.advance(0.01)
    pair.run(steps_max=4000)
    refused = {refusal.request_id for refusal in pair.refusals}
    for name, request in pair.requests.items():
        if name not in refused:
            assert pair.outputs[name] == {c: pair.expected(name, c) for c in range(request.num_children)}
    pair.clock.advance(20.0)
    pair.run()
    pair.assert_nothing_held()


def test_planted_bug_is_seen_when_the_demand_misses_a_block(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker asks for one block less of the window than it needs."""

    def short(length: int, windows: Windows, block_size: int) -> list[Any]:
        entries = demand(length, windows, block_size)
        missed = next(entry for entry in entries if windows[entry[0]] is not None)
        return [entry for entry in entries if entry != missed]

    def course() -> None:
        pair = make_pair(num_blocks=160, windows=(None, 6))
        pair.submit("r", list(range(30)))
        pair.run()
        assert pair.outputs.get(RequestId("r")) == {0: pair.expected("r")}

    course()
    monkeypatch.setattr(decode_module, "demand", short)
    with pytest.raises(AssertionError):
        course()
