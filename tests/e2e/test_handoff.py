"""The hand-off between a prefill and a decode worker: what moves, what is computed where, and what is held at the end.

Everything runs for real but arithmetic and memory copies between processes: a wrong, stale or missing block changes the
answer of the stand-in runner.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from core.ids import Attempt, RequestId, RouterId
from core.messages import Cancel, Credit, Disconnect, Offer, PullDone, Renew, Tokens

BLOCK = 4
MakePair = Callable[..., Any]


def _prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17, 33, 100])
@pytest.mark.parametrize("chunk", [4, 64])
def test_kv_moves_exactly_as_demanded_when_cold(make_pair: MakePair, length: int, chunk: int) -> None:
    """Item 3 of TX-3: the decode worker computes L - B * floor((L-1)/B) prompt tokens, the rest is read."""
    pair = make_pair(**{"prefill.max_batched_tokens": chunk})
    pair.submit("r", _prompt(length))
    pair.run()
    assert pair.outputs["r"] == {0: pair.expected("r")}
    demanded = (length - 1) // BLOCK
    block_bytes = pair.model.layout.block_bytes()
    assert pair.count("decode", "pdcluster_decode_prompt_tokens_computed_total") == length - BLOCK * demanded
    assert pair.count("decode", "pdcluster_pulled_blocks_total") == demanded
    assert pair.count("decode", "pdcluster_pulled_bytes_total") == demanded * block_bytes
    assert pair.count("prefill", "pdcluster_prefill_computed_tokens_total") == demanded * BLOCK
    pair.assert_nothing_held()


def test_supply_covers_demand_whatever_is_warm_when_prefixes_are_shared(make_pair: MakePair) -> None:
    """TX-3, contract B3: a warm producer supplies as much as a cold one; a warm reader demands less."""
    pair = make_pair()
    prompt = _prompt(41)
    pair.submit("cold", prompt)
    pair.run()
    pair.decode._pool.clear_cached()
    pair.submit("producer-warm", prompt)
    pair.run()
    assert pair.count("prefill", "pdcluster_prefill_computed_tokens_total") == 40
    assert pair.count("decode", "pdcluster_pulled_blocks_total") == 20
    pair.submit("reader-warm", prompt + _prompt(8, seed=2))
    pair.run()
    assert pair.count("decode", "pdcluster_pulled_blocks_total") == 22
    for name in ("cold", "producer-warm", "reader-warm"):
        assert pair.outputs[name] == {0: pair.expected(name)}
    pair.assert_nothing_held()


def test_no_prefill_is_asked_for_when_the_reader_holds_everything(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.submit("a", _prompt(17))
    pair.run()
    pair.submit("b", _prompt(17))
    pair.run()
    credits = [m for m in pair.messages if isinstance(m, Credit)]
    assert [(c.num_held_blocks, c.num_demanded_blocks) for c in credits] == [(0, 4), (4, 4)]
    assert pair.outputs["b"] == {0: pair.expected("b")}


def test_blocks_are_read_while_later_chunks_compute_when_the_prompt_is_long(make_pair: MakePair) -> None:
    pair = make_pair(**{"prefill.max_batched_tokens": 8})
    pair.submit("r", _prompt(65))
    pair.run()
    offers = [m for m in pair.messages if isinstance(m, Offer)]
    assert [len(o.block_ids) for o in offers] == list(range(2, 17, 2))
    assert [o.is_final for o in offers] == [False] * 7 + [True]
    assert all(later.block_ids[: len(o.block_ids)] == o.block_ids for o, later in itertools.pairwise(offers))


def test_children_share_the_pulled_prompt_and_draw_their_own_noise(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.submit("r", _prompt(22), num_children=3, temperature=1.0, seed=11, max_tokens=9)
    pair.run()
    assert pair.outputs["r"] == {child: pair.expected("r", child) for child in range(3)}
    assert len({tuple(tokens) for tokens in pair.outputs["r"].values()}) == 3
    assert pair.count("decode", "pdcluster_pulled_blocks_total") == 5
    pair.assert_nothing_held()


def test_everyone_finishes_when_both_pools_hold_one_prompt(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=10)
    for i in range(50):
        pair.submit(f"r{i}", _prompt(30, seed=i))
    pair.run(steps_max=3000)
    for i in range(50):
        assert pair.outputs[f"r{i}"] == {0: pair.expected(f"r{i}")}
    assert not pair.refusals
    pair.assert_nothing_held()


def test_colocated_requests_compute_everything_here(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.submit("r", _prompt(21), local=True)
    pair.run()
    assert pair.outputs["r"] == {0: pair.expected("r")}
    assert pair.count("decode", "pdcluster_pulled_blocks_total") == 0
    assert pair.count("decode", "pdcluster_decode_prompt_tokens_computed_total") == 21


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("ending", ["cancel", "hang-up"])
def test_nothing_is_held_when_a_request_is_given_up_at_any_step(make_pair: MakePair, steps: int, ending: str) -> None:
    pair = make_pair(**{"prefill.max_batched_tokens": 8})
    pair.submit("r", _prompt(40), max_tokens=30)
    for _ in range(steps):
        pair.step()
    for worker in (pair.decode, pair.prefill):
        if ending == "cancel":
            worker.handle(RouterId("router-0"), Cancel(request_id=RequestId("r"), attempt=Attempt(0)), pair.clock.now())
        else:
            worker.disconnect(RouterId("router-0"), pair.clock.now())
    pair.run()
    pair.clock.advance(20.0)
    pair.run()
    pair.assert_nothing_held()
    pair.submit("next", _prompt(40))
    pair.run()
    assert pair.outputs["next"] == {0: pair.expected("next")}


def test_lease_expires_and_reader_fails_when_it_hears_nothing_more(make_pair: MakePair) -> None:
    """A final offer that never arrives: credit or lease ends, both sides give everything back in time."""
    pair = make_pair(**{"prefill.max_batched_tokens": 8})
    pair.drop = lambda m: (isinstance(m, Offer) and m.is_final) or isinstance(m, Renew)
    pair.submit("r", _prompt(33))
    pair.run()
    pair.clock.advance(pair.config.transfer.lease_s + 1)
    pair.run()
    assert [r.kind for r in pair.refusals] == ["transfer_failed"]
    pair.assert_nothing_held()


def test_lease_is_renewed_while_the_reader_waits(make_pair: MakePair) -> None:
    pair = make_pair(**{"prefill.max_batched_tokens": 8})
    late: list[Offer] = []

    def hold_back(message: Any) -> bool:
        if isinstance(message, Offer) and message.is_final and not late:
            late.append(message)
            return True
        return False

    pair.drop = hold_back
    pair.submit("r", _prompt(33))
    pair.run()
    for _ in range(40):
        pair.clock.advance(1.0)
        pair.step()
    assert pair.prefill.status().num_leases == 1
    pair.decode.handle(RouterId("router-0"), late[0], pair.clock.now())
    pair.run()
    assert pair.outputs["r"] == {0: pair.expected("r")}
    pair.assert_nothing_held()


def test_unused_credit_is_given_back_when_no_offer_comes(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.drop = lambda m: isinstance(m, Credit)
    pair.submit("r", _prompt(33))
    pair.run()
    pair.clock.advance(pair.config.transfer.credit_s + 1)
    pair.run()
    assert [r.kind for r in pair.refusals] == ["credit_lapsed"]
    pair.assert_nothing_held()


def test_messages_of_an_older_attempt_change_nothing(make_pair: MakePair) -> None:
    """TX-2."""
    pair = make_pair(**{"prefill.max_batched_tokens": 8})
    pair.submit("r", _prompt(40))
    for _ in range(4):
        pair.step()
    pair.submit("r", _prompt(40), attempt=1)
    pair.decode.handle(RouterId("router-0"), Cancel(request_id=RequestId("r"), attempt=Attempt(0)), pair.clock.now())
    old = [m for m in pair.messages if isinstance(m, Offer)]
    assert old and all(o.attempt == 0 for o in old)
    pair.decode.handle(RouterId("router-0"), old[-1], pair.clock.now())
    pair.run()
    pair.clock.advance(20.0)
    pair.run()
    assert pair.outputs["r"] == {0: pair.expected("r")}
    tokens = [m for m in pair.messages if isinstance(m, Tokens)]
    assert {m.attempt for m in tokens} == {1}
    pair.assert_nothing_held()


def test_reads_fail_at_once_when_the_prefill_worker_is_gone(make_pair: MakePair) -> None:
    pair = make_pair(**{"prefill.max_batched_tokens": 8})
    pair.submit("r", _prompt(40))
    for _ in range(3):
        pair.step()
    gone = Disconnect(worker=pair.prefill.worker_id, epoch=pair.prefill.epoch)
    pair.decode.handle(RouterId("router-0"), gone, pair.clock.now())
    pair.step()
    assert [r.kind for r in pair.refusals] == ["transfer_failed"]
    pair.submit("again", _prompt(40))
    pair.step()
    assert [r.kind for r in pair.refusals] == ["transfer_failed", "unknown_peer"]


def test_corrupt_block_is_read_again_and_never_attended_to(make_pair: MakePair) -> None:
    """TX-1, KV-5: corruption on the way is found by digest; a second time, the attempt fails instead of answering."""
    pair = make_pair()
    pair.fabric.faults.corruption_rate = 1.0
    pair.submit("once", _prompt(40))
    while not pair.count("decode", "pdcluster_digest_mismatches_total"):
        pair.step()
    pair.fabric.faults.corruption_rate = 0.0
    pair.run()
    assert pair.outputs["once"] == {0: pair.expected("once")}
    assert pair.count("decode", "pdcluster_digest_mismatches_total") >= 1
    pair.fabric.faults.corruption_rate = 1.0
    pair.submit("always", _prompt(40, seed=9))
    pair.run()
    assert "always" not in pair.outputs
    assert [r.kind for r in pair.refusals] == ["transfer_failed"]
    done = [m for m in pair.messages if isinstance(m, PullDone)]
    assert [m.request_id for m in done] == ["once"]


def test_stale_block_is_refused_when_the_source_was_overwritten_after_the_offer(make_pair: MakePair) -> None:
    pair = make_pair()
    overwritten: list[int] = []

    def overwrite(message: Any) -> bool:
        if isinstance(message, Offer) and not overwritten:
            overwritten.append(message.block_ids[2])
            pair.runners["prefill"]._kv[message.block_ids[2]] += 1
        return False

    pair.drop = overwrite
    pair.submit("r", _prompt(40))
    pair.run()
    assert overwritten and "r" not in pair.outputs
    assert [r.kind for r in pair.refusals] == ["transfer_failed"]


def test_bad_input_is_refused_by_name(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.submit("negative", [1, -2, 3])
    pair.submit("too-large", [101])
    pair.submit("too-long", _prompt(198))
    pair.run()
    assert [(r.request_id, r.kind) for r in pair.refusals] == [
        ("negative", "invalid"),
        ("too-large", "invalid"),
        ("too-long", "too_long"),
    ]
    pair.assert_nothing_held()
