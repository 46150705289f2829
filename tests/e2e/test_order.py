"""Messages that come twice, late, from another life or from another router: they change nothing and break nobody."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from core.ids import Attempt, Epoch, LeaseId, RequestId, RouterId, WorkerId
from core.messages import Cancel, Connect, Disconnect, Offer, PeerReady, PeerRefused, Prefill, Release, Submit
from kvtransfer.transport.base import Peer
from tests.e2e.conftest import ROUTER

MakePair = Callable[..., Any]
OTHER = RouterId("router-1")


def _prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(length)]


def _prefill(pair: Any, name: str, attempt: int = 0) -> Prefill:
    request = pair.requests[name]
    return Prefill(
        request_id=request.request_id,
        attempt=Attempt(attempt),
        request=request,
        decode_worker=pair.decode.worker_id,
        num_held_blocks=0,
    )


def _hold_back_final_offers(pair: Any) -> list[Offer]:
    """From now on an offer arrives as one that others follow; what was sent is in the list."""
    finals: list[Offer] = []

    def split(message: Any) -> bool:
        if isinstance(message, Offer):
            pair.decode.handle(ROUTER, replace(message, is_final=False), pair.clock.now())
            finals.append(message)
        return isinstance(message, Offer)

    pair.drop = split
    return finals


@pytest.mark.parametrize("again", [0, 1])
def test_second_prefill_changes_nothing_when_the_lease_of_the_attempt_stands(make_pair: MakePair, again: int) -> None:
    """TX-2: also for an older attempt than the one that holds the lease."""
    pair = make_pair()
    pair.drop = lambda m: isinstance(m, Offer)
    pair.submit("r", _prompt(33), attempt=1)
    pair.run()
    assert pair.prefill.status().num_leases == 1
    pair.prefill.handle(ROUTER, _prefill(pair, "r", attempt=again), pair.clock.now())
    pair.run()
    offers = [m for m in pair.messages if isinstance(m, Offer)]
    assert [o.attempt for o in offers] == [1]
    assert pair.prefill.status().num_leases == 1


@pytest.mark.parametrize("name, attempt", [("other", 0), ("r", 1)])
def test_release_changes_nothing_when_the_lease_is_not_of_its_attempt(
    make_pair: MakePair, name: str, attempt: int
) -> None:
    """TX-2: lease ids begin again in every life of a worker, so that an old Release may name a new lease."""
    pair = make_pair()
    pair.drop = lambda m: isinstance(m, Offer)
    pair.submit("r", _prompt(33))
    pair.run()
    release = Release(request_id=RequestId(name), attempt=Attempt(attempt), lease_id=LeaseId(1))
    pair.prefill.handle(ROUTER, release, pair.clock.now())
    assert pair.prefill.status().num_leases == 1


def test_submit_of_a_given_up_attempt_changes_nothing_while_its_reads_go_on(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.fabric.faults.delay_s = (0.5, 0.5)
    pair.submit("r", _prompt(33))
    for _ in range(4):
        pair.step()
    for _ in range(2):
        cancel = Cancel(request_id=RequestId("r"), attempt=Attempt(0))
        pair.decode.handle(ROUTER, cancel, pair.clock.now())
        assert pair.decode.status().num_pins == 8
        pair.submit("r", _prompt(33))
        pair.step()
    pair.clock.advance(1.0)
    pair.run()
    pair.clock.advance(20.0)
    pair.run()
    assert "r" not in pair.outputs
    pair.assert_nothing_held()


def test_offer_that_says_only_that_it_is_the_last_completes_the_pull(make_pair: MakePair) -> None:
    pair = make_pair()
    finals = _hold_back_final_offers(pair)
    pair.submit("r", _prompt(33))
    pair.run()
    assert "r" not in pair.outputs
    pair.decode.handle(ROUTER, finals[0], pair.clock.now())
    pair.run()
    assert pair.outputs["r"] == {0: pair.expected("r")}
    pair.assert_nothing_held()


@pytest.mark.parametrize("comes_again", [False, True])
def test_cancel_and_next_attempt_are_heeded_right_after_an_offer_that_completes_the_pull(
    make_pair: MakePair, comes_again: bool
) -> None:
    """TX-2: the pull is complete in the middle of a batch of messages; the messages after it find the request."""
    pair = make_pair()
    finals = _hold_back_final_offers(pair)
    pair.submit("r", _prompt(33))
    pair.run()
    pair.decode.handle(ROUTER, finals[0], pair.clock.now())
    pair.decode.handle(ROUTER, Cancel(request_id=RequestId("r"), attempt=Attempt(0)), pair.clock.now())
    pair.drop = lambda message: False
    if comes_again:
        pair.submit("r", _prompt(33), attempt=1)
    pair.run()
    assert pair.outputs.get("r") == ({0: pair.expected("r")} if comes_again else None)
    pair.clock.advance(20.0)
    pair.run()
    pair.assert_nothing_held()


def test_prefill_worker_ends_when_nobody_can_read_from_it_any_more(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transfer thread has died: every pull from it would fail, behind heartbeats that go on."""

    def crash() -> None:
        raise RuntimeError("the transfer thread ended")

    pair = make_pair()
    monkeypatch.setattr(pair.prefill._serving, "poll", crash)
    with pytest.raises(RuntimeError, match="the transfer thread ended"):
        pair.step()


