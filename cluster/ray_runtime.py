"""Workers, routers and controller as detached Ray actors; a whole cluster's start, status and end. The only Ray user.

    namespace pdcluster-<name>    controller            restarted by Ray, adopts what runs (CL-2)
                                  prefill-0:1 ...       id:epoch, restarted by the controller only, in the next epoch
    placement group, same name    one bundle per worker: CPUs, GPUs, and `pdcluster_prefill` or `pdcluster_decode`
    where the Ray cluster defines these resources (a head that we start does)

Routers and the controller take no CPUs and stay on the node that `start_cluster` was called on. Actors import the
installed packages. No Ray call is made while a request is served.
"""

import asyncio
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.actors import AUDIT_TIMEOUT_S, ControllerHost, RouterActor, WorkerActor, pack
from cluster.controller import CONTROLLER_FILE, Controller, RecordFile
from cluster.ray_head import DECODE_RESOURCE, PREFILL_RESOURCE, end_head, start_head
from cluster.reconcile import MemberId, Target, wanted_workers
from cluster.runtime import MemberRole, Observed, RouterSpec, WorkerSpec
from cluster.state import ProcessRef, is_alive
from core.clock import SystemClock
from core.config import ClusterConfig
from core.errors import ClusterError
from core.ids import Epoch, WorkerId
from core.link_grpc import GrpcDialer
from kvtransfer.tiers.files import OsFiles

CONTROLLER_NAME = "controller"
PLACEMENT_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 10.0
CONTROLLER_START_TIMEOUT_S = 60.0
DESCRIBE_TIMEOUT_S = 1.0
ANSWERED_S = 0.01
STOP_TIMEOUT_S = 12.0
SHUTDOWN_TIMEOUT_S = 75.0
READY_POLL_S = 0.25
ACTOR_CALLS_MAX = 8
"""Calls that one actor answers at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHandle:
    """A started cluster, as values: enough to find it again from another process."""

    name: str
    ray_address: str
    """host:port of Ray's head."""
    namespace: str
    controller: str
    """Name of the controller's actor."""
    started: tuple[ProcessRef, ...]
    """Processes of the head that we started; empty when Ray was running already."""


class ControllerActor(ControllerHost):
    """The controller's process."""

    def __init__(self, name: str, config_json: str, model_path: str, directory: str, log_dir: str) -> None:
        target = Target(config=ClusterConfig.model_validate_json(config_json), model_path=Path(model_path))

        def build() -> Controller:
            return Controller(
                target=target,
                runtime=RayRuntime(name, target.config, Path(log_dir)),
                clock=SystemClock(),
                dialer=GrpcDialer(),
                record=RecordFile(OsFiles(Path(directory)), Path(directory, CONTROLLER_FILE), target.config.name),
            )

        super().__init__(build, Path(log_dir))


# ---- the runtime -----------------------------------------------------------------------------------------------------


class RayRuntime:
    """A `cluster.runtime.Runtime` over Ray actors. Lives in the controller's process."""

    def __init__(self, namespace: str, config: ClusterConfig, log_dir: Path) -> None:
        self._namespace = namespace
        self._config = config
        self._log_dir = log_dir
        self._handles: dict[str, Any] = {}
        self._known: dict[str, dict[str, Any]] = {}
        self._calls: dict[str, Any] = {}
        self._observing: asyncio.Future[list[Observed]] | None = None

    async def start_worker(self, spec: WorkerSpec) -> None:
        await asyncio.to_thread(self._start_worker, spec)

    async def start_router(self, spec: RouterSpec) -> None:
        options = {"num_cpus": 0, "scheduling_strategy": _this_node()}
        await asyncio.to_thread(self._start, RouterActor, spec, options, 1)

    async def observe(self) -> list[Observed]:
        if self._observing is None or self._observing.done():
            self._observing = asyncio.ensure_future(asyncio.to_thread(self._observe))
        return await asyncio.shield(self._observing)

    async def stop(self, member_id: MemberId, epoch: Epoch) -> None:
        await asyncio.to_thread(self._stop, f"{member_id}:{epoch}")

    def _start_worker(self, spec: WorkerSpec) -> None:
        index = list(wanted_workers(self._config)).index(spec.id)
        group = self._call(lambda: ray.util.get_placement_group(self._namespace))
        options = {
            "num_cpus": spec.cpus,
            "num_gpus": spec.gpus,
            "resources": {n: v for n, v in group.bundle_specs[index].items() if n not in ("CPU", "GPU")},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }
        self._start(WorkerActor, spec, options, spec.cpus)

    def _start(self, kind: type, spec: WorkerSpec | RouterSpec, options: dict[str, Any], threads: int) -> None:
        actor: Any = ray.remote(kind).options(
            name=f"{spec.id}:{spec.epoch}",
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_concurrency=ACTOR_CALLS_MAX,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
            **options,
        )
        self._handles[f"{spec.id}:{spec.epoch}"] = self._call(lambda: actor.remote(pack(spec, self._log_dir)))

    def _observe(self) -> list[Observed]:
        for name in self._call(lambda: _list_actors(self._namespace)):
            if name != CONTROLLER_NAME and name not in self._handles:
                handle = self._call(partial(_find_actor, name, self._namespace))
                if handle is not None:
                    self._handles[name] = handle
        for name, handle in self._handles.items():
            if name not in self._calls:
                self._calls[name] = handle.describe.remote()
        calls = list(self._calls.values())
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=DESCRIBE_TIMEOUT_S)
        return [self._describe(name) for name in list(self._calls)]

    def _describe(self, name: str) -> Observed:
        """One member. Who does not answer in time is as it was last seen: a busy process is not a dead one."""
        member_id, _, epoch = name.rpartition(":")
        known, problem = self._known.get(name, {}), ""
        try:
            known = self._known[name] = ray.get(self._calls[name], timeout=ANSWERED_S)
            del self._calls[name]
            problem = known["problem"]
        except GetTimeoutError:
            pass  # the same call is looked at again next time
        except RayActorError as error:
            problem = _explain_death(error)
        if problem:
            ray.kill(self._forget(name), no_restart=True)
        return Observed(
            id=WorkerId(member_id),
            role=_role_of(member_id),
            epoch=Epoch(int(epoch)),
            alive=not problem,
            endpoint=known.get("endpoint"),
            pid=known.get("pid"),
            url=known.get("url"),
            problem=problem or None,
        )

    def _stop(self, name: str) -> None:
        handle = self._forget(name) or self._call(lambda: _find_actor(name, self._namespace))
        if handle is not None:
            self._call(lambda: ray.wait([handle.stop.remote()], timeout=STOP_TIMEOUT_S))
            ray.kill(handle, no_restart=True)

    def _forget(self, name: str) -> Any:
        self._known.pop(name, None)
        self._calls.pop(name, None)
        return self._handles.pop(name, None)

    def _call(self, call: Callable[[], Any]) -> Any:
        """A Ray call whose failure is an operating error."""
        try:
            return call()
        except (RayError, ValueError, ConnectionError) as error:
            raise ClusterError(name=self._config.name, problem=f"Ray: {error}") from error


