"""Hosts one router on whatever loop, clock and links there are: its service from its spec, and the controller's link.

The same for a router in a process of its own and for the in-process runtime. Knows nothing about HTTP, sockets or Ray.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from cluster.runtime import RouterSpec
from core.clock import Clock
from core.errors import LinkClosedError, LinkOverflowError
from core.ids import Epoch
from core.layout import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN
from core.link import Dialer, Link
from core.messages import HEARTBEAT_S, Audit, Drain, Hello, Reject, WorkerSet
from router.actions import StallLimits
from router.service import CHECK_S, RouterService
from router.text import TextCodec

HELLO_TIMEOUT_S = 5.0
Facts = Callable[[], dict[str, int]]


def build_service(
    spec: RouterSpec,
    *,
    clock: Clock,
    dialer: Dialer,
    text: TextCodec,
    url: str = "",
    pid: int | None = None,
    facts: Facts = dict,
    check_s: float = CHECK_S,
) -> RouterService:
    """The router that a spec asks for, not yet started."""
    config = spec.config
    return RouterService(
        router_id=spec.id,
        epoch=spec.epoch,
        clock=clock,
        dialer=dialer,
        text=text,
        model_name=Path(config.model.path).name,
        mode=config.mode,
        max_requests=config.router.max_requests,
        max_running_sequences=config.router.max_running_sequences,
        max_queued_prompt_tokens=config.router.max_queued_prompt_tokens,
        request_timeout_s=config.router.request_timeout_s,
        stall=StallLimits(prompt_s=config.router.prompt_stall_s, stream_s=config.router.stream_stall_s),
        url=url,
        pid=pid,
        facts=facts,
        check_s=check_s,
    )


class ControllerDoorway:
    """Serves the controller's link: workers and drain in, heartbeats out. A newer link replaces an older one."""

    def __init__(self, service: RouterService, clock: Clock) -> None:
        self._service = service
        self._clock = clock
        self._epoch = Epoch(0)
        self._link: Link | None = None
        self._audits: set[asyncio.Task[None]] = set()

    async def accept(self, link: Link) -> None:
        """A `core.link.Accept`."""
        try:
            first = await asyncio.wait_for(link.receive(), HELLO_TIMEOUT_S)
        except (TimeoutError, LinkClosedError):
            await link.close("no Hello came")
            return
        hello = first[0] if first else None
        problem = self._refuse(hello)
        if problem or not isinstance(hello, Hello):
            link.send([Reject(reason=problem)])
            return
        if self._link is not None:
            await self._link.close("replaced by a newer link of the controller")
        self._epoch, self._link = hello.epoch, link
        beat = asyncio.ensure_future(self._beat(link))
        try:
            messages = first[1:]
            while True:
                for message in messages:
                    if isinstance(message, WorkerSet):
                        self._service.update_workers(message)
                    elif isinstance(message, Drain):
                        self._service.drain()
                    elif isinstance(message, Audit):
                        self._audits.add(asyncio.ensure_future(self._audit(link, message)))
                messages = await link.receive()
        finally:
            beat.cancel()
            if self._link is link:
                self._link = None

    def _refuse(self, hello: object) -> str:
        """Why this first message opens no link; empty when it does."""
        if not isinstance(hello, Hello):
            return "the first message must be Hello"
        if hello.protocol_min > PROTOCOL_VERSION_MAX or hello.protocol_max < PROTOCOL_VERSION_MIN:
            spoken = f"{PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION_MAX}"
            return f"this router speaks protocol {spoken}, not {hello.protocol_min} to {hello.protocol_max}"
        if hello.epoch < self._epoch:
            return f"a controller of epoch {self._epoch} was here; epoch {hello.epoch} is old"
        return ""

    async def _audit(self, link: Link, message: Audit) -> None:
        """Answer on the link that asked, if it is still there."""
        try:
            link.send([await self._service.audit(message.number)])
        except (LinkClosedError, LinkOverflowError):
            return
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._audits.discard(task)

    async def _beat(self, link: Link) -> None:
        while True:
            try:
                link.send([self._service.status()])
            except (LinkClosedError, LinkOverflowError):
                return
            await self._clock.sleep(HEARTBEAT_S)
