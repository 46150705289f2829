"""What the transport seam promises: the same tests over memory, and over NIXL between processes."""

import os

import msgspec
import pytest

from core.errors import IncompatiblePeersError, TransferFailedError
from kvtransfer.transport.base import ReadState
from tests.kvtransfer.bench import (
    BLOCK_BYTES,
    NUM_SOURCE_BLOCKS,
    NUM_TARGET_BLOCKS,
    Bench,
    add,
    block_of,
    content,
    ids,
    source_peer,
)


def test_bytes_are_equal_when_blocks_are_read_out_of_order(bench: Bench) -> None:
    peer = add(bench)
    result = bench.wait(bench.transport.start_read(peer, ids(11, 0, 5, 6), ids(2, 9, 4, 3)))
    assert (result.state, result.reason) == (ReadState.DONE, "")
    assert result.seconds >= 0
    for source, target in ((11, 2), (0, 9), (5, 4), (6, 3)):
        assert block_of(bench.memory, target) == content(1, source)
    for untouched in (0, 1, 5, 6, 7, 8):
        assert block_of(bench.memory, untouched) == bytes(BLOCK_BYTES)


def test_one_block_may_be_read_into_two_targets_when_both_are_named(bench: Bench) -> None:
    peer = add(bench)
    assert bench.wait(bench.transport.start_read(peer, ids(3, 3), ids(0, 1))).state is ReadState.DONE
    assert block_of(bench.memory, 0) == block_of(bench.memory, 1) == content(1, 3)


def test_a_read_is_reported_once_when_it_has_ended(bench: Bench) -> None:
    peer = add(bench)
    read_id = bench.transport.start_read(peer, ids(1), ids(1))
    bench.wait(read_id)
    assert bench.transport.poll() == []


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        (ids(NUM_SOURCE_BLOCKS), ids(0)),
        (ids(-1), ids(0)),
        (ids(0), ids(NUM_TARGET_BLOCKS)),
        (ids(0), ids(-1)),
        (ids(0, 1), ids(3, 3)),
        (ids(0, 1), ids(0)),
        (ids(), ids()),
    ],
)
def test_a_read_is_refused_when_its_ids_do_not_fit(memory_bench: Bench, sources: list[int], targets: list[int]) -> None:
    peer = add(memory_bench)
    with pytest.raises(ValueError, match="block"):
        memory_bench.transport.start_read(peer, ids(*sources), ids(*targets))


def test_nothing_is_written_when_a_read_reaches_beyond_the_source(bench: Bench) -> None:
    peer = add(bench)
    for sources, targets in ((ids(0, NUM_SOURCE_BLOCKS), ids(0, 1)), (ids(0, 1), ids(0, NUM_TARGET_BLOCKS))):
        with pytest.raises(ValueError, match="outside"):
            bench.transport.start_read(peer, sources, targets)
    assert bench.transport.poll() == []
    assert bench.memory == bytes(len(bench.memory))


def test_a_read_is_refused_when_the_peer_is_unknown(bench: Bench) -> None:
    with pytest.raises(TransferFailedError, match="no peer"):
        bench.transport.start_read(source_peer(1), ids(0), ids(0))


def test_a_peer_is_refused_when_its_blocks_have_another_size(bench: Bench) -> None:
    peer, metadata = bench.start_source(1)
    with pytest.raises(IncompatiblePeersError, match="block_bytes is 8192 on prefill-0"):
        bench.transport.add_peer(peer, metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES * 2)
    with pytest.raises(IncompatiblePeersError, match="num_blocks is 12 on prefill-0"):
        bench.transport.add_peer(peer, metadata, NUM_SOURCE_BLOCKS + 1, BLOCK_BYTES)
    said = msgspec.msgpack.decode(metadata)
    other = msgspec.msgpack.encode(said | {"block_bytes": BLOCK_BYTES * 2})
    with pytest.raises(IncompatiblePeersError, match="16384 on prefill-0 and 8192 on decode-0"):
        bench.transport.add_peer(peer, other, NUM_SOURCE_BLOCKS, BLOCK_BYTES * 2)


def test_a_peer_is_refused_when_its_metadata_is_malformed(bench: Bench) -> None:
    for metadata in (b"", b"\x80", msgspec.msgpack.encode({"num_blocks": "many"})):
        with pytest.raises(TransferFailedError, match="metadata cannot be read"):
            bench.transport.add_peer(source_peer(1), metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES)


def test_adding_changes_nothing_when_the_peer_is_known(bench: Bench) -> None:
    peer, metadata = bench.start_source(1)
    for _ in range(2):
        bench.transport.add_peer(peer, metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES)
    assert bench.wait(bench.transport.start_read(peer, ids(0), ids(0))).state is ReadState.DONE


def test_reads_are_refused_when_the_peer_was_removed(bench: Bench) -> None:
    peer = add(bench)
    bench.wait(bench.transport.start_read(peer, ids(0), ids(0)))
    for _ in range(2):
        bench.transport.remove_peer(peer)
    with pytest.raises(TransferFailedError, match="no peer"):
        bench.transport.start_read(peer, ids(0), ids(0))


def test_reads_fail_at_once_when_the_source_was_killed(bench: Bench) -> None:
    peer = add(bench)
    bench.wait(bench.transport.start_read(peer, ids(0), ids(0)))
    bench.kill_source(peer)
    result = bench.wait(bench.transport.start_read(peer, ids(1), ids(1)))
    assert result.state is ReadState.FAILED
    assert result.reason
    assert result.seconds < 5.0
    bench.transport.remove_peer(peer)


def test_nothing_is_left_open_when_a_peer_is_removed_and_added_again(bench: Bench) -> None:
    """As routers do when they lose sight of a worker for a while, in one life of it."""
    peer, metadata = bench.start_source(1)
    counts = []
    for _ in range(5):
        bench.transport.add_peer(peer, metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES)
        result = bench.wait(bench.transport.start_read(peer, ids(3), ids(3)))
        assert result.state is ReadState.DONE and block_of(bench.memory, 3) == content(1, 3)
        bench.transport.remove_peer(peer)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[0], counts


def test_the_new_life_is_read_when_a_source_of_the_same_name_restarts(bench: Bench) -> None:
    old = add(bench, epoch=1)
    bench.wait(bench.transport.start_read(old, ids(7), ids(7)))
    bench.kill_source(old)
    new = add(bench, epoch=2)
    bench.transport.remove_peer(old)
    assert bench.wait(bench.transport.start_read(new, ids(7), ids(7))).state is ReadState.DONE
    assert block_of(bench.memory, 7) == content(2, 7)


def test_the_end_is_reported_when_a_read_was_abandoned(bench: Bench) -> None:
    peer = add(bench)
    read_id = bench.transport.start_read(peer, ids(0, 1), ids(0, 1))
    bench.transport.abandon(read_id)
    assert bench.wait(read_id).read_id == read_id
    bench.transport.abandon(read_id)
    assert bench.wait(bench.transport.start_read(peer, ids(2), ids(0))).state is ReadState.DONE
    assert block_of(bench.memory, 0) == content(1, 2)


def test_metadata_is_plain_messagepack_when_decoded(bench: Bench) -> None:
    _, metadata = bench.start_source(1)
    said = msgspec.msgpack.decode(metadata)
    assert (said["block_bytes"], said["num_blocks"]) == (BLOCK_BYTES, NUM_SOURCE_BLOCKS)