def _role_of(member_id: str) -> MemberRole:
    kind = member_id.rpartition("-")[0]
    return next((role for role in ("prefill", "decode") if role == kind), "router")


def _explain_death(error: RayActorError) -> str:
    """Why an actor's process is gone, in one sentence."""
    detail = re.search(r"Worker exit detail: ([^.]*)", str(error))
    return f"its process ended ({detail.group(1)})" if detail else "its process ended"


def _this_node() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)


def _list_actors(namespace: str) -> list[str]:
    """Names of the live actors of a namespace."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in listed if one["namespace"] == namespace]


def _find_actor(name: str, namespace: str) -> Any:
    """The live actor of that name, or None."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


# ---- a whole cluster -------------------------------------------------------------------------------------------------


def start_cluster(
    config: ClusterConfig, model_path: Path, directory: Path, report: Callable[[str], None]
) -> ClusterHandle:
    """Start Ray if needed, reserve room for the workers, start the controller, which starts all else. Returns soon.

    `directory` keeps the controller's record and, in `logs`, the actors' logs. A ClusterError leaves nothing running.
    """
    namespace = f"pdcluster-{config.name}"
    head = start_head(config, report) if config.ray.address is None else None
    handle = ClusterHandle(
        name=config.name,
        ray_address=head.address if head else str(config.ray.address),
        namespace=namespace,
        controller=CONTROLLER_NAME,
        started=head.started if head else (),
    )
    try:
        _connect(handle)
        is_other = _find_actor(CONTROLLER_NAME, namespace) is not None
    except BaseException:
        end_head(handle.started, report)
        raise
    if is_other:
        ray.shutdown()
        raise ClusterError(name=config.name, problem=f"is running already in the Ray cluster at {handle.ray_address}")
    try:
        _place(config, namespace)
        (directory / CONTROLLER_FILE).unlink(missing_ok=True)
        log_dir = directory / "logs"
        actor = ray.remote(ControllerActor).options(
            name=CONTROLLER_NAME, namespace=namespace, lifetime="detached", max_restarts=-1, num_cpus=0,
            max_concurrency=ACTOR_CALLS_MAX, scheduling_strategy=_this_node(),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
        )  # fmt: skip
        report("starting the controller")
        actor.remote(namespace, config.model_dump_json(), str(model_path), str(directory), str(log_dir))
        _ask(handle, "status", CONTROLLER_START_TIMEOUT_S)
    except BaseException:
        stop_cluster(handle, report)
        raise
    return handle


def cluster_status(handle: ClusterHandle) -> dict[str, Any]:
    """See `Controller.status`. Raises ClusterError when the controller does not answer."""
    return _ask(handle, "status", CALL_TIMEOUT_S)


def cluster_audit(handle: ClusterHandle) -> dict[str, Any]:
    """See `Controller.audit`. Raises ClusterError when the controller does not answer."""
    return _ask(handle, "audit", AUDIT_TIMEOUT_S)


