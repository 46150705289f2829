"""Pools that are too small for what is asked: nobody waits for ever, nobody is starved, nothing is lost on the way."""

import random
from collections.abc import Callable
from typing import Any

from core.messages import Credit

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