def test_request_fails_early_when_a_read_never_ends(make_pair: MakePair) -> None:
    """RQ-2: its destinations stay bound until the peer is gone, the request does not wait for that."""
    pair = make_pair()
    pair.fabric.faults.stall_rate = 1.0
    pair.submit("r", _prompt(33))
    for _ in range(40):
        pair.step()
        pair.clock.advance(0.5)
    assert [r.kind for r in pair.refusals] == ["transfer_failed"]
    assert pair.decode.status().num_pins == 8
    gone = Disconnect(worker=pair.prefill.worker_id, epoch=pair.prefill.epoch)
    pair.decode.handle(ROUTER, gone, pair.clock.now())
    pair.run()
    pair.assert_nothing_held()


def test_others_get_credit_when_the_first_needs_blocks_that_a_given_up_read_may_still_write(
    make_pair: MakePair,
) -> None:
    """RQ-2: such a read may never end."""
    pair = make_pair(num_blocks=16)
    pair.fabric.faults.stall_rate = 1.0
    pair.submit("gone", _prompt(33))
    for _ in range(4):
        pair.step()
    pair.decode.handle(ROUTER, Cancel(request_id=RequestId("gone"), attempt=Attempt(0)), pair.clock.now())
    assert pair.decode.status().num_pins == 8
    pair.fabric.faults.stall_rate = 0.0
    pair.submit("large", _prompt(49, seed=2))
    pair.submit("small", _prompt(9, seed=3))
    for _ in range(60):
        pair.step()
    assert pair.outputs["small"] == {0: pair.expected("small")}
    assert "large" not in pair.outputs
    gone = Disconnect(worker=pair.prefill.worker_id, epoch=pair.prefill.epoch)
    pair.decode.handle(ROUTER, gone, pair.clock.now())
    pair.run()
    pair.clock.advance(20.0)  # the lease of what was cancelled
    pair.run()
    pair.assert_nothing_held()


