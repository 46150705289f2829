"""Two sides of a transfer for the contract tests: a reader in this process, and sources that can be started and killed.

Over memory the sources live here, too; over NIXL each is a process of its own (`nixl_source.py`). Every byte of a
source's block `b` in life `epoch` follows from (epoch, b), so that a test knows what must arrive.
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from core.clock import ManualClock
from core.ids import Attempt, BlockDigest, BlockId, Epoch, RequestId, WorkerId
from core.request import AttemptKey
from kvtransfer.integrity import BlockDigester
from kvtransfer.puller import PeerResult, PullJob, PullResult
from kvtransfer.transport.base import Peer, ReadId, ReadResult, Region, Transport
from kvtransfer.transport.memory import MemoryFabric, MemoryTransport
from kvtransfer.transport.nixl import NixlTransport

BLOCK_BYTES = 8192
NUM_SOURCE_BLOCKS = 12
NUM_TARGET_BLOCKS = 10
SOURCE_START_S_MAX = 60
END_S_MAX = 30.0
POLL_S = 0.0005
READER = Peer(worker=WorkerId("decode-0"), epoch=Epoch(1))


def content(epoch: int, block: int) -> bytes:
    """BLOCK_BYTES bytes that no other block of any life has."""
    return np.random.default_rng((epoch, block)).bytes(BLOCK_BYTES)


def source_peer(epoch: int) -> Peer:
    return Peer(worker=WorkerId("prefill-0"), epoch=Epoch(epoch))


class Bench(Protocol):
    """A reader's transport and the sources that it may read."""

    memory: bytearray
    """The reader's region, NUM_TARGET_BLOCKS blocks."""

    @property
    def transport(self) -> Transport:
        """The reader's."""
        ...

    def start_source(self, epoch: int) -> tuple[Peer, bytes]:
        """A new life of the source: its name and metadata."""
        ...

    def kill_source(self, peer: Peer) -> None:
        """The source dies without a word."""
        ...

    def wait(self, read_id: ReadId) -> ReadResult:
        """Poll until this read has ended."""
        ...


def block_of(memory: bytearray, block: int) -> bytes:
    return bytes(memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])


def make_region(memory: bytearray, address: int = 0) -> Region:
    return Region(
        address=address,
        block_bytes=BLOCK_BYTES,
        num_blocks=len(memory) // BLOCK_BYTES,
        device="cpu",
        view=memoryview(memory),
    )


class MemoryBench:
    """All in this process, on a clock that stands still."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fabric = MemoryFabric(self.clock)
        self.memory = bytearray(NUM_TARGET_BLOCKS * BLOCK_BYTES)
        self.transport = MemoryTransport(self.fabric, READER, make_region(self.memory))
        self.sources: dict[Peer, bytearray] = {}
        self.metadata: dict[Peer, bytes] = {}

    def start_source(self, epoch: int) -> tuple[Peer, bytes]:
        peer = source_peer(epoch)
        self.sources[peer] = bytearray(b"".join(content(epoch, block) for block in range(NUM_SOURCE_BLOCKS)))
        self.metadata[peer] = MemoryTransport(self.fabric, peer, make_region(self.sources[peer])).metadata()
        return peer, self.metadata[peer]

    def kill_source(self, peer: Peer) -> None:
        self.fabric.kill(peer)

    def wait(self, read_id: ReadId) -> ReadResult:
        (result,) = [r for r in self.transport.poll() if r.read_id == read_id]
        return result


class NixlBench:
    """The reader here, each source in a process."""

    def __init__(self) -> None:
        self.memory = bytearray(NUM_TARGET_BLOCKS * BLOCK_BYTES)
        address = np.frombuffer(self.memory, dtype=np.uint8).ctypes.data
        self.transport = NixlTransport(READER, make_region(self.memory, address))
        self._processes: dict[Peer, subprocess.Popen[str]] = {}
        self._pause = threading.Event()

    def start_source(self, epoch: int) -> tuple[Peer, bytes]:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "tests.kvtransfer.nixl_source", str(epoch)]
        process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        peer = source_peer(epoch)
        self._processes[peer] = process
        watchdog = threading.Timer(SOURCE_START_S_MAX, process.kill)
        watchdog.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                watchdog.cancel()
                return peer, bytes.fromhex(json.loads(line)["metadata"])
        raise AssertionError("the source process ended before it was ready")

    def tell_source(self, peer: Peer, line: str) -> None:
        stdin = self._processes[peer].stdin
        assert stdin is not None
        stdin.write(line + "\n")
        stdin.flush()

    def kill_source(self, peer: Peer) -> None:
        process = self._processes.pop(peer)
        process.kill()
        process.wait(SOURCE_START_S_MAX)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()

    def wait(self, read_id: ReadId) -> ReadResult:
        deadline_s = time.monotonic() + END_S_MAX
        while time.monotonic() < deadline_s:
            for result in self.transport.poll():
                if result.read_id == read_id:
                    return result
            self._pause.wait(POLL_S)
        raise AssertionError(f"read {read_id} has not ended within {END_S_MAX} s")

    def close(self) -> None:
        for peer in list(self._processes):
            self.kill_source(peer)
        self.transport.close()


def add(bench: Bench, epoch: int = 1) -> Peer:
    """A started source that the reader can read."""
    peer, metadata = bench.start_source(epoch)
    bench.transport.add_peer(peer, metadata, NUM_SOURCE_BLOCKS, BLOCK_BYTES)
    return peer


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


KEY = AttemptKey(request_id=RequestId("r"), attempt=Attempt(0))


def digest_of(block: int, epoch: int = 1) -> BlockDigest:
    return BlockDigester(memoryview(content(epoch, block)), BLOCK_BYTES).digest(ids(0))[0]


def make_job(peer: Peer, sources: list[int], targets: list[int], key: AttemptKey = KEY) -> PullJob:
    return PullJob(
        key=key,
        peer=peer,
        indexes=[10 + i for i in range(len(sources))],
        sources=ids(*sources),
        targets=ids(*targets),
        digests=[digest_of(block) for block in sources],
    )


def only(results: list[PullResult | PeerResult]) -> PullResult:
    (result,) = results
    assert isinstance(result, PullResult)
    return result
