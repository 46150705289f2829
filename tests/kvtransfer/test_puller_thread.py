"""The transfer thread: results come once and ring, limits are refusals, its death is its owner's error."""

import threading

import pytest

from core.clock import ManualClock
from core.errors import TransferFailedError
from core.ids import BlockDigest
from kvtransfer import puller_thread
from kvtransfer.integrity import BlockDigester
from kvtransfer.puller import PeerResult, PullResult
from kvtransfer.puller_thread import ThreadedPuller
from kvtransfer.transport.memory import MemoryTransport
from tests.kvtransfer.bench import BLOCK_BYTES, NUM_SOURCE_BLOCKS, READER, MemoryBench, add, make_job, make_region, only

WAIT_S_MAX = 20.0


class Threaded:
    """A threaded puller and the bell it rings."""

    def __init__(self, bench: MemoryBench) -> None:
        self.bell = threading.Event()
        self.puller = ThreadedPuller(
            bench.transport,
            BlockDigester(memoryview(bench.memory), BLOCK_BYTES),
            clock=bench.clock,
            on_result=self.bell.set,
        )

    def wait(self) -> list[PullResult | PeerResult]:
        assert self.bell.wait(WAIT_S_MAX)
        self.bell.clear()
        return self.puller.poll()


def test_results_ring_and_come_once_when_a_thread_makes_the_calls(memory_bench: MemoryBench) -> None:
    threaded = Threaded(memory_bench)
    peer, metadata = memory_bench.start_source(1)
    threaded.puller.add_peer(peer, metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES)
    assert threaded.wait() == [PeerResult(peer=peer, is_ready=True)]
    job = make_job(peer, [3, 4], [0, 1])
    threaded.puller.submit(job)
    assert threaded.puller.pending() == {job.key: 2}
    assert only(threaded.wait()).verified == [10, 11]
    assert threaded.puller.poll() == [] and threaded.puller.pending() == {}
    threaded.puller.serve_hint(True)
    threaded.puller.remove_peer(peer)
    threaded.puller.submit(make_job(peer, [3], [0]))
    assert only(threaded.wait()).bad == [10]
    threaded.puller.close()
    assert memory_bench.transport.next_due_s is None


def test_jobs_are_refused_when_too_many_are_under_way(
    memory_bench: MemoryBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller_thread, "JOBS_MAX", 1)
    memory_bench.fabric.faults.stall_rate = 1.0
    peer = add(memory_bench)
    threaded = Threaded(memory_bench)
    threaded.puller.submit(make_job(peer, [3], [0]))
    threaded.puller.submit(make_job(peer, [4], [1]))
    refused = only(threaded.wait())
    assert refused.bad == [10]
    assert "1 reads are under way" in refused.reason
    memory_bench.kill_source(peer)
    assert only(threaded.wait()).reason == "the peer is gone"
    threaded.puller.submit(make_job(peer, [3], [0]))
    assert only(threaded.wait()).reason == "the peer is gone"
    threaded.puller.close()


class BrokenDigester:
    """Fails as only a bug can."""

    block_bytes = BLOCK_BYTES

    def digest(self, block_ids: object) -> list[BlockDigest]:
        raise RuntimeError("broken digester")

    def clear(self, block_ids: object) -> None:
        raise RuntimeError("broken digester")


def test_the_owner_learns_of_it_when_the_transfer_thread_dies(memory_bench: MemoryBench) -> None:
    bell = threading.Event()
    puller = ThreadedPuller(memory_bench.transport, BrokenDigester(), clock=ManualClock(), on_result=bell.set)
    puller.submit(make_job(add(memory_bench), [3], [0]))
    assert bell.wait(WAIT_S_MAX)
    with pytest.raises(RuntimeError, match="broken digester"):
        puller.poll()
    puller.close()


class OpenTransport(MemoryTransport):
    """Cannot end what is under way."""

    def close(self) -> None:
        raise TransferFailedError(source="peers", target="decode-0", reason="1 reads have not ended")


def test_closing_fails_when_a_read_under_way_does_not_end(memory_bench: MemoryBench) -> None:
    transport = OpenTransport(memory_bench.fabric, READER, make_region(memory_bench.memory))
    puller = ThreadedPuller(transport, BrokenDigester(), clock=ManualClock())
    with pytest.raises(TransferFailedError, match="have not ended"):
        puller.close()