def test_bad_counts_are_refused_by_name(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.submit("no-child", _prompt(8), num_children=0)
    pair.submit("no-token", _prompt(200), max_tokens=0, local=True)
    pair.run()
    assert [r.kind for r in pair.refusals] == ["invalid", "invalid"]
    pair.assert_nothing_held()


# ---- peers and routers ---------------------------------------------------------------------------------------------


def _connect(pair: Any, source: RouterId, epoch: int = 1) -> None:
    handshake, peer = pair.prefill.handshake(), Peer(worker=WorkerId("prefill-0"), epoch=Epoch(epoch))
    metadata = msgspec.msgpack.decode(handshake.transport_metadata)
    handshake = replace(handshake, transport_metadata=msgspec.msgpack.encode({**metadata, "epoch": epoch}))
    message = Connect(worker=peer.worker, epoch=peer.epoch, handshake=handshake)
    pair.decode.handle(source, message, pair.clock.now())


def _answers(pair: Any) -> list[Any]:
    return [m for m in pair.messages if isinstance(m, PeerReady | PeerRefused)]


def test_peer_stays_readable_for_one_router_when_another_has_lost_it(make_pair: MakePair) -> None:
    pair = make_pair()
    _connect(pair, OTHER)
    pair.step()
    gone = Disconnect(worker=pair.prefill.worker_id, epoch=pair.prefill.epoch)
    pair.decode.handle(OTHER, gone, pair.clock.now())
    pair.submit("r", _prompt(33))
    pair.run()
    assert pair.outputs["r"] == {0: pair.expected("r")}
    pair.decode.handle(ROUTER, gone, pair.clock.now())
    pair.submit("s", _prompt(33, seed=2))
    pair.run()
    assert [r.kind for r in pair.refusals] == ["unknown_peer"]


def test_peer_is_forgotten_when_the_last_router_that_is_left_has_lost_it(make_pair: MakePair) -> None:
    pair = make_pair()
    _connect(pair, OTHER)
    pair.step()
    pair.decode.disconnect(OTHER, pair.clock.now())
    gone = Disconnect(worker=pair.prefill.worker_id, epoch=pair.prefill.epoch)
    pair.decode.handle(ROUTER, gone, pair.clock.now())
    pair.submit("r", _prompt(33))
    pair.run()
    assert [r.kind for r in pair.refusals] == ["unknown_peer"]


def test_older_life_of_a_peer_is_refused_when_a_newer_one_is_known(make_pair: MakePair) -> None:
    """TX-2."""
    pair = make_pair()
    lives = pair.fabric.regions
    lives[Peer(worker=pair.prefill.worker_id, epoch=Epoch(0))] = lives[
        Peer(worker=pair.prefill.worker_id, epoch=Epoch(1))
    ]
    _connect(pair, OTHER, epoch=0)
    pair.run()
    assert [(type(m).__name__, m.epoch) for m in _answers(pair)] == [("PeerReady", 1), ("PeerRefused", 0)]
    pair.submit("r", _prompt(33))
    pair.run()
    assert pair.outputs["r"] == {0: pair.expected("r")}


def test_peer_is_not_used_when_it_was_lost_before_it_was_ready(make_pair: MakePair) -> None:
    pair = make_pair()
    gone = Disconnect(worker=pair.prefill.worker_id, epoch=pair.prefill.epoch)
    pair.decode.handle(ROUTER, gone, pair.clock.now())
    _connect(pair, ROUTER)
    pair.decode.handle(ROUTER, gone, pair.clock.now())
    pair.step()
    pair.submit("r", _prompt(33))
    pair.run()
    assert [r.kind for r in pair.refusals] == ["unknown_peer"]


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_right_when_messages_are_repeated_at_random(make_pair: MakePair, seed: int) -> None:
    rng = random.Random(seed)
    pair = make_pair(num_blocks=24, **{"prefill.max_batched_tokens": 8})
    pair.fabric.faults.delay_s = (0.0, 0.05)
    said: list[tuple[Any, Any]] = []
    for worker in (pair.decode, pair.prefill):
        handle = worker.handle

        def record(source: RouterId, message: Any, now: float, worker: Any = worker, handle: Any = handle) -> None:
            said.append((handle, message))
            handle(source, message, now)

        worker.handle = record
    for i in range(8):
        pair.submit(f"r{i}", _prompt(rng.randrange(1, 40), seed=i), num_children=rng.choice([1, 1, 2]))
        for _ in range(rng.randrange(6)):
            pair.step()
            handle, message = rng.choice(said)
            live = pair.requests[message.request_id] if isinstance(message, Submit) else None
            if live is None or message.request_id not in pair.finished:
                handle(ROUTER, message, pair.clock.now())
            pair.clock.advance(0.01)
    pair.run(steps_max=2000)
    for i in range(8):
        children = range(pair.requests[RequestId(f"r{i}")].num_children)
        assert pair.outputs[f"r{i}"] == {child: pair.expected(f"r{i}", child) for child in children}
    pair.clock.advance(20.0)
    pair.run()
    pair.assert_nothing_held()
