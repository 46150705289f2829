"""Identities shared by every package. Plain values: nothing here knows how an id is made or where it is used."""

from typing import Literal, NewType

RequestId = NewType("RequestId", str)
"""One client request (all of its `n` children), chosen by the router, unique in the cluster."""

WorkerId = NewType("WorkerId", str)
"""One worker process by name, stable over restarts, for example `prefill-0`."""

RouterId = NewType("RouterId", str)
"""One router process by name, for example `router-0`."""

Epoch = NewType("Epoch", int)
"""Grows with every restart of a worker or router; a message of an older epoch changes nothing (TX-2)."""

Attempt = NewType("Attempt", int)
"""Number of a try at a request, starting at 0, owned by the router (TX-2)."""

LeaseId = NewType("LeaseId", int)
"""One lease, unique within (worker, epoch)."""

BlockId = NewType("BlockId", int)
"""Index of a block in one worker's pool."""

BlockHash = NewType("BlockHash", bytes)
"""SHA-256 of a full block chained on its parent (see `core.hashing`)."""

BlockDigest = NewType("BlockDigest", int)
"""Unsigned 64-bit digest of a block's bytes (see `kvtransfer.integrity`)."""

WeightIdentity = NewType("WeightIdentity", str)
"""Hex digest of a model's weights and configuration; KV never crosses it."""

Role = Literal["prefill", "decode"]
