"""The controller's end of the link to one router: tells it the workers, hears its heartbeats, dials again when the link
ends.

Knows nothing about who starts routers or what they do with the workers.
"""

from cluster.runtime import Observed
from core.clock import Clock
from core.errors import LinkClosedError, LinkOverflowError
from core.ids import Epoch, RouterId
from core.layout import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN
from core.link import Dialer, Link
from core.messages import HEARTBEAT_TIMEOUT_S, Audit, AuditReport, Hello, RouterStatus, WorkerSet

CONTROLLER = RouterId("controller")
DIAL_TIMEOUT_S = 5.0
REDIAL_S = 0.5
AUDIT_WAIT_S = 12.0
"""Longer than the router waits for its workers."""
AUDIT_POLL_S = 0.05


class RouterContact:
    """What the controller knows of one router's process, and the task that keeps it up to date."""

    def __init__(self, *, router: Observed, epoch: Epoch, dialer: Dialer, clock: Clock) -> None:
        assert router.endpoint is not None, "a router is contacted once it listens"
        self.router = router
        self.status: RouterStatus | None = None
        """Last heartbeat, None before the first."""
        self._epoch = epoch
        self._endpoint = router.endpoint
        self._dialer = dialer
        self._clock = clock
        self._link: Link | None = None
        self._heard_s = clock.now()
        self._workers = WorkerSet(workers=())
        self._reports: dict[int, AuditReport | None] = {}
        """By number of the audits under way; None until the answer."""

    def silent_s(self) -> float:
        """Seconds since the last heartbeat (or since the contact began)."""
        return self._clock.now() - self._heard_s

    def is_heard(self) -> bool:
        """Whether the last heartbeat is recent enough to be believed."""
        return self.status is not None and self.silent_s() < HEARTBEAT_TIMEOUT_S

    def tell(self, workers: WorkerSet) -> None:
        """Make these the router's workers: now if the link is open, else when it opens. Each set is sent once."""
        if workers == self._workers:
            return
        self._workers = workers
        if self._link is not None:
            self._send(self._link, [workers])

    async def audit(self, number: int) -> AuditReport | None:
        """What the router and its workers found when they checked themselves; None when it does not answer."""
        if self._link is None:
            return None
        self._reports[number] = None
        deadline_s = self._clock.now() + AUDIT_WAIT_S
        try:
            self._send(self._link, [Audit(number=number)])
            while self._reports[number] is None and self._clock.now() < deadline_s:
                await self._clock.sleep(AUDIT_POLL_S)
        finally:
            report = self._reports.pop(number)
        return report

    async def run(self) -> None:
        """Keep the link until cancelled."""
        while True:
            try:
                link = await self._dialer.dial(self._endpoint, DIAL_TIMEOUT_S)
            except LinkClosedError:
                await self._clock.sleep(REDIAL_S)
                continue
            try:
                await self._serve(link)
            except LinkClosedError:
                await self._clock.sleep(REDIAL_S)
            finally:
                self._link = None
                await link.close("the controller gives up the link")

    async def _serve(self, link: Link) -> None:
        hello = Hello(
            sender=CONTROLLER,
            epoch=self._epoch,
            protocol_min=PROTOCOL_VERSION_MIN,
            protocol_max=PROTOCOL_VERSION_MAX,
        )
        self._send(link, [hello, self._workers])
        self._link = link
        while True:
            for message in await link.receive():
                if isinstance(message, AuditReport):
                    if message.number in self._reports:  # one that comes too late is nobody's
                        self._reports[message.number] = message
                elif isinstance(message, RouterStatus):
                    self.status = message
                    self._heard_s = self._clock.now()

    def _send(self, link: Link, messages: list[Hello | WorkerSet | Audit]) -> None:
        try:
            link.send([*messages])
        except (LinkClosedError, LinkOverflowError):
            return  # the next receive says so too, and the link is dialled again with the newest set
