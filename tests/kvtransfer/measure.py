"""GB/s of NIXL reads between two processes of one machine, and of digests; see docs/experiments.md.

python tests/kvtransfer/measure.py [rounds]
"""

import select
import statistics
import subprocess
import sys
import time

import numpy as np
from numpy.typing import NDArray

from core.clock import SystemClock
from core.ids import BlockId, Epoch, WorkerId
from kvtransfer.integrity import BlockDigester
from kvtransfer.transport.base import Peer, ReadState, Region
from kvtransfer.transport.nixl import NixlTransport

BLOCK_BYTES = 737_280
NUM_BLOCKS = 93
READ_TIMEOUT_S = 10.0


def make_region() -> tuple[Region, NDArray[np.uint8]]:
    memory = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * BLOCK_BYTES, dtype=np.uint8)
    region = Region(
        address=memory.ctypes.data, block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS, device="cpu", view=memory.data
    )
    return region, memory


def serve() -> None:
    """The source: prints its metadata and serves until its standard input closes."""
    region, _memory = make_region()
    transport = NixlTransport(Peer(worker=WorkerId("source"), epoch=Epoch(1)), region)
    print(transport.metadata().hex(), flush=True)
    while not _is_closed():
        transport.poll()
    transport.close()


def _is_closed() -> bool:
    return bool(select.select([sys.stdin], [], [], 0.0005)[0])


def measure(rounds: int) -> None:
    region, memory = make_region()
    transport = NixlTransport(Peer(worker=WorkerId("reader"), epoch=Epoch(1)), region)
    source = subprocess.Popen([sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert source.stdout is not None and source.stdin is not None
    peer = Peer(worker=WorkerId("source"), epoch=Epoch(1))
    transport.add_peer(peer, bytes.fromhex(source.stdout.readline().decode()), NUM_BLOCKS, BLOCK_BYTES)
    for count in (1, 16, NUM_BLOCKS):
        blocks = [BlockId(i) for i in range(count)]
        seconds = [_read(transport, peer, blocks) for _ in range(rounds + 1)]
        median = statistics.median(seconds[1:])
        print(f"read {count:2} blocks: {count * BLOCK_BYTES / median / 1e9:.1f} GB/s (first {seconds[0] * 1e3:.1f} ms)")
    digester = BlockDigester(memory.data, BLOCK_BYTES)
    started = time.perf_counter()
    digester.digest([BlockId(i) for i in range(NUM_BLOCKS)])
    print(f"digest: {memory.nbytes / (time.perf_counter() - started) / 1e9:.1f} GB/s")
    source.stdin.close()
    source.wait(READ_TIMEOUT_S)
    transport.close()


def _read(transport: NixlTransport, peer: Peer, blocks: list[BlockId]) -> float:
    clock = SystemClock()
    started = clock.now()
    transport.start_read(peer, blocks, blocks)
    while clock.now() - started < READ_TIMEOUT_S:
        for result in transport.poll():
            assert result.state is ReadState.DONE, result.reason
            return clock.now() - started
    raise TimeoutError(f"{len(blocks)} blocks were not read within {READ_TIMEOUT_S} s")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
