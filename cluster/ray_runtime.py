"""Workers, routers and the controller as detached Ray actors, and a whole cluster's start, status and end. The only user of Ray.

    namespace pdcluster-<name>    controller            restarted by Ray, adopts what runs (CL-2)
                                  prefill-0:1 ...       id:epoch, restarted by the controller only, in the next epoch
    placement group, same name    one bundle per worker: CPUs, GPUs, and `pdcluster_prefill` or `pdcluster_decode` where the
                                  Ray cluster defines these resources (a head that we start does)

Routers and the controller take no CPUs and stay on the node that `start_cluster` was called on. Actors import the installed packages.
No Ray call is made while a request is served.
"""

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.actors import ControllerHost, MemberHost, Running
from cluster.controller import Controller, RecordFile
from cluster.ray_head import DECODE_RESOURCE, PREFILL_RESOURCE, Report, end_head, start_head
from cluster.reconcile import MemberId, Target
from cluster.runtime import MemberRole, Observed, RouterSpec, WorkerSpec
from cluster.state import ProcessRef
from core.clock import SystemClock
from core.config import ClusterConfig
from core.errors import ClusterError
from core.ids import Epoch, RouterId, WorkerId
from core.link_grpc import GrpcDialer

CONTROLLER_NAME = "controller"
RECORD_FILE = "controller.json"
CONNECT_TIMEOUT_S = 30.0
PLACEMENT_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 10.0
DESCRIBE_TIMEOUT_S = 1.0
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


# ---- actors -----------------------------------------------------------------------------------------------------------


class WorkerActor(MemberHost):
    """A worker's process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec["id"], lambda: _run_worker(spec), Path(spec["log_dir"]))


class RouterActor(MemberHost):
    """A router's process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec["id"], lambda: _run_router(spec), Path(spec["log_dir"]))


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
                record=RecordFile(Path(directory) / RECORD_FILE, target.config.name),
            )

        super().__init__(build, Path(log_dir))


def _run_worker(spec: Mapping[str, Any]) -> Running:
    from cluster.worker_process import run_worker  # torch and the transport, in worker processes only

    config = ClusterConfig.model_validate_json(spec["config"])
    return run_worker(
        WorkerSpec(
            id=WorkerId(spec["id"]), role=spec["role"], epoch=Epoch(spec["epoch"]), config=config,
            model_path=Path(spec["model_path"]), cpus=spec["cpus"], gpus=spec["gpus"],
        )
    )  # fmt: skip


def _run_router(spec: Mapping[str, Any]) -> Running:
    from cluster.router_process import run_router  # the HTTP stack, in router processes only

    config = ClusterConfig.model_validate_json(spec["config"])
    model_path = Path(spec["model_path"])
    return run_router(
        RouterSpec(id=RouterId(spec["id"]), epoch=Epoch(spec["epoch"]), config=config, model_path=model_path)
    )


# ---- the runtime ------------------------------------------------------------------------------------------------------


class RayRuntime:
    """A `cluster.runtime.Runtime` over Ray actors. Lives in the controller's process."""

    def __init__(self, namespace: str, config: ClusterConfig, log_dir: Path) -> None:
        self._namespace = namespace
        self._config = config
        self._log_dir = log_dir
        self._handles: dict[str, Any] = {}
        self._known: dict[str, dict[str, Any]] = {}
        self._observing: asyncio.Future[list[Observed]] | None = None

    async def start_worker(self, spec: WorkerSpec) -> None:
        await asyncio.to_thread(self._start_worker, spec)

    async def start_router(self, spec: RouterSpec) -> None:
        options = {"num_cpus": 0, "scheduling_strategy": _this_node()}
        await asyncio.to_thread(self._start, RouterActor, spec, {}, options, 1)

    async def observe(self) -> list[Observed]:
        if self._observing is not None and not self._observing.done():
            raise ClusterError(name=self._config.name, problem="Ray does not answer")
        self._observing = asyncio.ensure_future(asyncio.to_thread(self._observe))
        return await asyncio.shield(self._observing)

    async def stop(self, member_id: MemberId, epoch: Epoch) -> None:
        await asyncio.to_thread(self._stop, f"{member_id}:{epoch}")

    def _start_worker(self, spec: WorkerSpec) -> None:
        index = [member for member, role in _workers(self._config)].index(spec.id)
        group = self._call(lambda: ray.util.get_placement_group(self._namespace))
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        bundle = group.bundle_specs[index]
        resources = {name: number for name, number in bundle.items() if name not in ("CPU", "GPU")}
        options = {"num_cpus": spec.cpus, "num_gpus": spec.gpus, "resources": resources, "scheduling_strategy": strategy}
        self._start(WorkerActor, spec, {"cpus": spec.cpus, "gpus": spec.gpus}, options, spec.cpus)

    def _start(
        self, kind: type, spec: WorkerSpec | RouterSpec, extra: dict[str, Any], options: dict[str, Any], threads: int
    ) -> None:
        values = {
            "id": spec.id, "role": spec.role, "epoch": spec.epoch, "config": spec.config.model_dump_json(),
            "model_path": str(spec.model_path), "log_dir": str(self._log_dir), **extra,
        }  # fmt: skip
        actor = ray.remote(kind).options(
            name=f"{spec.id}:{spec.epoch}",
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_concurrency=ACTOR_CALLS_MAX,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
            **options,
        )
        self._handles[f"{spec.id}:{spec.epoch}"] = self._call(lambda: actor.remote(values))

    def _observe(self) -> list[Observed]:
        listed = self._call(lambda: ray.util.list_named_actors(all_namespaces=True))
        names = [one["name"] for one in listed if one["namespace"] == self._namespace and ":" in one["name"]]
        for name in names:
            if name not in self._handles:
                handle = self._call(lambda name=name: _find_actor(name, self._namespace))  # type: ignore[misc]
                if handle is not None:
                    self._handles[name] = handle
        calls = {name: handle.describe.remote() for name, handle in self._handles.items()}
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=DESCRIBE_TIMEOUT_S)
        return [self._describe(name, call) for name, call in calls.items()]

    def _describe(self, name: str, call: Any) -> Observed:
        """One member. Who does not answer in time is as it was last seen: a busy process is not a dead one."""
        member_id, _, epoch = name.rpartition(":")
        role: MemberRole = dict(Target(config=self._config, model_path=Path()).members()).get(
            WorkerId(member_id), _role_of(member_id)
        )
        known, problem = self._known.get(name, {}), ""
        try:
            known = self._known[name] = ray.get(call, timeout=0.01)
            problem = known["problem"]
        except GetTimeoutError:
            problem = ""
        except RayActorError as error:
            problem = _explain_death(error)
        if problem:
            handle = self._handles.pop(name)
            self._known.pop(name, None)
            ray.kill(handle, no_restart=True)
        return Observed(
            id=RouterId(member_id) if role == "router" else WorkerId(member_id),
            role=role,
            epoch=Epoch(int(epoch)),
            alive=not problem,
            endpoint=known.get("endpoint"),
            pid=known.get("pid"),
            url=known.get("url"),
            problem=problem or None,
        )

    def _stop(self, name: str) -> None:
        handle = self._handles.pop(name, None) or self._call(lambda: _find_actor(name, self._namespace))
        self._known.pop(name, None)
        if handle is not None:
            _stop_actor(handle)

    def _call(self, call: Callable[[], Any]) -> Any:
        """A Ray call whose failure is an operating error."""
        try:
            return call()
        except (RayError, ValueError, ConnectionError) as error:
            raise ClusterError(name=self._config.name, problem=f"Ray: {error}") from error
