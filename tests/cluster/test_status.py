"""From what the controller publishes to what `pdcluster status` shows."""

import json
from typing import Any

import msgspec

from cluster.status import build_status, render_status
from core.ids import Epoch, Role, RouterId, WorkerId
from core.messages import KvUsage, RouterStatus, WorkerStatus


def heartbeat(worker: str, role: Role, *, epoch: int = 1, state: Any = "ready", waiting: int = 0) -> WorkerStatus:
    return WorkerStatus(
        worker=WorkerId(worker), role=role, epoch=Epoch(epoch), state=state, num_waiting=waiting, num_running=3,
        num_leases=2, num_pins=1, counters={},
        kv=KvUsage(blocks_total=10, blocks_free=4, blocks_cached=3, blocks_used=3),
    )  # fmt: skip


def member(name: str, role: str, *, epoch: int = 1, state: str = "ready", problem: str = "") -> dict[str, Any]:
    return {"id": name, "role": role, "epoch": epoch, "state": state, "pid": 77, "endpoint": "127.0.0.2:5000",
            "problem": problem, "restarts": 0}  # fmt: skip


def published(*heartbeats: WorkerStatus, router_epoch: int = 1, **changes: Any) -> dict[str, Any]:
    status = RouterStatus(
        router=RouterId("router-0"), epoch=Epoch(router_epoch), pid=5, url="http://127.0.0.1:8000", num_in_flight=4,
        num_in_flight_max=256, num_workers_ready={"prefill": 1, "decode": 1}, workers=heartbeats,
    )  # fmt: skip
    router = {**member("router-0", "router"), "url": status.url, "status": msgspec.to_builtins(status)}
    return {
        "name": "demo", "state": "ready", "reason": "", "routers": [router],
        "workers": [member("prefill-0", "prefill"), member("decode-0", "decode")],
        "controller": {"pid": 9, "epoch": 1, "problem": ""}, **changes,
    }  # fmt: skip


def test_everything_promised_is_there_when_all_members_are_heard() -> None:
    status = build_status(published(heartbeat("prefill-0", "prefill", waiting=9), heartbeat("decode-0", "decode")))
    assert status["state"] == "ready"
    assert status["urls"] == ["http://127.0.0.1:8000"]
    keys = ("id", "role", "epoch", "state", "pid", "endpoint")
    assert [status["workers"][1][key] for key in keys] == ["decode-0", "decode", 1, "ready", 77, "127.0.0.2:5000"]
    assert status["requests"] == {"waiting": 0, "running": 3, "in_flight": 4}
    assert (status["leases"], status["pins"]) == (4, 2)
    assert status["admission"] == {"in_flight": 4, "in_flight_max": 256}
    assert status["kv"]["prefill-0"] == {"total": 10, "free": 4, "cached": 3, "used": 3}
    assert json.loads(json.dumps(status)) == status


def test_worker_is_silent_when_it_runs_and_no_router_hears_it() -> None:
    status = build_status(published(heartbeat("decode-0", "decode", state="draining")))
    assert [worker["state"] for worker in status["workers"]] == ["silent", "draining"]
    assert list(status["kv"]) == ["decode-0"]


def test_heartbeat_says_nothing_when_its_epoch_is_not_the_current_one() -> None:
    status = build_status(published(heartbeat("decode-0", "decode", epoch=7)))
    assert status["kv"] == {}
    assert build_status(published(heartbeat("decode-0", "decode"), router_epoch=2))["admission"]["in_flight_max"] == 0


def test_state_is_the_controller_s_when_no_router_was_heard_yet() -> None:
    router = {**member("router-0", "router", state="starting"), "url": None, "status": None}
    status = build_status(published(routers=[router], state="starting"))
    assert [worker["state"] for worker in status["workers"]] == ["ready", "ready"]
    assert (status["urls"], status["requests"]["running"]) == ([], 0)


def test_status_can_be_built_when_nothing_was_published_yet() -> None:
    status = build_status(published(routers=[], workers=[], state="starting"))
    assert status["workers"] == []
    assert "cluster demo: starting" in render_status(status)


def test_table_shows_every_member_and_problem_when_rendered() -> None:
    restarting = member("prefill-0", "prefill", state="restarting", problem="the process ended")
    text = render_status(
        build_status(
            published(
                heartbeat("decode-0", "decode"), state="degraded", reason="prefill-0 ended",
                workers=[restarting, member("decode-0", "decode")],
            )
        )
    )  # fmt: skip
    lines = text.splitlines()
    assert lines[0] == "cluster demo: degraded (prefill-0 ended)"
    assert "admitted 4 of 256" in text
    assert [line.split()[0] for line in lines[4:]] == ["MEMBER", "router-0", "prefill-0", "decode-0", "prefill-0:"]
    assert lines[7].split()[-3:] == ["4", "3", "3"]
