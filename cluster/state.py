"""Where a running cluster is written down, so that another command finds it and `down` ends only what `up` started.

One directory per cluster under `$PDCLUSTER_STATE` (default `~/.local/state/pdcluster`): `cluster.json`, private to its
owner and replaced atomically, a lock file, and `logs/`. A process is named by its id *and* its start time, so that a
recycled id is never mistaken for it. Knows nothing about Ray or about how processes are started and ended.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ClusterError

RECORD_FILE = "cluster.json"
LOCK_FILE = "lock"
LOG_DIRECTORY = "logs"
STATE_VARIABLE = "PDCLUSTER_STATE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRef:
    """One process of this machine, for as long as it lives."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot, from /proc; together with the id it names one process only."""
    what: str
    """For people, for example `ray head` or `pdcluster up`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """What another command needs to know about a running cluster."""

    name: str
    config_path: str
    urls: tuple[str, ...]
    """Base URLs of the API, for example `http://127.0.0.1:8000`."""
    ray_address: str
    """host:port of the Ray head that holds the cluster."""
    namespace: str
    """Ray namespace of the cluster's actors."""
    controller: str
    """Name of the controller's actor in that namespace."""
    started: tuple[ProcessRef, ...]
    """Processes that `up` started and `down` ends: the Ray head's. Empty when `up` joined a running Ray."""
    up: ProcessRef | None
    """The `pdcluster up` that waits in the foreground; None after `--detach`."""
    log_dir: str
    started_at: float
    """Seconds since the Unix epoch."""


def process_ref(pid: int, what: str) -> ProcessRef | None:
    """The process that has this id now, None when there is none (a zombie counts as none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name in front may hold spaces and parentheses
    if fields[0] in "ZX":
        return None
    return ProcessRef(pid=pid, start_ticks=int(fields[19]), what=what)


def is_alive(process: ProcessRef) -> bool:
    """Whether that very process still runs, not another one that got its id."""
    return process_ref(process.pid, process.what) == process


def is_stale(record: ClusterRecord) -> bool:
    """Whether everything that `up` started is gone. Never true of a cluster in a Ray that `up` did not start."""
    return bool(record.started) and not any(is_alive(process) for process in record.started)


class StateStore:
    """The records of one user."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def default(cls) -> "StateStore":
        """At `$PDCLUSTER_STATE`, else below the user's state directory."""
        configured = os.environ.get(STATE_VARIABLE)
        return cls(Path(configured) if configured else Path.home() / ".local" / "state" / "pdcluster")

    def directory(self, name: str) -> Path:
        """The cluster's directory, made if needed, private to its owner."""
        directory = self.root / name
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            problem = f"its directory {directory} cannot be made ({error.strerror}); set {STATE_VARIABLE} to another"
            raise ClusterError(name=name, problem=problem) from error
        return directory

    def log_dir(self, name: str) -> Path:
        """Where the cluster's processes write their logs, made if needed."""
        directory = self.directory(name) / LOG_DIRECTORY
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory

    def write(self, record: ClusterRecord) -> None:
        """Replace the cluster's record: a reader sees the old one or the new one, also after a crash."""
        directory = self.directory(record.name)
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=RECORD_FILE)  # created with mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(record)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, directory / RECORD_FILE)
        except BaseException:
            os.unlink(temporary)
            raise

    def read(self, name: str) -> ClusterRecord | None:
        """The record, None when there is none. Raises ClusterError when it cannot be understood."""
        path = self.root / name / RECORD_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=ClusterRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            problem = f"its record {path} cannot be read ({error}). Delete the file if the cluster is gone."
            raise ClusterError(name=name, problem=problem) from error

    def names(self) -> list[str]:
        """Names of all recorded clusters, sorted."""
        return sorted(path.parent.name for path in self.root.glob(f"*/{RECORD_FILE}"))

    def remove(self, name: str) -> None:
        """Forget the cluster; its logs stay. Idempotent."""
        (self.root / name / RECORD_FILE).unlink(missing_ok=True)

    def find(self, name: str | None) -> ClusterRecord:
        """The named cluster, or the only one there is. Raises ClusterError when there is none or more than one."""
        names = self.names()
        if name is None and len(names) == 1:
            name = names[0]
        if name is None:
            problem = f"name one of {', '.join(names)}" if names else "none is running; `pdcluster up FILE` starts one"
            raise ClusterError(name="any", problem=problem)
        record = self.read(name)
        if record is None:
            others = f"; running: {', '.join(names)}" if names else ""
            raise ClusterError(name=name, problem=f"is not running{others}")
        return record

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Held by `up` and `down` while they change the cluster. Raises ClusterError when another command holds it."""
        handle = os.open(self.directory(name) / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ClusterError(name=name, problem="another pdcluster command is starting or ending it") from None
            yield
        finally:
            os.close(handle)