def wait_ready(handle: ClusterHandle, timeout_s: float, report: Callable[[str], None]) -> dict[str, Any]:
    """The status once every member listens. Raises ClusterError when the cluster failed or time is up."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        status = cluster_status(handle)
        if status["state"] == "ready":
            return status
        if status["state"] == "failed":
            raise ClusterError(name=handle.name, problem=status["reason"])
        if time.monotonic() >= deadline_s:
            problem = f"was not ready within {timeout_s:.0f} s ({status['reason'] or status['state']})"
            raise ClusterError(name=handle.name, problem=problem)
        time.sleep(READY_POLL_S)


def stop_cluster(handle: ClusterHandle, report: Callable[[str], None]) -> None:
    """End every process of the cluster, and the Ray head if we started it. Idempotent."""
    if handle.started and not any(is_alive(process) for process in handle.started):
        return
    try:
        _connect(handle)
        _end_actors(handle, report)
    except (ClusterError, RayError) as error:
        if not handle.started:
            raise
        report(f"ending the Ray head at once: {error}")
    finally:
        ray.shutdown()
        end_head(handle.started, report)


def _end_actors(handle: ClusterHandle, report: Callable[[str], None]) -> None:
    controller = _find_actor(handle.controller, handle.namespace)
    if controller is not None:
        try:
            _ask(handle, "shutdown", SHUTDOWN_TIMEOUT_S)
        except ClusterError as error:
            report(str(error))
        ray.kill(controller, no_restart=True)
    deadline_s = time.monotonic() + CALL_TIMEOUT_S
    while names := _list_actors(handle.namespace):
        for name in names:
            if (actor := _find_actor(name, handle.namespace)) is not None:
                ray.kill(actor, no_restart=True)
        if time.monotonic() >= deadline_s:
            report(f"actors that did not end: {', '.join(names)}")
            break
        time.sleep(READY_POLL_S)
    group = ray.util.placement_group_table().values()
    if any(one["name"] == handle.namespace and one["state"] != "REMOVED" for one in group):
        remove_placement_group(ray.util.get_placement_group(handle.namespace))


def _connect(handle: ClusterHandle) -> None:
    """Make this process a driver of the handle's Ray cluster, once."""
    if ray.is_initialized() and ray.get_runtime_context().gcs_address == handle.ray_address:
        return
    ray.shutdown()
    is_main = threading.current_thread() is threading.main_thread()
    on_term = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if handle.started:
        options["_node_ip_address"] = handle.ray_address.rpartition(":")[0]
    try:
        _probe(handle.ray_address)
        ray.init(address=handle.ray_address, namespace=handle.namespace, **options)
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        problem = f"the Ray cluster at {handle.ray_address} cannot be reached: {error}"
        raise ClusterError(name=handle.name, problem=problem) from error
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, on_term)  # Ray replaces the handler of whoever connects


def _probe(address: str) -> None:
    """Raise OSError when nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _place(config: ClusterConfig, namespace: str) -> None:
    """Reserve one bundle per worker. Raises ClusterError naming what is wanted and what is there."""
    defined = cast("dict[str, float]", ray.cluster_resources())  # type: ignore[no-untyped-call]
    bundles = []
    for role in wanted_workers(config).values():
        section, resource = (
            (config.prefill, PREFILL_RESOURCE) if role == "prefill" else (config.decode, DECODE_RESOURCE)
        )
        wanted = {"CPU": float(section.cpus), "GPU": section.gpus, resource: float(resource in defined)}
        bundles.append({name: number for name, number in wanted.items() if number})
    for name in {name for bundle in bundles for name in bundle}:
        needed = sum(bundle.get(name, 0.0) for bundle in bundles)
        if needed > defined.get(name, 0.0):
            problem = f"its workers need {needed:g} {name}, the Ray cluster has {defined.get(name, 0.0):g}"
            raise ClusterError(name=config.name, problem=problem)
    group = placement_group(bundles, strategy="PACK", name=namespace, lifetime="detached")
    if not group.wait(PLACEMENT_TIMEOUT_S):
        free = cast("dict[str, float]", ray.available_resources())  # type: ignore[no-untyped-call]
        there = f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU are free"
        problem = f"the Ray cluster has no room now for workers that need {bundles}; {there}"
        raise ClusterError(name=config.name, problem=problem)


def _ask(handle: ClusterHandle, method: str, timeout_s: float) -> dict[str, Any]:
    """Call a method of the controller."""
    _connect(handle)
    controller = _find_actor(handle.controller, handle.namespace)
    if controller is None:
        raise ClusterError(name=handle.name, problem=f"has no controller in the Ray cluster at {handle.ray_address}")
    try:
        return cast(dict[str, Any], ray.get(getattr(controller, method).remote(), timeout=timeout_s))
    except RayError as error:
        reason = f"does not answer within {timeout_s:.0f} s" if isinstance(error, GetTimeoutError) else str(error)
        raise ClusterError(name=handle.name, problem=f"the controller: {reason}") from error
