"""A whole cluster under Ray on this machine: it starts, says why it fails, survives kills, and leaves nothing behind.

One head for the whole module. The cluster serves a model directory without weights, so that its router comes up and its
worker fails to start; what a worker does with a model is tested elsewhere.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.ray_head import find_processes
from cluster.ray_runtime import ClusterHandle, RayRuntime, cluster_status, start_cluster, stop_cluster, wait_ready
from cluster.reconcile import START_FAILURES_MAX
from cluster.state import is_alive
from core.config import ClusterConfig
from core.errors import ClusterError
from tests.router.scripted import write_model

pytestmark = pytest.mark.ray

TIMEOUT_S = 120.0
POLL_S = 0.1
CONFIG = ClusterConfig.model_validate(
    {
        "schema_version": 1,
        "name": "raytest",
        "mode": "colocated",
        "model": {"path": "m"},
        "kv": {"device_blocks": 64},
        "router": {"port": 0},
        "prefill": {"workers": 0},
        "decode": {"workers": 1, "cpus": 64},
    }
)


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHandle]:
    directory = tmp_path_factory.mktemp("cluster")
    model_path = write_model(tmp_path_factory.mktemp("model"))
    started = start_cluster(CONFIG, model_path, directory, print)
    temporary = Path(os.fsdecode(_environment(started.started[0].pid)["PDCLUSTER_RAY_HEAD"]))
    assert temporary.is_dir()
    yield started
    stop_cluster(started, print)
    assert not any(is_alive(process) for process in started.started)
    assert find_processes(str(temporary)) == []
    assert not temporary.exists()
    stop_cluster(started, print)


def wait_until(handle: ClusterHandle, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline_s = time.monotonic() + TIMEOUT_S
    status: dict[str, Any] = {}
    while time.monotonic() < deadline_s:
        try:
            status = cluster_status(handle)
        except ClusterError:  # the controller is being restarted
            status = {"workers": [], "routers": []}
        if status["routers"] and is_reached(status):
            return status
        threading.Event().wait(POLL_S)  # other processes have to move
    raise AssertionError(f"not reached within {TIMEOUT_S} s: {status}")


def test_router_serves_and_worker_failure_is_told_when_the_model_has_no_weights(handle: ClusterHandle) -> None:
    with pytest.raises(ClusterError, match=f"decode-0 failed to start {START_FAILURES_MAX} times: Model at"):
        wait_ready(handle, TIMEOUT_S, print)
    status = wait_until(handle, lambda status: status["routers"][0]["status"] is not None)
    url = status["routers"][0]["url"]
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    assert status["workers"][0]["epoch"] == START_FAILURES_MAX


def test_router_runs_on_and_epochs_stay_when_the_controller_is_killed(handle: ClusterHandle) -> None:
    """CL-2."""
    before = wait_until(handle, lambda status: status["routers"][0]["status"] is not None)
    os.kill(before["controller"]["pid"], signal.SIGKILL)
    after = wait_until(
        handle, lambda status: status["controller"]["epoch"] == 2 and status["routers"][0]["status"] is not None
    )
    same = ("id", "epoch", "pid", "endpoint", "state")
    assert [after["routers"][0][key] for key in same] == [before["routers"][0][key] for key in same]


def test_router_is_started_in_the_next_epoch_when_it_is_killed(handle: ClusterHandle) -> None:
    before = wait_until(handle, lambda status: status["routers"][0]["status"] is not None)["routers"][0]
    os.kill(before["pid"], signal.SIGKILL)
    after = wait_until(
        handle, lambda status: status["routers"][0]["epoch"] > before["epoch"] and status["routers"][0]["url"]
    )["routers"][0]
    assert after["epoch"] == before["epoch"] + 1 and after["pid"] != before["pid"]
    assert httpx.get(f"{after['url']}/health", trust_env=False).status_code == 200


def test_second_cluster_of_the_name_is_refused_when_one_runs(handle: ClusterHandle, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"ray": CONFIG.ray.model_copy(update={"address": handle.ray_address})})
    with pytest.raises(ClusterError, match="is running already"):
        start_cluster(config, tmp_path, tmp_path, print)
    assert cluster_status(handle)["name"] == "raytest"


def test_second_cluster_is_refused_with_the_reason_when_there_is_no_room(handle: ClusterHandle, tmp_path: Path) -> None:
    ray = CONFIG.ray.model_copy(update={"address": handle.ray_address})
    decode = CONFIG.decode.model_copy(update={"cpus": 65})
    config = CONFIG.model_copy(update={"name": "other", "ray": ray, "decode": decode})
    with pytest.raises(ClusterError, match="its workers need 65 CPU, the Ray cluster has 64"):
        start_cluster(config, tmp_path, tmp_path, print)
    assert cluster_status(handle)["name"] == "raytest"


def _environment(pid: int) -> dict[str, bytes]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {os.fsdecode(name): value for name, _, value in (pair.partition(b"=") for pair in pairs)}


def test_who_asks_while_an_observation_is_under_way_gets_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end must not fail because the control loop has just asked."""
    runtime, answers, num_calls = RayRuntime("t", CONFIG, tmp_path), threading.Event(), 0

    def observe() -> list[Any]:
        nonlocal num_calls
        num_calls += 1
        assert answers.wait(TIMEOUT_S)
        return []

    async def ask_twice() -> None:
        first, second = (asyncio.ensure_future(runtime.observe()) for _ in range(2))
        await asyncio.sleep(0)
        answers.set()
        assert await first == await second == []

    monkeypatch.setattr(runtime, "_observe", observe)
    asyncio.run(ask_twice())
    assert num_calls == 1
