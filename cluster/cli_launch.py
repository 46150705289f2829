"""The launcher of real clusters: Ray behind it, the router's `/ready` in front.

Ray and httpx are loaded by the calls that need them. Knows nothing about when a cluster is started or ended.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cluster.cli_prepare import Prepared
from cluster.cli_signals import uninterruptible
from cluster.state import ClusterRecord, StateStore

if TYPE_CHECKING:
    from cluster.ray_runtime import ClusterHandle

READY_CALL_TIMEOUT_S = 5.0


class RayLauncher:
    """A `cluster.cli_up.Launcher` over `cluster.ray_runtime`."""

    def start(self, prepared: Prepared, store: StateStore, report: Callable[[str], None]) -> ClusterRecord:
        from cluster.ray_runtime import start_cluster

        name = prepared.config.name
        handle = start_cluster(prepared.config, prepared.model_path, store.directory(name), report)
        return ClusterRecord(
            name=name,
            config_path=str(prepared.file.absolute()),
            urls=(),
            ray_address=handle.ray_address,
            namespace=handle.namespace,
            controller=handle.controller,
            started=handle.started,
            up=None,
            log_dir=str(store.log_dir(name)),
            started_at=time.time(),
        )

    def status(self, record: ClusterRecord) -> Mapping[str, Any]:
        from cluster.ray_runtime import cluster_status

        return cluster_status(_handle(record))

    def audit(self, record: ClusterRecord) -> Mapping[str, Any]:
        from cluster.ray_runtime import cluster_audit

        return cluster_audit(_handle(record))

    def stop(self, record: ClusterRecord, report: Callable[[str], None]) -> None:
        from cluster.ray_runtime import stop_cluster

        report(f"ending cluster {record.name}")
        with uninterruptible():
            stop_cluster(_handle(record), report)
        report(f"cluster {record.name} is down")

    def is_ready(self, url: str) -> bool:
        import httpx

        try:
            return httpx.get(f"{url}/ready", timeout=READY_CALL_TIMEOUT_S, trust_env=False).is_success
        except httpx.HTTPError:
            return False


def _handle(record: ClusterRecord) -> "ClusterHandle":
    from cluster.ray_runtime import ClusterHandle

    return ClusterHandle(
        name=record.name,
        ray_address=record.ray_address,
        namespace=record.namespace,
        controller=record.controller,
        started=record.started,
    )
