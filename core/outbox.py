"""What a worker has to say: messages to routers, refusals in one wording, and counters for its heartbeat.

One per worker, shared by the parts of it. Knows nothing about what the worker does.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

from core.ids import Epoch, RouterId, WorkerId
from core.messages import FromWorker, Refused, RequestMessage
from core.metrics import BY_NAME, bucket_keys, series_key, series_keys
from core.request import AttemptKey

RefusalKind = Literal[
    "overloaded", "too_long", "transfer_failed", "credit_lapsed", "unknown_peer", "invalid", "draining"
]

REFUSALS = "pdcluster_refusals_total"


class Outbox:
    """Used from the step thread only."""

    def __init__(self, worker_id: WorkerId, epoch: Epoch, counters: Iterable[str]) -> None:
        """`counters`: the metrics that may be counted, so that each is reported from the first heartbeat on."""
        self._worker_id = worker_id
        self._epoch = epoch
        self._messages: list[tuple[RouterId, FromWorker]] = []
        names = (*counters, REFUSALS)
        self.counters: dict[str, float] = {key: 0.0 for name in names for key in series_keys(name)}
        """What was counted, by the keys of `core.metrics`."""
        histograms = [name for name in names if BY_NAME[name].kind == "histogram"]
        self._histograms = {name: (BY_NAME[name].buckets, bucket_keys(name), f"{name}_sum") for name in histograms}

    def send(self, router: RouterId, message: FromWorker) -> None:
        self._messages.append((router, message))

    def refuse(self, router: RouterId, about: RequestMessage | AttemptKey, kind: RefusalKind, reason: str) -> None:
        """Answer `about` with a Refused that names this worker."""
        refused = Refused(
            request_id=about.request_id,
            attempt=about.attempt,
            kind=kind,
            reason=f"{self._worker_id} (epoch {self._epoch}): {reason}",
        )
        self.count(series_key(REFUSALS, kind))
        self.send(router, refused)

    def count(self, key: str, amount: float = 1.0) -> None:
        """Add to a counter that was declared; a labelled one by its `series_key`."""
        self.counters[key] += amount

    def observe(self, name: str, value: float) -> None:
        """Count one observation of a histogram that was declared."""
        buckets, keys, sum_key = self._histograms[name]
        self.counters[keys[bisect_left(buckets, value)]] += 1
        self.counters[sum_key] += value

    def take(self) -> list[tuple[RouterId, FromWorker]]:
        """The messages since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages
