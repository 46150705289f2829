"""What an actor process does around a worker: says how far it is, ends with it, and reports why it could not start."""

import faulthandler
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.actors import EXIT_ENDED, MemberHost, Running, open_log, pack
from cluster.runtime import RouterSpec, WorkerSpec
from core.config import ClusterConfig
from core.errors import ModelLoadError
from core.ids import Epoch, RouterId, WorkerId

pytestmark = pytest.mark.process

TIMEOUT_S = 10.0
CONFIG = ClusterConfig.model_validate({"schema_version": 1, "name": "t", "model": {"path": "m"}})


class FakeMember:
    """Listens until it is stopped."""

    def __init__(self) -> None:
        self.endpoint = "127.0.0.1:1"
        self.pid = os.getpid()
        self.url = "http://127.0.0.1:2"
        self.is_waited_for = threading.Event()
        self.ended = threading.Event()

    def wait(self) -> bool:
        self.is_waited_for.set()
        return self.ended.wait(TIMEOUT_S)

    def stop(self) -> None:
        self.ended.set()


@pytest.fixture(autouse=True)
def closed_logs() -> Iterator[None]:
    """An actor's process logs for its whole life; this one goes on."""
    yield
    root = logging.getLogger()
    for handler in [one for one in root.handlers if type(one) is logging.FileHandler]:
        root.removeHandler(handler)
        handler.close()
    faulthandler.enable(sys.__stderr__ or sys.stderr)


def test_log_has_what_the_product_says_and_everybody_s_warnings(tmp_path: Path) -> None:
    open_log(tmp_path, "router-0")
    for name in ("router.workers.native", "pdcluster.actor"):
        logging.getLogger(name).info("says %s", name)
    for name in ("uvicorn.error", "asyncio", "grpc"):
        logging.getLogger(name).info("whispers")
        logging.getLogger(name).error("fails %s", name)
    text = (tmp_path / "router-0.log").read_text()
    said = ["says router.workers.native", "says pdcluster.actor", "fails uvicorn.error", "fails asyncio", "fails grpc"]
    assert [line.split(": ", 1)[1] for line in text.splitlines()] == said


def test_member_is_described_when_it_listens(tmp_path: Path) -> None:
    member = FakeMember()
    host = MemberHost("prefill-0", lambda: member, tmp_path)
    assert member.is_waited_for.wait(TIMEOUT_S)
    assert host.describe() == {
        "pid": os.getpid(),
        "endpoint": "127.0.0.1:1",
        "url": "http://127.0.0.1:2",
        "problem": "",
    }
    host.stop()
    assert member.ended.is_set()


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ModelLoadError(path="p", file="f", field="x", problem="bad"), "Model at p: f: x: bad"),
        (KeyError("a bug"), "KeyError: 'a bug'"),
    ],
)
def test_problem_is_described_and_logged_when_start_fails(tmp_path: Path, error: Exception, problem: str) -> None:
    failed = threading.Event()

    def start() -> Running:
        failed.set()
        raise error

    host = MemberHost("prefill-0", start, tmp_path)
    assert failed.wait(TIMEOUT_S)
    for thread in threading.enumerate():
        if thread.name == "member":
            thread.join(TIMEOUT_S)
    assert host.describe()["problem"] == problem
    assert host.describe()["endpoint"] is None
    assert problem.split(": ")[-1] in (tmp_path / "prefill-0.log").read_text()


def test_process_ends_when_its_member_ends_by_itself(tmp_path: Path) -> None:
    program = """
import sys, threading
from pathlib import Path
from cluster.actors import MemberHost
class Member:
    endpoint, pid, failure = "e", 1, AssertionError("KV-1 is broken")
    def wait(self): return True
    def stop(self): pass
host = MemberHost("decode-0", Member, Path(sys.argv[1]))
threading.Event().wait(20)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=30)
    assert ended.returncode == EXIT_ENDED
    assert "KV-1 is broken" in (tmp_path / "decode-0.log").read_text()


def test_packed_spec_holds_plain_values_only() -> None:
    worker = WorkerSpec(
        id=WorkerId("prefill-0"), role="prefill", epoch=Epoch(3), config=CONFIG, model_path=Path("m"), cpus=1, gpus=0.0
    )
    packed = pack(worker, Path("logs"))
    assert all(type(value) in (str, int, float) for value in packed.values())
    assert ClusterConfig.model_validate_json(packed["config"]) == CONFIG
    router = RouterSpec(id=RouterId("router-0"), epoch=Epoch(1), config=CONFIG, model_path=Path("m"))
    assert pack(router, Path("logs"))["role"] == "router"
