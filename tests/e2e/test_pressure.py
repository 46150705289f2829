"""Pools that are too small for what is asked: nobody waits for ever, nobody is starved, nothing is lost on the way."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from core.ids import Attempt, RequestId
from core.messages import Cancel, Credit
from tests.e2e.conftest import ROUTER
from tests.e2e.faults.stage import FaultStage, expected, play

MakePair = Callable[..., Any]


def _prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(length)]


def test_request_is_served_when_its_prompt_and_children_need_the_whole_pool(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=10)
    pair.submit("r", _prompt(37), num_children=3, max_tokens=3, temperature=1.0, seed=5)
    pair.run()
    assert pair.outputs["r"] == {child: pair.expected("r", child) for child in range(3)}
    pair.assert_nothing_held()


def test_first_in_line_gets_credit_when_those_behind_it_have_cached_prefixes(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=12)
    for i in (1, 2):
        pair.submit(f"warm{i}", _prompt(17, seed=i), max_tokens=1)
        pair.run()
    pair.submit("large", _prompt(41, seed=3))
    for i in (1, 2):
        pair.submit(f"behind{i}", _prompt(17, seed=i) + _prompt(8, seed=9))
    pair.run()
    for name in ("large", "behind1", "behind2"):
        assert pair.outputs[name] == {0: pair.expected(name)}
    pair.assert_nothing_held()


def test_preempted_request_goes_on_when_newcomers_keep_coming(make_pair: MakePair) -> None:
    """Blocks that it waits for are not promised to later requests; otherwise it starves, and with it all behind it."""
    pair = make_pair(num_blocks=14, prefill_blocks=64)
    pair.fabric.faults.delay_s = (0.1, 0.2)
    pair.submit("old", _prompt(3), max_tokens=52, ignore_eos=True)
    count = 0
    for _ in range(3):
        pair.step()
    for _ in range(150):
        while pair.decode.status().num_waiting < 100:
            pair.submit(f"new{count}", _prompt(9, seed=100 + count), max_tokens=3)
            count += 1
        pair.step()
        pair.clock.advance(0.01)
    assert pair.count("decode", "pdcluster_preemptions_total") > 0
    assert pair.outputs["old"] == {0: pair.expected("old")}


def test_lease_is_renewed_when_running_requests_grew_into_promised_blocks(make_pair: MakePair) -> None:
    """The offer comes while there is no room; the lease stands until there is, however long that takes."""
    pair = make_pair(num_blocks=24, prefill_blocks=64, **{"transfer.credit_s": 500.0, "transfer.lease_s": 5.0})
    for i in range(3):
        pair.submit(f"long{i}", _prompt(9, seed=i), max_tokens=40, ignore_eos=True)
        for _ in range(4):
            pair.step()
    credits: list[Credit] = []

    def keep(message: Any) -> bool:
        if isinstance(message, Credit):
            credits.append(message)
            return True
        return False

    pair.drop = keep
    pair.submit("new", _prompt(33, seed=50))
    for _ in range(18):
        pair.step()
    pair.drop = lambda _m: False
    pair._relay(credits[0], pair.clock.now())
    num_late = 0
    while "new" not in pair.outputs:
        pair.step()
        pair.clock.advance(1.0)
        is_late = not pair.count("decode", "pdcluster_pulled_blocks_total") - 6
        num_late += is_late
        assert not is_late or pair.prefill.status().num_leases == 1, "the offered blocks are not leased any more"
    pair.run()
    assert num_late > 5
    assert pair.outputs["new"] == {0: pair.expected("new")}
    assert not pair.refusals
    pair.assert_nothing_held()


LONGEST = 37
MAX_TOKENS = 4
ONE_PROMPT_BLOCKS = -(-(LONGEST + MAX_TOKENS) // 4)
"""Room for the longest prompt with its answer, once."""


@pytest.mark.parametrize("seed", range(6))
def test_all_of_fifty_finish_when_both_pools_hold_one_prompt(make_pair: MakePair, seed: int) -> None:
    """RQ-2, KV-1. Mixed lengths and choices; some are cancelled on the way, and what they were promised goes to others.

    Nobody is refused: a pool without room is a wait, not an error.
    """
    rng = random.Random(seed)
    pair = make_pair(num_blocks=ONE_PROMPT_BLOCKS, prefill_blocks=(LONGEST - 1) // 4, **{"transfer.credit_s": 500.0})
    names = [f"r{i}" for i in range(50)]
    for name in names:
        length = rng.choice([1, 3, 4, 5, 17, LONGEST, rng.randrange(1, LONGEST)])
        prompt = _prompt(length, seed=rng.randrange(20))
        pair.submit(name, prompt, num_children=rng.choice([1, 1, 1, 2, 3]), max_tokens=MAX_TOKENS, temperature=1.0)
    cancelled = set(rng.sample(names, 12))
    for name in rng.sample(sorted(cancelled), 12):
        for _ in range(rng.randrange(8)):
            pair.step()
            pair.clock.advance(0.01)
        _cancel(pair, name)
    pair.run(steps_max=5000)
    assert not pair.refusals
    for name in names:
        children = range(pair.requests[name].num_children)
        if name not in cancelled:
            assert pair.outputs[name] == {child: pair.expected(name, child) for child in children}
    pair.assert_nothing_held()


@pytest.mark.parametrize("num_pairs", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_nobody_is_refused_when_fifty_come_to_a_router_and_pools_hold_one_prompt(seed: int, num_pairs: int) -> None:
    """As above, over HTTP application, router and links; ten clients hang up."""
    rng = random.Random(seed)
    stage = FaultStage(num_pairs=num_pairs, num_blocks=ONE_PROMPT_BLOCKS)
    prompts = [_prompt(rng.choice([1, 4, 5, 17, LONGEST]), seed=rng.randrange(1000)) for _ in range(50)]

    async def scene() -> None:
        await stage.open()
        calls = [stage.call(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
        for call in rng.sample(calls, 10):
            await stage.clock.sleep(rng.random() * 0.05)
            call.hang_up()
        await stage.until(lambda: all(call.task.done() for call in calls))
        for prompt, call in zip(prompts, calls, strict=True):
            if not call.has_hung_up:
                assert call.failure() is None and call.tokens == expected(prompt, MAX_TOKENS)
        await stage.until(lambda: not stage.books(), 0.5)
        await stage.close()

    play(stage, scene)


def test_promised_blocks_go_to_the_next_when_credit_is_not_used(make_pair: MakePair) -> None:
    """The first has credit and no offer yet; the second waits, and gets credit as soon as the first is given up."""
    pair = make_pair(num_blocks=ONE_PROMPT_BLOCKS)
    pair.drop = lambda message: isinstance(message, Credit)
    pair.submit("first", _prompt(LONGEST))
    pair.submit("second", _prompt(LONGEST, seed=2))
    for _ in range(5):
        pair.step()
    assert [m.request_id for m in pair.messages if isinstance(m, Credit)] == ["first"]
    pair.drop = lambda _message: False
    _cancel(pair, "first")
    pair.run()
    assert pair.outputs == {"second": {0: pair.expected("second")}}
    pair.assert_nothing_held()


def _cancel(pair: Any, name: str) -> None:
    """As a router does when the client hangs up."""
    for worker in (pair.decode, pair.prefill):
        worker.handle(ROUTER, Cancel(request_id=RequestId(name), attempt=Attempt(0)), pair.clock.now())
