"""One router in a process of its own: the HTTP server, the link to the controller, and one asyncio loop for both.

Where the HTTP server, the service and the link meet. Several routers may share a port; the kernel then spreads
connections over them. Knows nothing about Ray; imports no torch.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Coroutine
from typing import Any

from cluster.router_host import ControllerDoorway, build_service
from cluster.runtime import RouterSpec
from core.clock import SystemClock
from core.config import RouterSection
from core.errors import ClusterError
from core.link_grpc import GrpcDialer, GrpcServer
from core.process import process_facts
from router.app import build_app
from router.connections import build_server
from router.text import TextProcessor

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02


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
        self._service = build_service(
            spec, clock=clock, dialer=GrpcDialer(), text=text, url=self.url, facts=process_facts
        )
        self._service.on_failure = self._fail
        self._links = GrpcServer(ControllerDoorway(self._service, clock).accept)
        try:
            self.endpoint = await self._links.start(config.ray.node_ip_address)
        except OSError as error:
            listener.close()
            raise ClusterError(name=config.name, problem=str(error)) from error
        await self._service.start()
        self._http = build_server(build_app(self._service), max_connections=config.router.max_connections)
        self._serving = asyncio.ensure_future(self._http.serve(sockets=[listener]))
        self._serving.add_done_callback(self._http_ended)
        while not self._http.started and not self._serving.done():
            await asyncio.sleep(POLL_S)

    async def _stop(self) -> None:
        await self._service.close()
        await self._links.close()
        self._http.should_exit = True
        await asyncio.wait({self._serving}, timeout=STOP_TIMEOUT_S / 2)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._ended.set()

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
