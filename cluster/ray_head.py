"""A Ray head of our own: its processes, its ports, and ending exactly those.

Every process of the head, and every process that Ray starts from it, carries HEAD_VARIABLE in its environment with
the head's own temporary directory as value. That is how they are found again, whoever's parent they are; nothing else
is ever signalled. The head's parts do not end with the command that started them, and they outlive each other (CL-2).
Imports no Ray: it is started as a command.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.state import ProcessRef, is_alive, process_ref
from core.config import ClusterConfig
from core.errors import ClusterError

HEAD_VARIABLE = "PDCLUSTER_RAY_HEAD"
PREFILL_RESOURCE = "pdcluster_prefill"
DECODE_RESOURCE = "pdcluster_decode"
OBJECT_STORE_BYTES = 100_000_000
"""KV never passes through Ray's object store."""
HEAD_START_TIMEOUT_S = 120.0
TERM_WAIT_S = 2.0
KILL_WAIT_S = 5.0
POLL_S = 0.05
PORT_MIN, PORT_MAX = 20_000, 29_999
"""Away from the workers' default range of Ray (10002-19999) and from the ports that the system gives out."""
FIXED_PORTS = (
    "port",
    "object-manager-port",
    "node-manager-port",
    "ray-client-server-port",
    "dashboard-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
PROCESS_PORTS = 200
"""Ports for Ray's worker processes and drivers, besides one per worker of the cluster."""
OUTPUT_CHARS_MAX = 2000
TEMPORARY_DIRECTORY_CHARS_MAX = 35
"""Ray keeps Unix sockets below it, whose paths have 107 characters at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHead:
    """A head that runs."""

    address: str
    """host:port of its GCS."""
    started: tuple[ProcessRef, ...]


def start_head(config: ClusterConfig, report: Callable[[str], None]) -> RayHead:
    """Start a head large enough for the cluster. Raises ClusterError with Ray's output, leaving nothing behind."""
    base = tempfile.gettempdir()
    directory = tempfile.mkdtemp(prefix="pdc-", dir=base if len(base) <= TEMPORARY_DIRECTORY_CHARS_MAX else "/tmp")
    try:
        return _start(config, Path(directory), report)
    except BaseException:
        _end(lambda: find_processes(directory), report)
        shutil.rmtree(directory, ignore_errors=True)
        raise


def end_head(started: Sequence[ProcessRef], report: Callable[[str], None]) -> None:
    """End the head that these processes belong to, with everything that it started. Idempotent."""
    living = [process for process in started if is_alive(process)]
    directories = {directory for process in living if (directory := _head_of(process.pid))}

    def remaining() -> list[ProcessRef]:
        found = [process for directory in directories for process in find_processes(directory)]
        return [*{process.pid: process for process in [*living, *found] if is_alive(process)}.values()]

    _end(remaining, report)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def find_processes(directory: str) -> list[ProcessRef]:
    """Every process that carries this head's directory in its environment."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    refs = [process_ref(pid, _describe(pid)) for pid in pids if _head_of(pid) == directory]
    return [ref for ref in refs if ref is not None]


def _start(config: ClusterConfig, directory: Path, report: Callable[[str], None]) -> RayHead:
    host = config.ray.node_ip_address
    ports, process_ports = _choose_ports(config)
    workers = {PREFILL_RESOURCE: config.prefill.workers, DECODE_RESOURCE: config.decode.workers}
    resources = ", ".join(f'"{name}": {number}' for name, number in workers.items() if number)
    num_cpus = max(os.cpu_count() or 1, _num_cpus(config))
    has_gpus = config.prefill.gpus > 0 or config.decode.gpus > 0
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--node-ip-address={host}",
        *(f"--{name}={port}" for name, port in ports.items()),
        f"--min-worker-port={process_ports[0]}", f"--max-worker-port={process_ports[-1]}",
        f"--num-cpus={num_cpus}", f"--resources={{{resources}}}", f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={directory}", "--disable-usage-stats", "--include-dashboard=false", "--include-log-monitor=false",
        "--log-color=false", *([] if has_gpus else ["--num-gpus=0"]),
    ]  # fmt: skip
    report(f"starting a Ray head at {host}:{ports['port']}")
    try:
        run = subprocess.run(
            command,
            env={**os.environ, **_environment(directory)},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HEAD_START_TIMEOUT_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        problem = f"Ray did not start within {HEAD_START_TIMEOUT_S:.0f} s"
        raise ClusterError(name=config.name, problem=problem) from error
    if run.returncode != 0:
        problem = f"Ray could not be started:\n{run.stdout[-OUTPUT_CHARS_MAX:].strip()}"
        raise ClusterError(name=config.name, problem=problem)
    return RayHead(address=f"{host}:{ports['port']}", started=tuple(find_processes(str(directory))))


def _environment(directory: Path) -> dict[str, str]:
    """Of the head and of everything it starts."""
    return {
        HEAD_VARIABLE: str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Processes are started when an actor needs one: each idle one costs memory and, at start, seconds of a CPU.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        # Workers compete with nothing less important; Ray would run them at 15.
        "RAY_worker_niceness": "0",
        # Processes that lost the head go on serving for so long (CL-2).
        "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _num_cpus(config: ClusterConfig) -> int:
    return config.prefill.workers * config.prefill.cpus + config.decode.workers * config.decode.cpus


def _choose_ports(config: ClusterConfig) -> tuple[dict[str, int], range]:
    """A free port for each part of the head, and a range for the processes it starts."""
    host = config.ray.node_ip_address
    size = len(FIXED_PORTS) + PROCESS_PORTS + config.prefill.workers + config.decode.workers
    for start in random.sample(range(PORT_MIN, PORT_MAX - size, size), k=(PORT_MAX - size - PORT_MIN) // size):
        ports = dict(zip(FIXED_PORTS, range(start, start + len(FIXED_PORTS)), strict=True))
        if config.ray.port is not None:
            ports["port"] = config.ray.port
        if all(_is_free(host, port) for port in ports.values()):
            return ports, range(start + len(FIXED_PORTS), start + size)
        if config.ray.port is not None and not _is_free(host, config.ray.port):
            raise ClusterError(name=config.name, problem=f"ray.port {config.ray.port} of {host} is in use")
    raise ClusterError(name=config.name, problem=f"no {size} free ports between {PORT_MIN} and {PORT_MAX} on {host}")


def _is_free(host: str, port: int) -> bool:
    """Whether nothing listens there. Ray binds some of its ports to every address."""
    for address in (host, ""):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def _head_of(pid: int) -> str | None:
    """The head directory in the environment of a process; None when it has none or is not ours to look at."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{HEAD_VARIABLE}=".encode()
    return next((os.fsdecode(one.removeprefix(prefix)) for one in variables if one.startswith(prefix)), None)


def _describe(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        name = "ended"
    return f"ray {name}"


def _end(remaining: Callable[[], list[ProcessRef]], report: Callable[[str], None]) -> None:
    processes: list[ProcessRef] = []
    for signal_number, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, KILL_WAIT_S)):
        deadline_s = time.monotonic() + wait_s
        signalled: set[int] = set()
        while processes := [process for process in remaining() if process.pid != os.getpid()]:
            for process in processes:
                if process.pid not in signalled:
                    signalled.add(process.pid)
                    _signal(process, signal_number)
            if time.monotonic() >= deadline_s:
                break
            time.sleep(POLL_S)
    for process in processes:
        report(f"process {process.pid} ({process.what}) did not end")


def _signal(process: ProcessRef, number: signal.Signals) -> None:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(process):  # checked while the handle keeps the id from being given to another process
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)
