"""One router in a process of its own: the HTTP server, the link to the controller, and one asyncio loop for both.

Where the HTTP server, the service and the link meet. Several routers may share a port; the kernel then spreads
connections over them. Knows nothing about Ray; imports no torch.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvicorn

from cluster.runtime import RouterSpec
from core.clock import Clock, SystemClock
from core.config import RouterSection
from core.errors import ClusterError, LinkClosedError
from core.ids import Epoch
from core.layout import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN
from core.link import Link
from core.link_grpc import GrpcDialer, GrpcServer
from core.messages import HEARTBEAT_S, Drain, Hello, Reject, WorkerSet
from router.app import build_app
from router.service import RouterService
from router.text import TextProcessor

HELLO_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
HTTP_CLOSE_TIMEOUT_S = 3
"""How long open connections may take to end when the router stops."""
HTTP_BACKLOG = 2048
POLL_S = 0.02


class ControllerDoorway:
    """Serves the controller's link: workers and drain in, heartbeats out. A newer link replaces an older one."""

    def __init__(self, service: RouterService, clock: Clock) -> None:
        self._service = service
        self._clock = clock
        self._epoch = Epoch(0)
        self._link: Link | None = None

    async def accept(self, link: Link) -> None:
        """A `core.link.Accept`."""
        first = await asyncio.wait_for(link.receive(), HELLO_TIMEOUT_S)
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

    async def _beat(self, link: Link) -> None:
        while True:
            try:
                link.send([self._service.status()])
            except LinkClosedError:
                return
            await self._clock.sleep(HEARTBEAT_S)


class RunningRouter:
    """A router that listens. `stop` ends it in order; `wait` returns when it has ended, by whatever cause."""

    def __init__(self, spec: RouterSpec) -> None:
        self.pid = os.getpid()
        self.url = ""
        """Base URL of the API."""
        self.endpoint = ""
        """host:port of the link server."""
        self.failure: BaseException | None = None
        self._spec = spec
        self._ended = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="router", daemon=True)
        self._thread.start()
        try:
            self._call(self._start(), START_TIMEOUT_S)
        except BaseException:
            self._end_loop()
            raise

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when the router has ended."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """End requests with an error, close links and connections, end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._stop(), STOP_TIMEOUT_S)
        self._end_loop()

    async def _start(self) -> None:
        spec, config = self._spec, self._spec.config
        text = TextProcessor(spec.model_path)
        listener = listen(config.name, config.router)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        clock = SystemClock()
        self._service = RouterService(
            router_id=spec.id,
            epoch=spec.epoch,
            clock=clock,
            dialer=GrpcDialer(),
            text=text,
            model_name=Path(config.model.path).name,
            mode=config.mode,
            max_requests=config.router.max_requests,
            max_queued_prompt_tokens=config.router.max_queued_prompt_tokens,
            request_timeout_s=config.router.request_timeout_s,
            url=self.url,
        )
        self._links = GrpcServer(ControllerDoorway(self._service, clock).accept)
        try:
            self.endpoint = await self._links.start(config.ray.node_ip_address)
        except OSError as error:
            listener.close()
            raise ClusterError(name=config.name, problem=str(error)) from error
        await self._service.start()
        self._http = uvicorn.Server(
            uvicorn.Config(
                build_app(self._service),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                backlog=HTTP_BACKLOG,
                timeout_graceful_shutdown=HTTP_CLOSE_TIMEOUT_S,
            )
        )
        self._serving = asyncio.ensure_future(self._http.serve(sockets=[listener]))
        self._serving.add_done_callback(self._http_ended)
        while not self._http.started and not self._serving.done():
            await asyncio.sleep(POLL_S)

    async def _stop(self) -> None:
        await self._service.close()
        await self._links.close()
        self._http.should_exit = True
        await asyncio.wait({self._serving}, timeout=STOP_TIMEOUT_S / 2)

    def _http_ended(self, serving: "asyncio.Future[None]") -> None:
        self.failure = None if serving.cancelled() else serving.exception()
        self._ended.set()

    def _call(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._ended.set()


def run_router(spec: RouterSpec) -> RunningRouter:
    """Start a router and return when it listens. Raises ClusterError (port taken) or ModelLoadError (tokenizer)."""
    return RunningRouter(spec)


def listen(cluster_name: str, section: RouterSection) -> socket.socket:
    """A listening-to-be socket at the router's host and port. Raises ClusterError when the port cannot be had.

    Only routers that share a port by configuration set SO_REUSEPORT, so that two clusters never share one by accident.
    """
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if section.processes > 1:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((section.host, section.port))
    except OSError as error:
        listener.close()
        problem = f"the router cannot listen on {section.host}:{section.port}: {error.strerror}"
        raise ClusterError(name=cluster_name, problem=problem) from error
    return listener
