"""Ending a head ends what carries its mark, however stubborn, and nothing else; ports are checked before a start."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.ray_head import HEAD_VARIABLE, end_head, find_processes, start_head
from cluster.state import is_alive
from core.config import ClusterConfig
from core.errors import ClusterError

pytestmark = pytest.mark.process

STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE,
                         start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def stubborn(mark: str) -> Iterator[subprocess.Popen[str]]:
    """A process that ignores SIGTERM, with a child in a session of its own."""
    environment = {**os.environ, HEAD_VARIABLE: mark}
    with subprocess.Popen([sys.executable, "-c", STUBBORN], env=environment, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        one.stdout.readline()
        try:
            yield one
        finally:
            for process in find_processes(mark):
                os.kill(process.pid, 9)


def test_every_marked_process_and_no_other_ends_when_the_head_is_ended() -> None:
    mark, other_mark = tempfile.mkdtemp(prefix="pdc-"), tempfile.mkdtemp(prefix="pdc-")
    with stubborn(mark) as ours, stubborn(other_mark) as theirs:
        started = [process for process in find_processes(mark) if process.pid == ours.pid]
        assert len(find_processes(mark)) == 2 and len(started) == 1
        reports: list[str] = []
        end_head(started, reports.append)
        assert find_processes(mark) == [] and reports == []
        assert ours.wait(1) == -9
        assert not Path(mark).exists()
        assert theirs.poll() is None and len(find_processes(other_mark)) == 2
        end_head(started, reports.append)
    os.rmdir(other_mark)


def test_process_is_left_alone_when_only_its_id_is_the_recorded_one() -> None:
    mark = tempfile.mkdtemp(prefix="pdc-")
    with stubborn(mark) as one:
        (recorded,) = (process for process in find_processes(mark) if process.pid == one.pid)
        end_head([replace(recorded, start_ticks=recorded.start_ticks - 1)], print)
        assert is_alive(recorded) and len(find_processes(mark)) == 2
    os.rmdir(mark)


def test_start_fails_when_the_port_of_the_head_is_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        port = taken.getsockname()[1]
        config = ClusterConfig.model_validate(
            {"schema_version": 1, "name": "t", "model": {"path": "m"}, "ray": {"port": port}}
        )
        with pytest.raises(ClusterError, match=f"ray.port {port} of 127.0.0.2 is in use"):
            start_head(config, print)
