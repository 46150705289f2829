"""One worker in a process of its own: model on the step thread, NIXL on the transfer thread, links on the loop thread.

The only place where torch, the transport and the link meet. Knows nothing about Ray; imports no HTTP.
"""

import asyncio
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from cluster.assembly import ServedModel, WorkerIdentity, build_handshake, build_worker, run_dtype, served_model
from cluster.runtime import WorkerSpec
from cluster.worker_host import STOP_TIMEOUT_S, Doorway, Inbox, ThreadedHost, welcome_of
from core.clock import SystemClock
from core.errors import ClusterError
from core.link_grpc import GrpcServer
from core.process import give_way, process_facts
from core.worker import Worker
from engine.factory import load_runner
from engine.model.directory import read_config
from engine.runner import TorchRunner
from kvtransfer.integrity import BlockDigester, Digester
from kvtransfer.integrity_torch import TorchBlockDigester
from kvtransfer.puller_thread import ThreadedPuller
from kvtransfer.transport.base import Peer, Region
from kvtransfer.transport.nixl import NixlTransport

START_TIMEOUT_S = 30.0
SWITCH_INTERVAL_S = 0.0005
"""How soon the other threads get the interpreter back from the step thread; Python's default is ten times that."""


class RunningWorker:
    """A worker that listens. `stop` ends it in order; `wait` returns when it has ended, by whatever cause."""

    def __init__(
        self, worker: Worker, model: ServedModel, inbox: Inbox, host: str, executor: ThreadPoolExecutor
    ) -> None:
        self.pid = os.getpid()
        self.endpoint = ""
        self.failure: BaseException | None = None
        clock = SystemClock()
        welcome = welcome_of(worker, pid=self.pid, model_name=model.name, max_model_len=model.max_model_len)
        self._doorway = Doorway(welcome=welcome, status=worker.status(), inbox=inbox, clock=clock, facts=process_facts)
        self._host = ThreadedHost(worker, self._doorway, inbox, clock, executor)
        self._loop = asyncio.new_event_loop()
        self._server = GrpcServer(self._doorway.accept)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="links", daemon=True)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._server.start(host), self._loop)
        self.endpoint = started.result(START_TIMEOUT_S)
        beating = asyncio.run_coroutine_threadsafe(self._doorway.beat(), self._loop)
        beating.add_done_callback(self._beat_ended)
        self._host.start(self._loop, self._fail)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _beat_ended(self, beating: "Future[None]") -> None:
        """Heartbeats go on until the loop stops; without them nobody believes this worker any more."""
        if not beating.cancelled() and (error := beating.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when the worker has ended."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """Stop stepping, close the links, end the threads. Idempotent."""
        if self._loop.is_closed():
            return
        self._host.stop()
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._ended.set()


def run_worker(spec: WorkerSpec) -> RunningWorker:
    """Load the model, build the worker and listen on the node's address. Raises ModelLoadError or ClusterError."""
    config = spec.config
    if config.transfer.transport != "nixl":
        problem = f"transfer.transport is {config.transfer.transport}, which works inside one process only; use nixl"
        raise ClusterError(name=config.name, problem=problem)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    model = served_model(config, spec.model_path)
    # The model is loaded and warmed up on the thread that will step it: OpenMP keeps a pool of threads per calling
    # thread, and with more threads than CPUs each parallel region ends in a sleep instead of a short spin.
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
    runner = executor.submit(_load_runner, spec, model).result()
    cache = runner.cache
    identity = WorkerIdentity(worker_id=spec.id, role=spec.role, epoch=spec.epoch)
    region = Region(
        address=cache.address,
        block_bytes=cache.block_bytes,
        num_blocks=runner.num_blocks,
        device=str(cache.tensor.device),
        view=cache.byte_view(),
    )
    transport = NixlTransport(Peer(worker=spec.id, epoch=spec.epoch), region)
    digester: Digester = (
        BlockDigester(region.view, region.block_bytes)
        if region.view is not None
        else TorchBlockDigester(cache.tensor, region.block_bytes)
    )
    handshake = build_handshake(
        config,
        model,
        num_blocks=runner.num_blocks,
        transport=transport.name,
        transport_metadata=transport.metadata(),
    )
    inbox = Inbox()
    transfer = ThreadedPuller(transport, digester, clock=SystemClock(), on_result=inbox.ring)
    worker = build_worker(
        identity, config, model, runner=runner, handshake=handshake, digester=digester, transfer=transfer
    )
    return RunningWorker(worker, model, inbox, config.ray.node_ip_address, executor)


def _load_runner(spec: WorkerSpec, model: ServedModel) -> TorchRunner:
    config = spec.config
    wants_cuda = config.model.device == "cuda" or (config.model.device == "auto" and spec.gpus > 0)
    if not wants_cuda:  # a GPU waits for this thread; a CPU is taken by it
        give_way()
    return load_runner(
        spec.model_path,
        dtype=run_dtype(config, read_config(spec.model_path)),
        device="cuda" if wants_cuda else "cpu",
        block_size=config.kv.block_size,
        num_blocks=config.kv.num_blocks(model.layout.block_bytes()),
        max_model_len=model.max_model_len,
        numerics=config.numerics,
        threads=spec.cpus,
    )
