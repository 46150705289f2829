"""What a worker has to say: messages to routers, refusals in one wording, and counters for its heartbeat.

One per worker, shared by the parts of it. Knows nothing about what the worker does.
"""

from collections.abc import Iterable
from typing import Literal

from core.ids import Epoch, RouterId, WorkerId
from core.messages import FromWorker, Refused, RequestMessage
from core.request import AttemptKey

RefusalKind = Literal[
    "overloaded", "too_long", "transfer_failed", "credit_lapsed", "unknown_peer", "invalid", "draining"
]


class Outbox:
    """Used from the step thread only."""

    def __init__(self, worker_id: WorkerId, epoch: Epoch, counters: Iterable[str]) -> None:
        """`counters`: every name that may be counted, so that each is reported from the first heartbeat on."""
        self._worker_id = worker_id
        self._epoch = epoch
        self._messages: list[tuple[RouterId, FromWorker]] = []
        self.counters: dict[str, float] = dict.fromkeys(counters, 0.0)

    def send(self, router: RouterId, message: FromWorker) -> None:
        self._messages.append((router, message))

    def refuse(
        self,
        router: RouterId,
        about: RequestMessage | AttemptKey,
        kind: RefusalKind,
        reason: str,
        num_verified_blocks: int = 0,
    ) -> None:
        """Answer `about` with a Refused that names this worker."""
        refused = Refused(
            request_id=about.request_id,
            attempt=about.attempt,
            kind=kind,
            reason=f"{self._worker_id} (epoch {self._epoch}): {reason}",
            num_verified_blocks=num_verified_blocks,
        )
        self.send(router, refused)

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter that was declared."""
        self.counters[name] += amount

    def take(self) -> list[tuple[RouterId, FromWorker]]:
        """The messages since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages
