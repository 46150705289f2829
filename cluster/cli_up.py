"""The course of `up` and `down`: start, write down, wait until ready, serve, take down.

Talks to the cluster through a `Launcher`, waits on a `Timer`, and tells people through `report`, so that it runs
without processes or time in tests. Knows nothing about Ray, terminals or signals (they arrive as KeyboardInterrupt).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from cluster.cli_prepare import Prepared
from cluster.state import ClusterRecord, ProcessRef, StateStore, is_stale
from cluster.status import build_status
from core.config import effective_config
from core.errors import ClusterError

READY_TIMEOUT_S = 600.0
POLL_S = 0.25
WATCH_S = 2.0
EFFECTIVE_CONFIG_FILE = "effective.yaml"

Report = Callable[[str], None]


class Launcher(Protocol):
    """Starts, asks and ends a cluster. Every call ends within its own deadlines or raises ClusterError."""

    def start(self, prepared: Prepared, store: StateStore, report: Report) -> ClusterRecord:
        """Start what starts everything else. Returns soon, with nothing left behind if it raises."""
        ...

    def status(self, record: ClusterRecord) -> Mapping[str, Any]:
        """What the controller published last (see `cluster.controller.Controller.status`)."""
        ...

    def audit(self, record: ClusterRecord) -> Mapping[str, Any]:
        """What every member found when it checked itself (see `cluster.controller.Controller.audit`)."""
        ...

    def stop(self, record: ClusterRecord, report: Report) -> None:
        """End every process of the cluster, and of Ray what `start` started. Idempotent."""
        ...

    def is_ready(self, url: str) -> bool:
        """Whether the API at `url` says that it can take requests."""
        ...


class Timer(Protocol):
    """Time as a person sees it pass."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wait(self, seconds: float) -> None:
        """Return after so many seconds."""
        ...


class ProgressLines:
    """Turns successive states of a cluster into one line per change."""

    def __init__(self, now: float) -> None:
        self._started_s = now
        self._states: dict[str, tuple[str, float]] = {}

    def lines(self, status: Mapping[str, Any], now: float) -> list[str]:
        """What is new since the last call."""
        lines = []
        for member in [*status["workers"], *status["routers"]]:
            state, since_s = self._states.get(member["id"], ("", self._started_s))
            if member["state"] == state or (state == "starting" and member["state"] == "silent"):
                continue  # a worker that just began to listen has not been heard yet
            self._states[member["id"]] = (member["state"], now)
            after = f" after {now - since_s:.1f} s" if state == "starting" else ""
            problem = f" ({member['problem']})" if member["problem"] and member["state"] != "ready" else ""
            lines.append(f"{member['id']:<12}{member['state']}{after}{problem}")
        return lines


def start_and_wait(
    prepared: Prepared, launcher: Launcher, store: StateStore, timer: Timer, report: Report, *, up: ProcessRef | None
) -> ClusterRecord:
    """Start the cluster and wait until it takes requests. Whatever goes wrong, nothing is left running.

    `up` is the process that will stay in the foreground, for the record.
    """
    name = prepared.config.name
    with store.lock(name):
        require_absent(store, name)
        started_s = timer.now()
        (store.directory(name) / EFFECTIVE_CONFIG_FILE).write_text(effective_config(prepared.config))
        record = replace(launcher.start(prepared, store, report), up=up)
        try:
            store.write(record)
            record = _wait_until_ready(record, launcher, store, timer, report)
        except BaseException:
            take_down(record, launcher, store, report)
            raise
    report(f"ready after {timer.now() - started_s:.1f} s: {', '.join(record.urls)}")
    return record


def require_absent(store: StateStore, name: str) -> None:
    """Forget a cluster of that name whose processes are gone. Raises ClusterError when it runs."""
    existing = store.read(name)
    if existing is None:
        return
    if not is_stale(existing):
        where = f" at {', '.join(existing.urls)}" if existing.urls else ""
        raise ClusterError(name=name, problem=f"is running already{where}; `pdcluster down {name}` ends it")
    store.remove(name)


def _wait_until_ready(
    record: ClusterRecord, launcher: Launcher, store: StateStore, timer: Timer, report: Report
) -> ClusterRecord:
    deadline_s = timer.now() + READY_TIMEOUT_S
    progress, problem = ProgressLines(timer.now()), ""
    while timer.now() < deadline_s:
        try:
            status = build_status(launcher.status(record))
        except ClusterError as error:  # the controller starts again, or everybody is busy starting
            if is_stale(record):
                raise
            if str(error) != problem:
                problem = str(error)
                report(problem)
            timer.wait(POLL_S)
            continue
        for line in progress.lines(status, timer.now()):
            report(line)
        if status["state"] == "failed":
            raise ClusterError(name=record.name, problem=f"{status['reason']}. Logs: {record.log_dir}")
        urls = tuple(status["urls"])
        is_heard = status["state"] == "ready" and all(worker["state"] == "ready" for worker in status["workers"])
        if is_heard and urls and all(launcher.is_ready(url) for url in urls):
            record = replace(record, urls=urls)
            store.write(record)
            return record
        timer.wait(POLL_S)
    problem = f"was not ready within {READY_TIMEOUT_S:.0f} s. Logs: {record.log_dir}"
    raise ClusterError(name=record.name, problem=problem)


def watch(record: ClusterRecord, launcher: Launcher, store: StateStore, timer: Timer, report: Report) -> None:
    """Report every change until another command ends the cluster, or its processes are gone (ClusterError)."""
    progress: ProgressLines | None = None
    while store.read(record.name) == record:
        if is_stale(record):
            store.remove(record.name)
            raise ClusterError(name=record.name, problem=f"its processes ended. Logs: {record.log_dir}")
        try:
            status = build_status(launcher.status(record))
        except ClusterError as error:
            report(str(error))  # requests go on without the controller; the next round asks again
        else:
            is_first = progress is None
            progress = progress or ProgressLines(timer.now())
            for line in progress.lines(status, timer.now()):
                if not is_first:
                    report(line)
        timer.wait(WATCH_S)
    report(f"cluster {record.name} was ended by another command")


def take_down(record: ClusterRecord, launcher: Launcher, store: StateStore, report: Report) -> None:
    """End the cluster and forget it. The caller holds the lock."""
    if is_stale(record):
        report(f"cluster {record.name} was gone already; its record is removed")
    else:
        launcher.stop(record, report)
    store.remove(record.name)
