"""Round robin over pairs of workers."""

import itertools
from collections import Counter

from core.ids import Epoch, WorkerId
from router.select import RoundRobin, Topology, WorkerLife


def life(name: str) -> WorkerLife:
    return WorkerLife(worker=WorkerId(name), epoch=Epoch(1))


def topology(num_prefill: int, num_decode: int, *, broken: tuple[tuple[int, int], ...] = ()) -> Topology:
    """`broken`: (decode, prefill) that cannot exchange KV."""
    prefill = tuple(life(f"prefill-{i}") for i in range(num_prefill))
    decode = tuple(life(f"decode-{i}") for i in range(num_decode))
    pairs = ((d, p) for d in range(num_decode) for p in range(num_prefill) if (d, p) not in broken)
    return Topology(
        prefill=prefill,
        decode=decode,
        connected=frozenset((decode[d], prefill[p]) for d, p in pairs),
        is_colocated=False,
    )


def test_every_pair_and_worker_is_used_equally_when_all_are_connected() -> None:
    selector, workers = RoundRobin(), topology(2, 2)
    chosen = [selector.select(workers) for _ in range(8)]
    assert set(Counter(chosen).values()) == {2} and len(set(chosen)) == 4
    for first, second in itertools.pairwise(chosen):
        assert first is not None and second is not None and first.decode != second.decode


def test_unconnected_pairs_are_never_chosen() -> None:
    selector, workers = RoundRobin(), topology(2, 2, broken=((0, 0), (1, 0), (1, 1)))
    chosen = {selector.select(workers) for _ in range(6)}
    assert {(p.decode.worker, p.prefill.worker) for p in chosen if p and p.prefill} == {("decode-0", "prefill-1")}


def test_none_is_chosen_when_a_role_is_missing() -> None:
    assert RoundRobin().select(topology(0, 2)) is None
    assert RoundRobin().select(topology(2, 0)) is None


def test_avoided_workers_are_chosen_only_when_there_is_no_other() -> None:
    selector = RoundRobin()
    failed = {WorkerId("prefill-0"): 1, WorkerId("decode-1"): 1}
    for _ in range(4):
        pair = selector.select(topology(2, 2), failed)
        assert pair is not None and not pair.workers() & set(failed)
    assert selector.select(topology(1, 1), failed) is not None


def test_failure_of_long_ago_is_chosen_when_every_pair_failed() -> None:
    """The last to fail may still be stopped; who failed before it has had more time."""
    selector = RoundRobin()
    failed = {WorkerId("prefill-0"): 1, WorkerId("decode-0"): 1, WorkerId("prefill-1"): 2, WorkerId("decode-1"): 2}
    for _ in range(4):
        pair = selector.select(topology(2, 2), failed)
        assert pair is not None and pair.workers() == {"prefill-0", "decode-0"}


def test_decode_alone_is_chosen_when_colocated() -> None:
    workers = Topology(prefill=(), decode=(life("decode-0"),), connected=frozenset(), is_colocated=True)
    pair = RoundRobin().select(workers)
    assert pair is not None and pair.prefill is None
