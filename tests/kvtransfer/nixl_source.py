"""A source process for the NIXL tests: registers blocks of known content, prints its metadata, serves.

Lines on standard input: `pause` stops serving until the next line, anything else but an empty line goes on, the end of
input ends the process. Knows nothing about who reads.
"""

import json
import select
import sys

import numpy as np

from core.ids import BlockId
from kvtransfer.transport.nixl import NixlTransport
from tests.kvtransfer.bench import BLOCK_BYTES, NUM_SOURCE_BLOCKS, content, make_region, source_peer

POLL_S = 0.0005
LIFE_S_MAX = 120
"""Nobody needs a source for longer."""


def main() -> None:
    epoch = int(sys.argv[1])
    memory = bytearray(b"".join(content(epoch, BlockId(block)) for block in range(NUM_SOURCE_BLOCKS)))
    assert len(memory) == NUM_SOURCE_BLOCKS * BLOCK_BYTES
    region = make_region(memory, np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    transport = NixlTransport(source_peer(epoch), region)
    print(json.dumps({"metadata": transport.metadata().hex()}), flush=True)
    for _ in range(int(LIFE_S_MAX / POLL_S)):
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            line = sys.stdin.readline()
            if line == "pause\n":
                line = sys.stdin.readline()
            if not line:
                return
        transport.poll()


if __name__ == "__main__":
    main()
