"""Real processes of a 2P2D cluster on Ray, killed and stopped while they serve: the outcomes of `docs/faults.md`.

The in-process tests hold a request at every column; processes can be struck while a prompt is computed (`chunks`) and
while tokens stream (`decode`). After each strike the survivors' own books must be clean and the cluster whole again.
"""

import asyncio
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster.audit import judge
from cluster.cli_launch import RayLauncher
from cluster.state import ClusterRecord, StateStore
from cluster.status import build_status
from core.errors import ClusterError
from tests.e2e.faults.table import PAGE, read_table
from tests.e2e.soak_clients import Outcome, Question, ask
from tests.e2e.test_http import Running

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TABLE = read_table(PAGE.read_text())
PROMPT_TOKENS = 1200
STOP_S = 17.0
"""Longer than the heartbeat, lease, credit and read timeouts."""
REST_S = 90.0
"""A member that was struck is back, and nothing is held, by then."""
CELLS = [
    ("prefill", "chunks"),
    *((role, column) for role in ("decode", "router", "controller") for column in ("chunks", "decode")),
]
"""A prefill worker has no part in decoding."""
_numbers = itertools.count(1)


class Struck:
    """The cluster, and who of it serves the one request under way."""

    def __init__(self, running: Running, record: ClusterRecord) -> None:
        self.running = running
        self._record = record
        self._launcher = RayLauncher()

    def status(self) -> dict[str, Any] | None:
        try:
            return build_status(self._launcher.status(self._record))
        except ClusterError:
            return None

    def server(self, role: str) -> int:
        """Process id of the member of this role that serves the request, 0 while none is seen to."""
        status = self.status()
        if status is None:
            return 0
        if role == "controller":
            return int(status["controller"]["pid"])
        if role == "router":
            return int(status["routers"][0]["pid"])
        used = {worker_id for worker_id, kv in status["kv"].items() if kv["used"]}
        busy = [w["pid"] for w in status["workers"] if w["role"] == role and (w["running"] or w["id"] in used)]
        return int(busy[0]) if busy else 0

    def is_at_rest(self) -> bool:
        """Every member is back, and says itself that it holds nothing and that its invariants hold."""
        status = self.status()
        if status is None or status["state"] != "ready" or any(w["state"] != "ready" for w in status["workers"]):
            return False
        try:
            judged = judge(self._launcher.audit(self._record))
            if judged["problems"] or judged["held"]:
                return False
            return bool(httpx.get(f"{self.running.url}/ready", timeout=5, trust_env=False).json()["pairs"] == 4)
        except (ClusterError, httpx.HTTPError):
            return False

    async def until(self, is_so: Callable[[], Any], what: str) -> Any:
        deadline_s = time.monotonic() + REST_S
        while not (found := await asyncio.to_thread(is_so)):
            assert time.monotonic() < deadline_s, f"not {what} within {REST_S} s: {self.status()}"
            await asyncio.sleep(0.1)
        return found


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    with socket.socket() as probe:  # a router that is started again comes back to its port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory = tmp_path_factory.mktemp("state")
    settings = ["transfer.lease_s=4", "transfer.credit_s=8", "prefill.max_batched_tokens=64", "kv.device_blocks=160"]
    running = Running("2p2d.yaml", directory, "faults", f"router.port={port}", *settings)
    yield Struck(running, StateStore(directory).find(running.name))
    running.call("down", running.name)


def _question(max_tokens: int) -> Question:
    rng = random.Random(next(_numbers))
    token_ids = tuple(rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS))
    return Question(token_ids=token_ids, max_tokens=max_tokens, temperature=0.0, seed=0, num_choices=1)


async def _play(struck: Struck, role: str, column: str, strike: Callable[[int], Any]) -> tuple[str, Outcome]:
    """One request, struck in this column; what became of it in the words of the page."""
    question = _question(8 if column == "chunks" else 60)
    async with httpx.AsyncClient(base_url=struck.running.url, timeout=240, trust_env=False) as client:
        outcome = Outcome(tokens=[[]])
        asking = asyncio.ensure_future(ask(client, struck.running.model, question, "struck", outcome))
        await struck.until(lambda: struck.server("prefill" if column == "chunks" else "decode"), f"in {column}")
        if column == "decode":
            await struck.until(lambda: len(outcome.tokens[0]) >= 3, "streaming")
        pid = await struck.until(lambda: struck.server(role), f"served by a {role}")
        assert not asking.done(), f"it ended before it was struck: {outcome}"
        striking = asyncio.ensure_future(asyncio.to_thread(strike, pid))
        await asyncio.gather(asking, striking)
        await struck.until(struck.is_at_rest, "at rest")
        undisturbed = await ask(client, struck.running.model, question, "undisturbed", Outcome(tokens=[[]]))
    assert undisturbed.ending == "done", undisturbed
    assert outcome.tokens[0] == undisturbed.tokens[0][: len(outcome.tokens[0])], "wrong tokens"
    if outcome.ending == "done":
        assert outcome.tokens == undisturbed.tokens
    return {"done": "right", "stated": "error event", "connection": "cancelled"}[outcome.ending], outcome


def _expected(row: str, column: str) -> str:
    outcome = TABLE[row, column]
    return "right" if outcome in ("recovered", "unaffected") else outcome


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(STOP_S)  # it must notice nothing for so long
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(("role", "column"), CELLS)
def test_outcome_is_as_documented_when_a_process_is_killed(struck: Struck, role: str, column: str) -> None:
    found, outcome = asyncio.run(_play(struck, role, column, _kill))
    assert found == _expected(f"{role}-killed", column), outcome


@pytest.mark.parametrize(("role", "column"), CELLS)
def test_outcome_is_as_documented_when_a_process_is_stopped_and_continued(
    struck: Struck, role: str, column: str
) -> None:
    found, outcome = asyncio.run(_play(struck, role, column, _stop))
    assert found == _expected(f"{role}-stopped", column), outcome
