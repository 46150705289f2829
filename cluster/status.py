"""What `pdcluster status` shows: the controller's published state and the routers' heartbeats as one dictionary.

Pure. The dictionary holds JSON values only and is the format of `status --json`, so keys are added and never renamed:

    name, urls
    state, reason                              starting | ready | degraded | failed, and why
    workers[]   id role epoch state pid endpoint problem restarts waiting running
    routers[]   id epoch state pid url problem restarts in_flight
    requests    waiting running in_flight      waiting and running as decode workers count them: each request once
    leases, pins                               over all workers
    admission   in_flight in_flight_max        over all routers
    kv          by worker id: total free cached used, in blocks (KV-1: they sum to the total)
    controller  pid epoch problem

A worker's state is starting, ready, draining, silent (it runs, but no router hears it), restarting or failed. Knows
nothing about where the values come from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from core.messages import RouterStatus, WorkerStatus


def build_status(published: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary above from what `cluster.controller.Controller.status` gave."""
    epochs = {member["id"]: member["epoch"] for member in [*published["workers"], *published["routers"]]}
    statuses = [
        status
        for router in published["routers"]
        if router.get("status") is not None
        and (status := msgspec.convert(router["status"], RouterStatus)).epoch == router["epoch"]
    ]
    heard = _latest_heartbeats(statuses, epochs)
    decoding = [status for status in heard.values() if status.role == "decode"]
    in_flight = sum(status.num_in_flight for status in statuses)
    return {
        "name": published["name"],
        "urls": sorted({router["url"] for router in published["routers"] if router["url"]}),
        "state": published["state"],
        "reason": published["reason"],
        "workers": [_worker(member, heard, is_any_router=bool(statuses)) for member in published["workers"]],
        "routers": [_router(member, statuses) for member in published["routers"]],
        "requests": {
            "waiting": sum(status.num_waiting for status in decoding),
            "running": sum(status.num_running for status in decoding),
            "in_flight": in_flight,
        },
        "leases": sum(status.num_leases for status in heard.values()),
        "pins": sum(status.num_pins for status in heard.values()),
        "admission": {
            "in_flight": in_flight,
            "in_flight_max": sum(status.num_in_flight_max for status in statuses),
        },
        "kv": {worker_id: _kv(status) for worker_id, status in sorted(heard.items())},
        "controller": published["controller"],
    }


def _latest_heartbeats(routers: Sequence[RouterStatus], epochs: Mapping[str, int]) -> dict[str, WorkerStatus]:
    """One heartbeat per worker; those of an epoch that is not the current one say nothing (TX-2)."""
    return {
        status.worker: status
        for router in routers
        for status in router.workers
        if epochs.get(status.worker) == status.epoch
    }


def _worker(member: Mapping[str, Any], heard: Mapping[str, WorkerStatus], *, is_any_router: bool) -> dict[str, Any]:
    status = heard.get(member["id"])
    state = member["state"]
    if state == "ready" and status is not None:
        state = status.state
    elif state == "ready" and is_any_router:
        state = "silent"
    keys = ("id", "role", "epoch", "pid", "endpoint", "problem", "restarts")
    return {
        **{key: member[key] for key in keys},
        "state": state,
        "waiting": status.num_waiting if status else 0,
        "running": status.num_running if status else 0,
    }


def _router(member: Mapping[str, Any], statuses: Sequence[RouterStatus]) -> dict[str, Any]:
    status = next((one for one in statuses if one.router == member["id"]), None)
    keys = ("id", "epoch", "state", "pid", "url", "problem", "restarts")
    return {**{key: member[key] for key in keys}, "in_flight": status.num_in_flight if status else 0}


def _kv(status: WorkerStatus) -> dict[str, int]:
    kv = status.kv
    return {"total": kv.blocks_total, "free": kv.blocks_free, "cached": kv.blocks_cached, "used": kv.blocks_used}


def render_status(status: Mapping[str, Any]) -> str:
    """The dictionary as a few lines and a table, for people."""
    requests, admission = status["requests"], status["admission"]
    reason = f" ({status['reason']})" if status["reason"] else ""
    lines = [
        f"cluster {status['name']}: {status['state']}{reason}",
        f"API {', '.join(status['urls']) or '-'}",
        f"requests: {requests['waiting']} waiting, {requests['running']} running; "
        f"admitted {admission['in_flight']} of {admission['in_flight_max']}; "
        f"leases {status['leases']}, pins {status['pins']}",
        "",
    ]
    rows = [["MEMBER", "ROLE", "EPOCH", "STATE", "PID", "ENDPOINT", "WAITING", "RUNNING", "KV FREE", "CACHED", "USED"]]
    for router in status["routers"]:
        rows.append(_row({**router, "role": "router", "endpoint": router["url"], "running": router["in_flight"]}, None))
    for worker in status["workers"]:
        rows.append(_row(worker, status["kv"].get(worker["id"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    members = [*status["routers"], *status["workers"]]
    lines += [f"{member['id']}: {member['problem']}" for member in members if member["problem"]]
    return "\n".join(lines)


def _row(member: Mapping[str, Any], kv: Mapping[str, int] | None) -> list[str]:
    cells = [member.get(key) for key in ("id", "role", "epoch", "state", "pid", "endpoint", "waiting", "running")]
    cells += [kv[key] if kv else None for key in ("free", "cached", "used")]
    return ["-" if cell is None else str(cell) for cell in cells]
