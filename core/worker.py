"""What a worker of either role is to the process that hosts it: a synchronous state machine, driven step by step.

The host owns threads, links and time; the worker owns its state. All calls come from one thread (the step thread), or
from the in-process runtime. Knows nothing about links, threads or Ray.
"""

from typing import Protocol

from core.books import Check, find_problems
from core.ids import Epoch, Role, RouterId, WorkerId
from core.layout import Handshake
from core.messages import Audit, Audited, FromWorker, ToWorker, WorkerStatus


class Worker(Protocol):
    """A prefill or decode worker."""

    worker_id: WorkerId
    role: Role
    epoch: Epoch

    def handshake(self) -> Handshake:
        """What this worker says of itself to peers."""
        ...

    def handle(self, source: RouterId, message: ToWorker, now: float) -> None:
        """Take one message in. Never raises for anything a peer may send: a bad message is answered with Refused."""
        ...

    def disconnect(self, source: RouterId, now: float) -> None:
        """The link to `source` is gone: cancel everything it asked for."""
        ...

    def advance(self, now: float) -> bool:
        """One iteration: transfers, expiries, one model step. True if there was anything to do."""
        ...

    def take_outbound(self) -> list[tuple[RouterId, FromWorker]]:
        """Messages produced since the last call, in order; the caller must deliver them."""
        ...

    def status(self) -> WorkerStatus:
        """Heartbeat contents."""
        ...

    def books(self) -> dict[str, int]:
        """What is held for requests, by name; all 0 in a worker at rest."""
        ...

    def checks(self) -> tuple[Check, ...]:
        """This worker's invariants: each owner's own, and that their books agree (KV-1, KV-4). O(blocks)."""
        ...

    def check(self) -> None:
        """Assert all of `checks`."""
        ...

    def close(self) -> None:
        """Give up everything, for the end of the process."""
        ...


def audit(worker: Worker, message: Audit) -> Audited:
    """The answer to Audit: the checks as they come out now, and the books."""
    return Audited(
        number=message.number,
        member=worker.worker_id,
        epoch=worker.epoch,
        problems=find_problems(worker.checks()),
        books=worker.books(),
    )
