"""What only NIXL can get wrong: registrations that lie, and reads that outlive their abandonment."""

from collections.abc import Iterator

import msgspec
import pytest

from core.errors import TransferFailedError
from core.ids import Epoch, WorkerId
from kvtransfer.transport.base import Peer, ReadState
from tests.kvtransfer.bench import BLOCK_BYTES, NUM_SOURCE_BLOCKS, NixlBench, add, block_of, content, ids

pytestmark = pytest.mark.process

POLLS = 300


@pytest.fixture
def nixl_bench() -> Iterator[NixlBench]:
    bench = NixlBench()
    yield bench
    bench.close()


@pytest.fixture
def tcp_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlBench]:
    """Both sides over TCP, where a read needs the source's help to move its bytes."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    bench = NixlBench()
    yield bench
    bench.close()


@pytest.mark.parametrize("change", [{"address": 4096}, {"address": 2**64 - 1}, {"device": "tape"}])
def test_a_peer_is_refused_when_its_pool_is_not_what_it_registered(
    nixl_bench: NixlBench, change: dict[str, object]
) -> None:
    peer, metadata = nixl_bench.start_source(1)
    lie = msgspec.msgpack.encode(msgspec.msgpack.decode(metadata) | change)
    with pytest.raises(TransferFailedError, match="its registration is refused"):
        nixl_bench.transport.add_peer(peer, lie, NUM_SOURCE_BLOCKS, BLOCK_BYTES)
    nixl_bench.transport.add_peer(peer, metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES)
    assert nixl_bench.wait(nixl_bench.transport.start_read(peer, ids(1), ids(1))).state is ReadState.DONE


def test_a_peer_is_refused_when_it_claims_more_blocks_than_it_registered(nixl_bench: NixlBench) -> None:
    peer, metadata = nixl_bench.start_source(1)
    lie = msgspec.msgpack.encode(msgspec.msgpack.decode(metadata) | {"num_blocks": NUM_SOURCE_BLOCKS + 1})
    with pytest.raises(TransferFailedError, match="its registration is refused"):
        nixl_bench.transport.add_peer(peer, lie, NUM_SOURCE_BLOCKS + 1, BLOCK_BYTES)


def test_a_peer_is_refused_when_its_metadata_is_that_of_another(nixl_bench: NixlBench) -> None:
    _, metadata = nixl_bench.start_source(1)
    other = Peer(worker=WorkerId("prefill-7"), epoch=Epoch(1))
    with pytest.raises(TransferFailedError, match="it is that of prefill-0#1"):
        nixl_bench.transport.add_peer(other, metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES)


def test_an_abandoned_read_is_not_reported_when_its_bytes_may_still_come(tcp_bench: NixlBench) -> None:
    peer = add(tcp_bench)
    tcp_bench.wait(tcp_bench.transport.start_read(peer, ids(0), ids(0)))
    tcp_bench.tell_source(peer, "pause")
    read_id = tcp_bench.transport.start_read(peer, ids(5), ids(5))
    tcp_bench.transport.abandon(read_id)
    tcp_bench.transport.remove_peer(peer)
    assert all(tcp_bench.transport.poll() == [] for _ in range(POLLS))
    assert block_of(tcp_bench.memory, 5) == bytes(BLOCK_BYTES)
    with pytest.raises(TransferFailedError, match="no peer"):
        tcp_bench.transport.start_read(peer, ids(6), ids(6))
    tcp_bench.tell_source(peer, "go on")
    result = tcp_bench.wait(read_id)
    assert (result.state, result.reason) == (ReadState.FAILED, "abandoned")
    assert block_of(tcp_bench.memory, 5) == content(1, 5), "the late write that the quarantine is for"


def test_a_read_under_way_fails_when_its_source_is_killed(tcp_bench: NixlBench) -> None:
    peer = add(tcp_bench)
    tcp_bench.wait(tcp_bench.transport.start_read(peer, ids(0), ids(0)))
    tcp_bench.tell_source(peer, "pause")
    read_id = tcp_bench.transport.start_read(peer, ids(5), ids(5))
    tcp_bench.kill_source(peer)
    assert tcp_bench.wait(read_id).state is ReadState.FAILED
