"""The client of a pdcluster worker: dials it, greets it, watches its heartbeats and dials again when the link is lost.

Messages sent in one iteration of the event loop leave as one frame. Knows nothing about requests or selection.
"""

import asyncio
import logging

from core.clock import Clock
from core.errors import LinkClosedError, LinkOverflowError
from core.ids import Epoch, Role, RouterId, WorkerId
from core.layout import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN
from core.link import Dialer, Link
from core.messages import (
    HEARTBEAT_S,
    HEARTBEAT_TIMEOUT_S,
    Alive,
    AnyMessage,
    FromWorker,
    Hello,
    Reject,
    ToWorker,
    Welcome,
    WorkerAddress,
    WorkerStatus,
)
from router.select import WorkerLife
from router.workers.base import ClientState, WorkerListener

DIAL_TIMEOUT_S = 5.0
REDIAL_FIRST_S = 0.1
"""Before the first new try; doubles with each further one."""
REDIAL_MAX_S = 5.0

_log = logging.getLogger(__name__)


class NativeClient:
    """See `router.workers.base.WorkerClient`."""

    def __init__(
        self,
        *,
        address: WorkerAddress,
        router_id: RouterId,
        router_epoch: Epoch,
        clock: Clock,
        dialer: Dialer,
        listener: WorkerListener,
    ) -> None:
        self.address = address
        self.welcome: Welcome | None = None
        self.status: WorkerStatus | None = None
        self._hello = Hello(
            sender=router_id,
            epoch=router_epoch,
            protocol_min=PROTOCOL_VERSION_MIN,
            protocol_max=PROTOCOL_VERSION_MAX,
        )
        self._clock = clock
        self._dialer = dialer
        self._listener = listener
        self._link: Link | None = None
        self._outbox: list[AnyMessage] = []
        self.heard_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def worker(self) -> WorkerId:
        return self.address.worker

    @property
    def role(self) -> Role:
        return self.address.role

    @property
    def life(self) -> WorkerLife:
        return WorkerLife(worker=self.address.worker, epoch=self.address.epoch)

    @property
    def state(self) -> ClientState:
        if self._is_closed:
            return "closed"
        if self.welcome is None:
            return "connecting"
        return "draining" if self.status is not None and self.status.state == "draining" else "ready"

    def start(self) -> None:
        assert self._task is None, "a client is started once"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"client of {self.worker}")
        self._task.add_done_callback(self._report)

    def send(self, message: ToWorker) -> None:
        if self.welcome is None:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    async def close(self) -> None:
        self._is_closed = True
        if self._task is None or self._task is asyncio.current_task():
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @property
    def num_undelivered(self) -> int:
        return len(self._outbox) + (self._link.num_undelivered if self._link is not None else 0)

    def check(self) -> None:
        assert self.welcome is None or self._link is not None, f"TX-2: {self.worker} is welcome without a link"
        is_known = self.status is not None or bool(self._outbox)
        assert self.welcome is not None or not is_known, f"TX-2: {self.worker} is not there and messages wait for it"
        if self._link is not None:
            self._link.check()

    def _report(self, task: asyncio.Task[None]) -> None:
        """A client that ends by itself has a bug: say so, the worker counts as lost."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the client of worker %s ended", self.worker, exc_info=error)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if self._link is None or not messages:
            return
        try:
            self._link.send(messages)
        except (LinkClosedError, LinkOverflowError) as error:
            _log.warning("worker %s: %s", self.worker, error)  # the receiving side of the link reports the loss

    async def _run(self) -> None:
        delay_s = REDIAL_FIRST_S
        while not self._is_closed:
            try:
                link = await self._dialer.dial(self.address.endpoint, DIAL_TIMEOUT_S)
            except LinkClosedError as error:
                _log.info("worker %s: %s", self.worker, error)
            else:
                if await self._serve(link):
                    delay_s = REDIAL_FIRST_S
            await self._clock.sleep(delay_s)
            delay_s = min(2 * delay_s, REDIAL_MAX_S)

    async def _serve(self, link: Link) -> bool:
        """Use one link to its end. True if the worker welcomed us."""
        self._link = link
        self.heard_s = self._clock.now()
        watchdog = asyncio.get_running_loop().create_task(self._watch(link), name=f"watchdog of {self.worker}")
        reason = "the router gave it up"
        try:
            link.send([self._hello])
            while True:
                messages = await link.receive()
                self.heard_s = self._clock.now()
                for message in messages:
                    self._take(message)
        except (LinkClosedError, LinkOverflowError) as error:
            reason = str(error)
        finally:
            watchdog.cancel()
            was_welcome = self.welcome is not None
            self._go_down(reason)
            await link.close(reason)
        return was_welcome

    def _take(self, message: AnyMessage) -> None:
        if self.welcome is None:
            if isinstance(message, Reject):
                raise LinkClosedError(peer=self.worker, reason=f"it rejects this router: {message.reason}")
            self._greet(message)
            return
        if isinstance(message, WorkerStatus):
            self.status = message
        if isinstance(message, FromWorker):
            self._listener.worker_message(self, message)
        else:
            raise LinkClosedError(peer=self.worker, reason=f"it sent a {type(message).__name__}")

    def _greet(self, message: AnyMessage) -> None:
        """Take a Welcome. A process other than the one expected is not talked to."""
        address = self.address
        if not isinstance(message, Welcome):
            raise LinkClosedError(peer=self.worker, reason=f"it greeted with a {type(message).__name__}")
        found, wanted = (message.worker, message.role, message.epoch), (address.worker, address.role, address.epoch)
        if found != wanted:
            raise LinkClosedError(peer=self.worker, reason=f"{address.endpoint} is {found}, expected {wanted}")
        self.welcome = message
        self._listener.worker_up(self)

    def _go_down(self, reason: str) -> None:
        was_up = self.welcome is not None
        self._link, self._outbox = None, []
        self.welcome = self.status = None
        if was_up:
            level = logging.INFO if self._is_closed else logging.WARNING
            _log.log(level, "worker %s (epoch %d): lost: %s", self.worker, self.life.epoch, reason)
            self._listener.worker_down(self, reason)

    async def _watch(self, link: Link) -> None:
        """Send heartbeats, and cut the link when nothing was heard for HEARTBEAT_TIMEOUT_S."""
        while self._clock.now() - self.heard_s < HEARTBEAT_TIMEOUT_S:
            self.send(Alive())
            await self._clock.sleep(HEARTBEAT_S)
        await link.close(f"silent for {HEARTBEAT_TIMEOUT_S:g} s")
