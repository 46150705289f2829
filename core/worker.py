"""What a worker of either role is to the process that hosts it: a synchronous state machine, driven step by step.

The host owns threads, links and time; the worker owns its state. All calls come from one thread (the step thread), or
from the in-process runtime. Knows nothing about links, threads or Ray.
"""

from typing import Protocol

from core.ids import Epoch, Role, RouterId, WorkerId
from core.layout import Handshake
from core.messages import FromWorker, ToWorker, WorkerStatus


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

    def check(self) -> None:
        """Assert this worker's invariants (KV-1, KV-4, leases, sessions)."""
        ...

    def close(self) -> None:
        """Give up everything, for the end of the process."""
        ...
