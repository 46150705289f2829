"""What a decode worker counts about the way of prompts into its pool, for its heartbeat.

Knows nothing about receptions or sessions.
"""

from core.metrics import series_key
from core.outbox import Outbox
from kvtransfer.puller import PullResult

CREDITS_GRANTED = "pdcluster_credits_granted_total"

_BLOCKS = "pdcluster_pulled_blocks_total"
_BYTES = "pdcluster_pulled_bytes_total"
_SECONDS = "pdcluster_pull_read_seconds_total"
_MISMATCHES = "pdcluster_digest_mismatches_total"
_READS_FAILED = "pdcluster_reads_failed_total"
_FROM_PEER = {name: series_key(name, "peer") for name in (_BLOCKS, _BYTES, _SECONDS)}

INTAKE_COUNTERS = (
    *_FROM_PEER,
    _MISMATCHES,
    _READS_FAILED,
    CREDITS_GRANTED,
    "pdcluster_credits_lapsed_total",
    "pdcluster_pulls_total",
    "pdcluster_pulls_failed_total",
)


def count_read(outbox: Outbox, result: PullResult) -> None:
    """The end of a read that somebody waited for."""
    outbox.count(_FROM_PEER[_BLOCKS], len(result.verified))
    outbox.count(_FROM_PEER[_BYTES], result.num_bytes)
    outbox.count(_FROM_PEER[_SECONDS], result.seconds)
    outbox.count(_MISMATCHES, result.num_mismatches)
    if result.failure is not None and result.failure != "abandoned":
        outbox.count(series_key(_READS_FAILED, result.failure))
