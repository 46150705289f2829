"""The puller: nothing unverified is reported as good, and nothing is reported while it may still be written (TX-1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.ids import Attempt
from core.request import AttemptKey
from kvtransfer.integrity import BlockDigester
from kvtransfer.puller import PeerResult, Puller, PullJob, PullResult
from kvtransfer.transport.base import ReadId
from kvtransfer.transport.memory import MemoryTransport
from tests.kvtransfer.bench import (
    BLOCK_BYTES,
    KEY,
    NUM_SOURCE_BLOCKS,
    NUM_TARGET_BLOCKS,
    READER,
    MemoryBench,
    add,
    block_of,
    content,
    make_job,
    make_region,
    only,
    source_peer,
)

TIMEOUT_S = 5.0


def replace_attempt(attempt: int) -> AttemptKey:
    return AttemptKey(request_id=KEY.request_id, attempt=Attempt(attempt))


def make_puller(bench: MemoryBench) -> Puller:
    digester = BlockDigester(memoryview(bench.memory), BLOCK_BYTES)
    return Puller(bench.transport, digester, clock=bench.clock, read_timeout_s=TIMEOUT_S)


def test_every_index_is_verified_when_all_bytes_arrive(memory_bench: MemoryBench) -> None:
    puller = make_puller(memory_bench)
    puller.submit(make_job(add(memory_bench), [3, 4], [0, 1]))
    result = only(puller.poll())
    assert (result.key, result.verified, result.bad) == (KEY, [10, 11], [])
    assert (result.num_bytes, result.num_mismatches, result.reason) == (2 * BLOCK_BYTES, 0, "")
    assert puller.poll() == []


def test_a_block_is_bad_when_one_bit_is_wrong(memory_bench: MemoryBench) -> None:
    puller = make_puller(memory_bench)
    memory_bench.fabric.faults.corruption_rate = 1.0
    puller.submit(make_job(add(memory_bench), [3, 4, 5], [0, 1, 2]))
    result = only(puller.poll())
    assert (len(result.verified), len(result.bad), result.num_mismatches) == (2, 1, 1)
    assert "digest" in result.reason


def test_bytes_that_nobody_vouches_for_do_not_stay(memory_bench: MemoryBench) -> None:
    """They may be any bits, NaN too, and a masked position of a block that is used again is multiplied by zero."""
    puller = make_puller(memory_bench)
    peer = add(memory_bench)
    memory_bench.fabric.faults.corruption_rate = 1.0
    puller.submit(make_job(peer, [3, 4, 5], [0, 1, 2]))
    (bad,) = only(puller.poll()).bad
    blocks = [bytes(memory_bench.memory[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) for i in range(3)]
    assert [any(block) for block in blocks] == [index != bad for index in (10, 11, 12)]
    memory_bench.fabric.faults.corruption_rate = 0.0
    memory_bench.fabric.faults.delay_s = (1.0, 1.0)
    puller.submit(make_job(peer, [3], [0]))
    puller.abandon(KEY)
    memory_bench.clock.advance(2.0)
    assert only(puller.poll()).bad == [10]
    assert not any(memory_bench.memory[:BLOCK_BYTES])


def test_a_block_is_bad_when_the_source_has_reused_it(memory_bench: MemoryBench) -> None:
    puller = make_puller(memory_bench)
    peer = add(memory_bench)
    job = make_job(peer, [3, 4], [0, 1])
    memory_bench.sources[peer][4 * BLOCK_BYTES : 5 * BLOCK_BYTES] = content(1, 9)
    puller.submit(job)
    result = only(puller.poll())
    assert (result.verified, result.bad) == ([10], [11])


def test_a_job_is_bad_when_its_read_is_lost(memory_bench: MemoryBench) -> None:
    puller = make_puller(memory_bench)
    memory_bench.fabric.faults.loss_rate = 1.0
    puller.submit(make_job(add(memory_bench), [3, 4], [0, 1]))
    result = only(puller.poll())
    assert (result.verified, result.bad, result.num_bytes, result.reason) == ([], [10, 11], 0, "lost")


@pytest.mark.parametrize("targets", [[0, NUM_TARGET_BLOCKS], [0, 0]])
def test_a_job_is_bad_at_once_when_it_cannot_start(memory_bench: MemoryBench, targets: list[int]) -> None:
    puller = make_puller(memory_bench)
    puller.submit(make_job(source_peer(1), [3, 4], [0, 1]))
    assert "no peer" in only(puller.poll()).reason
    puller.submit(make_job(add(memory_bench), [3, 4], targets))
    assert only(puller.poll()).bad == [10, 11]


@pytest.mark.parametrize(
    ("failure", "fault"),
    [("mismatch", "corruption_rate"), ("lost", "loss_rate"), ("timed_out", "stall_rate"), ("not_started", "")],
)
def test_end_of_a_read_is_named_as_one_of_few(memory_bench: MemoryBench, failure: str, fault: str) -> None:
    puller = make_puller(memory_bench)
    peer = add(memory_bench) if fault else source_peer(1)
    if fault:
        setattr(memory_bench.fabric.faults, fault, 1.0)
    puller.submit(make_job(peer, [3], [0]))
    results = puller.poll()
    if failure == "timed_out":
        memory_bench.clock.advance(TIMEOUT_S)
        assert not results and not puller.poll()
        memory_bench.fabric.kill(peer)
        results = puller.poll()
    assert only(results).failure == failure


def test_no_failure_is_named_when_all_bytes_arrive_or_nobody_waits(memory_bench: MemoryBench) -> None:
    puller = make_puller(memory_bench)
    memory_bench.fabric.faults.delay_s = (1.0, 1.0)
    puller.submit(make_job(add(memory_bench), [3], [0]))
    puller.submit(make_job(source_peer(1), [4], [1], key=replace_attempt(1)))
    memory_bench.clock.advance(0.5)
    puller.abandon(KEY)
    memory_bench.clock.advance(0.5)
    failures = {result.key: result.failure for result in puller.poll() if isinstance(result, PullResult)}
    assert failures[KEY] == "abandoned"
    memory_bench.fabric.faults.delay_s = (0.0, 0.0)
    puller.submit(make_job(source_peer(1), [4], [1]))
    assert only(puller.poll()).failure is None


def test_an_abandoned_job_is_reported_only_when_nothing_can_write_any_more(memory_bench: MemoryBench) -> None:
    puller = make_puller(memory_bench)
    memory_bench.fabric.faults.delay_s = (3.0, 3.0)
    memory_bench.fabric.faults.late_write_rate = 1.0
    peer = add(memory_bench)
    other = replace_attempt(1)
    puller.submit(make_job(peer, [3], [0]))
    puller.submit(make_job(peer, [4], [1], key=other))
    puller.abandon(KEY)
    assert puller.poll() == []
    memory_bench.clock.advance(3.0)
    first, second = puller.poll()
    assert isinstance(first, PullResult)
    assert isinstance(second, PullResult)
    assert (first.key, first.verified, first.bad, first.reason) == (KEY, [], [10], "abandoned")
    assert (second.key, second.verified) == (other, [10])
    assert block_of(memory_bench.memory, 0) == bytes(BLOCK_BYTES)
    memory_bench.clock.advance(100.0)
    assert puller.poll() == []
    assert block_of(memory_bench.memory, 0) == bytes(BLOCK_BYTES)


class DeafTransport(MemoryTransport):
    """Finishes abandoned reads as if nothing had been said, as a transport may."""

    def abandon(self, read_id: ReadId) -> None:
        return


def test_an_abandoned_job_is_bad_when_its_bytes_arrive_all_the_same(memory_bench: MemoryBench) -> None:
    peer = add(memory_bench)
    memory_bench.transport = DeafTransport(memory_bench.fabric, READER, make_region(memory_bench.memory))
    memory_bench.transport.add_peer(peer, memory_bench.metadata[peer], NUM_SOURCE_BLOCKS, BLOCK_BYTES)
    puller = make_puller(memory_bench)
    puller.submit(make_job(peer, [3], [0]))
    puller.abandon(KEY)
    result = only(puller.poll())
    assert (result.verified, result.bad, result.reason) == ([], [10], "abandoned")


def test_a_slow_read_is_given_up_but_kept_in_quarantine_when_its_time_is_over(memory_bench: MemoryBench) -> None:
    puller = make_puller(memory_bench)
    memory_bench.fabric.faults.delay_s = (TIMEOUT_S + 2, TIMEOUT_S + 2)
    puller.submit(make_job(add(memory_bench), [3], [0]))
    memory_bench.clock.advance(TIMEOUT_S)
    assert puller.poll() == []
    assert puller.num_reads == 1 and puller.pending() == {KEY: 1}
    memory_bench.clock.advance(2)
    result = only(puller.poll())
    assert not puller.pending()
    assert result.bad == [10]
    assert "not read within 5.0 s" in result.reason


def test_a_stalled_read_is_reported_when_its_peer_is_removed(memory_bench: MemoryBench) -> None:
    puller = make_puller(memory_bench)
    memory_bench.fabric.faults.stall_rate = 1.0
    peer = add(memory_bench)
    puller.submit(make_job(peer, [3], [0]))
    memory_bench.clock.advance(1e6)
    assert puller.poll() == []
    puller.remove_peer(peer)
    assert only(puller.poll()).bad == [10]


def test_adding_a_peer_is_answered_when_it_is_ready_or_refused(memory_bench: MemoryBench) -> None:
    puller = make_puller(memory_bench)
    peer, metadata = memory_bench.start_source(1)
    puller.add_peer(peer, metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES)
    puller.add_peer(peer, metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES * 2)
    puller.add_peer(peer, b"?", NUM_SOURCE_BLOCKS, BLOCK_BYTES)
    good, other_size, malformed = puller.poll()
    assert good == PeerResult(peer=peer, is_ready=True)
    assert isinstance(other_size, PeerResult)
    assert isinstance(malformed, PeerResult)
    assert not other_size.is_ready
    assert "block_bytes" in other_size.reason
    assert "metadata" in malformed.reason


@given(
    seed=st.integers(0, 2**32), rate=st.sampled_from([0.0, 0.2, 0.6]), steps=st.lists(st.integers(0, 5), max_size=30)
)
def test_verified_means_the_right_bytes_when_any_fault_strikes(seed: int, rate: float, steps: list[int]) -> None:
    """Goal: TX-1 over faults.

    Method: random jobs, abandonments and waits; each job ends exactly once, each verified target holds its source's
    bytes, and no target changes after its job was reported.
    """
    bench = MemoryBench()
    bench.fabric.rng.seed(seed)
    faults = bench.fabric.faults
    faults.delay_s = (0.0, 2 * TIMEOUT_S)
    faults.loss_rate = faults.corruption_rate = faults.stale_rate = faults.late_write_rate = rate
    peer, puller = add(bench), make_puller(bench)
    jobs: dict[AttemptKey, PullJob] = {}
    free = list(range(NUM_TARGET_BLOCKS))
    settled: dict[int, bytes] = {}

    def collect() -> None:
        for result in puller.poll():
            assert isinstance(result, PullResult)
            job = jobs.pop(result.key)
            assert sorted(result.verified + result.bad) == job.indexes
            for index, source, target in zip(job.indexes, job.sources, job.targets, strict=True):
                settled[target] = block_of(bench.memory, target)
                if index in result.verified:
                    assert settled[target] == content(1, source)
            free.extend(job.targets)
        assert all(block_of(bench.memory, target) == settled[target] for target in free if target in settled)

    for number, step in enumerate(steps):
        if step <= 2 and len(free) >= step + 1:
            targets = [free.pop() for _ in range(step + 1)]
            job = make_job(
                peer, [(number + i) % NUM_SOURCE_BLOCKS for i in range(step + 1)], targets, replace_attempt(number)
            )
            jobs[job.key] = job
            puller.submit(job)
        elif step == 3 and jobs:
            puller.abandon(next(iter(jobs)))
        bench.clock.advance(step * 0.7)
        collect()
    bench.clock.advance(2 * TIMEOUT_S)
    collect()
    assert not jobs
    assert puller.num_reads == 0
