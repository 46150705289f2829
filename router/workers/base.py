"""What the router needs of a worker, whoever implements it, and whom the worker's client reports to.

Knows nothing about links or requests.
"""

from typing import Literal, Protocol

from core.ids import Role, WorkerId
from core.messages import FromWorker, ToWorker, Welcome, WorkerAddress, WorkerStatus
from router.select import WorkerLife

ClientState = Literal["connecting", "ready", "draining", "closed"]


class WorkerClient(Protocol):
    """A router's side of one worker in one epoch. Used from one asyncio loop only."""

    address: WorkerAddress
    welcome: Welcome | None
    """What the worker said of itself on the current link; None while there is none."""
    status: WorkerStatus | None
    """The last heartbeat on the current link."""
    heard_s: float
    """When the worker last said anything."""

    @property
    def worker(self) -> WorkerId: ...

    @property
    def role(self) -> Role: ...

    @property
    def life(self) -> WorkerLife: ...

    @property
    def state(self) -> ClientState: ...

    def start(self) -> None:
        """Begin to connect, and keep connecting until closed."""
        ...

    def send(self, message: ToWorker) -> None:
        """Queue a message. Dropped when there is no link: the listener was or will be told of the loss."""
        ...

    async def close(self) -> None:
        """Give the worker up for good. Idempotent."""
        ...

    @property
    def num_undelivered(self) -> int:
        """Messages and frames that wait here, in either direction."""
        ...

    def check(self) -> None:
        """Assert that what is known belongs to a link, and the link's own invariants (RQ-2, TX-2)."""
        ...


class WorkerListener(Protocol):
    """Whom a client reports to, in order: up, messages, down, up, ..."""

    def worker_up(self, client: WorkerClient) -> None:
        """The link is there and the worker said Welcome."""
        ...

    def worker_message(self, client: WorkerClient, message: FromWorker) -> None:
        """Any message after Welcome."""
        ...

    def worker_down(self, client: WorkerClient, reason: str) -> None:
        """The link is gone, and with it everything the worker did for this router."""
        ...
