"""What runs inside the actor processes: a host for one worker or router, and a host for the controller.

Plain classes. Their methods answer at once, from any thread; the work is on threads of their own, and a process whose
work ended by itself ends too, so that its death is what others observe. Knows nothing about Ray.
"""

import asyncio
import faulthandler
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from cluster.controller import Controller
from cluster.runtime import RouterSpec, WorkerSpec
from core.config import ClusterConfig
from core.errors import PdclusterError
from core.ids import Epoch, RouterId, WorkerId

EXIT_ENDED = 70
STOP_TIMEOUT_S = 60.0
AUDIT_TIMEOUT_S = 15.0
"""Longer than the controller waits for its routers."""
LOGGERS = ("pdcluster", "router")
"""Names that the product's own loggers begin with."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger("pdcluster.actor")


class Running(Protocol):
    """A worker or router that listens."""

    endpoint: str
    pid: int

    def wait(self) -> object:
        """Return when it has ended, by whatever cause."""
        ...

    def stop(self) -> None:
        """End it. Idempotent."""
        ...


class MemberHost:
    """Starts one worker or router on a thread and says how far it is."""

    def __init__(self, name: str, start: Callable[[], Running], log_dir: Path) -> None:
        self._start = start
        self._running: Running | None = None
        self._problem = ""
        self._is_stopping = False
        self._lock = threading.Lock()
        self._log = open_log(log_dir, name)
        threading.Thread(target=self._run, name="member", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """pid, endpoint and url (None until it listens; url: routers only), problem (why it could not start)."""
        running = self._running
        return {
            "pid": os.getpid(),
            "endpoint": running.endpoint if running else None,
            "url": getattr(running, "url", None),
            "problem": self._problem,
        }

    def stop(self) -> None:
        """End the member in order; the process may be killed afterwards."""
        with self._lock:
            self._is_stopping = True
        if self._running is not None:
            self._running.stop()

    def _run(self) -> None:
        try:
            running = self._start()
        except PdclusterError as error:
            logger.error("%s", error)
            self._problem = str(error)
            return
        except Exception as error:  # outermost loop of this process: the controller learns of it and ends the process
            logger.exception("could not start")
            self._problem = f"{type(error).__name__}: {error}"
            return
        with self._lock:
            self._running = running
            is_late = self._is_stopping
        if is_late:
            running.stop()
            return
        running.wait()
        with self._lock:
            if self._is_stopping:
                return
        failure = getattr(running, "failure", None)
        logger.critical("ended by itself", exc_info=failure)
        self._log.flush()
        os._exit(EXIT_ENDED)


class WorkerActor(MemberHost):
    """A worker's process, started from what `pack` made."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values["id"], lambda: _run_worker(values), Path(values["log_dir"]))


class RouterActor(MemberHost):
    """A router's process, started from what `pack` made."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values["id"], lambda: _run_router(values), Path(values["log_dir"]))


def pack(spec: WorkerSpec | RouterSpec, log_dir: Path) -> dict[str, Any]:
    """A spec as plain values, the configuration as JSON."""
    values: dict[str, Any] = {"id": spec.id, "role": spec.role, "epoch": int(spec.epoch)}
    values |= {"config": spec.config.model_dump_json(), "model_path": str(spec.model_path), "log_dir": str(log_dir)}
    if isinstance(spec, WorkerSpec):
        values |= {"cpus": spec.cpus, "gpus": spec.gpus}
    return values


def _run_worker(values: Mapping[str, Any]) -> Running:
    from cluster.worker_process import run_worker  # torch and the transport, in worker processes only

    return run_worker(
        WorkerSpec(
            id=WorkerId(values["id"]),
            role=values["role"],
            epoch=Epoch(values["epoch"]),
            config=ClusterConfig.model_validate_json(values["config"]),
            model_path=Path(values["model_path"]),
            cpus=values["cpus"],
            gpus=values["gpus"],
        )
    )


def _run_router(values: Mapping[str, Any]) -> Running:
    from cluster.router_process import run_router  # the HTTP stack, in router processes only

    return run_router(
        RouterSpec(
            id=RouterId(values["id"]),
            epoch=Epoch(values["epoch"]),
            config=ClusterConfig.model_validate_json(values["config"]),
            model_path=Path(values["model_path"]),
        )
    )


class ControllerHost:
    """Runs the control loop on a thread with its own asyncio loop."""

    def __init__(self, build: Callable[[], Controller], log_dir: Path) -> None:
        self._log = open_log(log_dir, "controller")
        self._loop = asyncio.new_event_loop()
        self._controller = build()
        self._is_stopping = False
        threading.Thread(target=self._run, name="controller", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """What the controller published last."""
        return self._controller.status()

    def audit(self) -> dict[str, Any]:
        """See `Controller.audit`."""
        return asyncio.run_coroutine_threadsafe(self._controller.audit(), self._loop).result(AUDIT_TIMEOUT_S)

    def shutdown(self) -> None:
        """End every member. Returns when they have ended; raises ClusterError or TimeoutError otherwise."""
        self._is_stopping = True
        asyncio.run_coroutine_threadsafe(self._controller.shutdown(), self._loop).result(STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._controller.run())
        except Exception:  # the outermost loop of this process: a new one starts from the record
            logger.exception("the control loop failed")
            self._log.flush()
            os._exit(EXIT_ENDED)
        assert self._is_stopping, "the loop ends only on shutdown"
        self._loop.run_forever()


def open_log(log_dir: Path, name: str) -> IO[str]:
    """Log to `log_dir/name.log`, appended, and put the stacks of a fatal signal there too: what the product says from
    INFO on, and the warnings and errors of everybody (libraries, asyncio's lost exceptions).
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log_dir / f"{name}.log")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.partition(".")[0] in LOGGERS)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    stream = handler.stream
    assert stream is not None, "the file was opened at once"
    faulthandler.enable(stream)
    return stream
