"""The in-memory transport's faults: each does what it says, and none without being asked for."""

import pytest

from kvtransfer.transport.base import ReadState, Region
from kvtransfer.transport.memory import MemoryFabric, MemoryTransport
from tests.kvtransfer.bench import BLOCK_BYTES, READER, MemoryBench, add, block_of, content, ids

EMPTY = bytes(BLOCK_BYTES)


def test_bytes_arrive_only_when_the_delay_is_over(memory_bench: MemoryBench) -> None:
    memory_bench.fabric.faults.delay_s = (2.0, 2.0)
    read_id = memory_bench.transport.start_read(add(memory_bench), ids(3), ids(0))
    memory_bench.clock.advance(1.9)
    assert memory_bench.transport.poll() == []
    assert block_of(memory_bench.memory, 0) == EMPTY
    assert memory_bench.transport.next_due_s == 2.0
    memory_bench.clock.advance(0.1)
    assert memory_bench.wait(read_id).seconds == 2.0
    assert block_of(memory_bench.memory, 0) == content(1, 3)
    assert memory_bench.transport.next_due_s is None


def test_the_source_is_copied_as_it_is_when_the_read_takes_effect(memory_bench: MemoryBench) -> None:
    memory_bench.fabric.faults.delay_s = (1.0, 1.0)
    peer = add(memory_bench)
    read_id = memory_bench.transport.start_read(peer, ids(3), ids(0))
    memory_bench.sources[peer][3 * BLOCK_BYTES : 4 * BLOCK_BYTES] = bytes(BLOCK_BYTES)
    memory_bench.clock.advance(1.0)
    assert memory_bench.wait(read_id).state is ReadState.DONE
    assert block_of(memory_bench.memory, 0) == EMPTY


def test_a_lost_read_fails_when_half_of_it_was_written(memory_bench: MemoryBench) -> None:
    memory_bench.fabric.faults.loss_rate = 1.0
    result = memory_bench.wait(memory_bench.transport.start_read(add(memory_bench), ids(0, 1), ids(0, 1)))
    assert (result.state, result.reason) == (ReadState.FAILED, "lost")
    assert block_of(memory_bench.memory, 0) == content(1, 0)
    assert block_of(memory_bench.memory, 1) == EMPTY


def test_one_bit_differs_when_a_read_is_corrupted(memory_bench: MemoryBench) -> None:
    memory_bench.fabric.faults.corruption_rate = 1.0
    assert (
        memory_bench.wait(memory_bench.transport.start_read(add(memory_bench), ids(4), ids(0))).state is ReadState.DONE
    )
    difference = int.from_bytes(block_of(memory_bench.memory, 0)) ^ int.from_bytes(content(1, 4))
    assert difference.bit_count() == 1


def test_another_block_arrives_when_a_read_is_stale(memory_bench: MemoryBench) -> None:
    memory_bench.fabric.faults.stale_rate = 1.0
    assert (
        memory_bench.wait(memory_bench.transport.start_read(add(memory_bench), ids(4), ids(0))).state is ReadState.DONE
    )
    assert block_of(memory_bench.memory, 0) == content(1, 5)


@pytest.mark.parametrize(("rate", "arrived"), [(0.0, EMPTY), (1.0, content(1, 4))])
def test_an_abandoned_read_may_write_until_it_ends_when_writes_come_late(
    memory_bench: MemoryBench, rate: float, arrived: bytes
) -> None:
    memory_bench.fabric.faults.delay_s = (3.0, 3.0)
    memory_bench.fabric.faults.late_write_rate = rate
    read_id = memory_bench.transport.start_read(add(memory_bench), ids(4), ids(0))
    memory_bench.transport.abandon(read_id)
    assert memory_bench.transport.poll() == []
    memory_bench.clock.advance(3.0)
    assert memory_bench.wait(read_id).state is ReadState.FAILED
    assert block_of(memory_bench.memory, 0) == arrived


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_stalled_read_ends_only_when_its_peer_does(memory_bench: MemoryBench, is_removed: bool) -> None:
    memory_bench.fabric.faults.stall_rate = 1.0
    peer = add(memory_bench)
    read_id = memory_bench.transport.start_read(peer, ids(4), ids(0))
    memory_bench.clock.advance(1e6)
    assert memory_bench.transport.poll() == []
    if is_removed:
        memory_bench.transport.remove_peer(peer)
    else:
        memory_bench.kill_source(peer)
    assert memory_bench.wait(read_id).reason == "the peer is gone"


def test_a_closed_transport_is_no_source_when_others_read(memory_bench: MemoryBench) -> None:
    peer = add(memory_bench)
    closing = MemoryTransport(memory_bench.fabric, peer, memory_bench.fabric.regions[peer])
    closing.close()
    assert memory_bench.wait(memory_bench.transport.start_read(peer, ids(0), ids(0))).state is ReadState.FAILED


def test_two_runs_are_equal_when_the_seed_is() -> None:
    outcomes = []
    for _ in range(2):
        bench = MemoryBench()
        bench.fabric.faults.loss_rate = bench.fabric.faults.corruption_rate = 0.5
        peer = add(bench)
        states = [bench.wait(bench.transport.start_read(peer, ids(b), ids(b))).state for b in range(8)]
        outcomes.append((states, bytes(bench.memory)))
    assert outcomes[0] == outcomes[1]


def test_a_region_without_host_memory_is_refused_when_constructed(memory_bench: MemoryBench) -> None:
    region = Region(address=0, block_bytes=8, num_blocks=1, device="cuda:0", view=None)
    with pytest.raises(ValueError, match="view of the whole region"):
        MemoryTransport(MemoryFabric(memory_bench.clock), READER, region)
