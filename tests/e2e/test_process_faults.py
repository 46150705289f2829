"""Real processes of a 2P2D cluster on Ray, killed and stopped at every column: the outcomes of `docs/faults.md`.

The request is held by gates in the processes (`tests/e2e/faults/held.py`) while one of them is struck. Until everybody
is back, other requests are answered rightly or refused; then the survivors' own books are clean, their descriptors are
back at the baseline, and everybody is in the epoch that the page says.
"""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.audit import judge
from cluster.cli_launch import RayLauncher
from cluster.reconcile import SILENT_S
from cluster.state import ClusterRecord, StateStore
from cluster.status import build_status
from core.errors import ClusterError
from core.messages import HEARTBEAT_TIMEOUT_S
from tests.e2e.faults.held import DIRECTORY, GateFiles, install
from tests.e2e.faults.table import PAGE, read_table
from tests.e2e.soak_clients import Outcome, Question, ask
from tests.e2e.test_http import ROOT, Running

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TABLE = read_table(PAGE.read_text())
PROMPT_TOKENS = 200
MAX_TOKENS = 12
TOKENS_BEFORE = 4
CHUNKS_BEFORE = 2
LEASE_S, CREDIT_S = 4.0, 8.0
STOP_S = 17.0
"""Longer than the heartbeat, lease, credit and read timeouts; too short to be replaced."""
LONG_STOP_S = HEARTBEAT_TIMEOUT_S + SILENT_S + 8.0
"""Long enough to be replaced."""
RAY_DESCRIPTORS = 4
"""A controller that was started again opens connections to Ray's processes when it first needs them."""
HELD_S = 30.0
"""The request is where it is to be struck by then."""
NOTICED_S = 0.5
"""By then the router knows of a lost connection; what waited on it is lost, too."""
CLEAN_S = LEASE_S + 1.0
DESCRIPTORS_S = 30.0
"""Connections that nobody uses are closed by then."""
REST_S = 120.0
"""Whoever was struck is back by then, and nobody holds anything."""
COLUMNS = ("selection", "credit", "queued", "chunks", "pull", "first-step", "decode", "finish")
ROLES = ("prefill", "decode", "router", "controller")
# One role after the other, so that nobody is killed again while its restarts are still delayed by the last time.
CELLS = [(role, column) for column in COLUMNS for role in ROLES]
REPLACED_CELLS = [("prefill", "chunks"), ("decode", "decode"), ("router", "decode")]
GATES: dict[str, tuple[str, int]] = {
    "credit": ("credit", 0),
    "queued": ("prefill", 0),
    "chunks": ("prefill", CHUNKS_BEFORE),
    "pull": ("pull", 0),
    "first-step": ("decode", 0),
    "decode": ("decode", TOKENS_BEFORE),
    "finish": ("finish", 0),
}
"""By column the gate that holds a request there, and what it lets through before."""
Strike = Callable[[int], None]
_seeds = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the cluster as its status says."""

    id: str
    epoch: int
    pid: int

    def descriptors(self) -> list[str]:
        """What each is; of a TCP socket its two addresses (as /proc has them) and its state."""
        inodes = {}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                inodes[f"socket:[{fields[9]}]"] = f"{table} {fields[1]} {fields[2]} {fields[3]}"
        found = []
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = os.readlink(path)
                found.append(inodes.get(target, target))
        return sorted(found)


@dataclass(slots=True, kw_only=True)
class Struck:
    """The cluster, its gates, and what it was before."""

    running: Running
    record: ClusterRecord
    gates: GateFiles
    launcher: RayLauncher = field(default_factory=RayLauncher)
    known: list[tuple[Question, list[list[int]]]] = field(default_factory=list)
    """Questions with their undisturbed answers."""

    def members(self) -> dict[str, Member] | None:
        """Everybody, when everybody is ready; None otherwise."""
        try:
            status = build_status(self.launcher.status(self.record))
        except ClusterError:
            return None
        everybody = [*status["workers"], *status["routers"]]
        if status["state"] != "ready" or any(one["state"] != "ready" for one in everybody):
            return None
        found = [Member(id=one["id"], epoch=one["epoch"], pid=one["pid"]) for one in everybody]
        controller = status["controller"]
        found.append(Member(id="controller", epoch=controller["epoch"], pid=controller["pid"]))
        return {one.id: one for one in found}

    def holders(self, besides: str) -> list[str] | None:
        """Who holds something, the struck one aside; None while that cannot be asked."""
        try:
            judged = judge(self.launcher.audit(self.record))
        except ClusterError:
            return None
        problems = [problem for problem in judged["problems"] if not problem.startswith(besides)]
        if any("did not answer" in problem for problem in problems):
            return None
        assert not problems, problems
        busy = [
            f"{name}: a request in flight" for name, one in judged["members"].items() if one["books"].get("in_flight")
        ]
        return busy + [held for held in judged["held"] if not held.startswith(besides)]

    def is_whole(self) -> bool:
        try:
            ready = httpx.get(f"{self.running.url}/ready", timeout=5, trust_env=False)
        except httpx.HTTPError:
            return False
        return self.members() is not None and ready.json()["pairs"] == 4 and self.holders(besides="nobody") == []

    def victim(self, role: str) -> str:
        prefill, decode = self.gates.pair()
        return {"prefill": prefill, "decode": decode, "router": "router-0", "controller": "controller"}[role]


async def _until(is_so: Callable[[], Any], what: str, within_s: float = REST_S) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (found := await asyncio.to_thread(is_so)):
        assert time.monotonic() < deadline_s, f"not {what} within {within_s} s"
        await asyncio.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    with socket.socket() as probe:  # a router that is started again comes back to its port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory, gates = tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("gates")
    settings = [f"transfer.lease_s={LEASE_S}", f"transfer.credit_s={CREDIT_S}", "prefill.max_batched_tokens=64"]
    hook = f"{install.__module__}.{install.__name__}"
    environment = {DIRECTORY: str(gates), "PYTHONPATH": str(ROOT), "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": hook}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        running = Running("2p2d.yaml", directory, "faults", f"router.port={port}", *settings)
    struck = Struck(running=running, record=StateStore(directory).find(running.name), gates=GateFiles(Path(gates)))
    try:
        asyncio.run(_learn(struck))
        yield struck
    finally:
        running.call("down", running.name)


async def _learn(struck: Struck) -> None:
    """The answers of a few questions; every pair has served by then."""
    async with _client(struck) as client:
        for _ in range(8):
            question = _question()
            answer = await ask(client, struck.running.model, question, "before")
            assert answer.ending == "done", answer
            struck.known.append((question, answer.tokens))


def _client(struck: Struck) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=struck.running.url, timeout=240, trust_env=False)


def _question() -> Question:
    rng = random.Random(next(_seeds))
    token_ids = tuple(rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS))
    return Question(token_ids=token_ids, max_tokens=MAX_TOKENS, temperature=0.0, seed=0, num_choices=1)


class HalfSent:
    """A client whose request stops in the middle of its body until it is told to go on."""

    def __init__(self) -> None:
        self.is_there = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def hold(self, request: httpx.Request) -> None:
        content = request.content
        request.stream = self._Body(self, content)

    class _Body(httpx.AsyncByteStream):
        def __init__(self, owner: "HalfSent", content: bytes) -> None:
            self._owner = owner
            self._content = content

        async def __aiter__(self) -> AsyncIterator[bytes]:
            middle = len(self._content) // 2
            yield self._content[:middle]
            self._owner.is_there.set()
            await self._owner.goes_on.wait()
            yield self._content[middle:]


async def _play(struck: Struck, role: str, column: str, strike: Strike, *, is_replaced: bool) -> str:
    """One request, struck in this column; what became of it in the words of the page."""
    before = await _until(struck.members, "ready")
    descriptors = {one.id: one.descriptors() for one in before.values()}
    half, question, outcome = HalfSent(), _question(), Outcome(tokens=[[]])
    async with _client(struck) as client:
        if column == "selection":
            client.event_hooks["request"] = [half.hold]
        else:
            struck.gates.close(*GATES[column])
        asking = asyncio.ensure_future(ask(client, struck.running.model, question, "struck", outcome))
        try:
            if column == "selection":
                await asyncio.wait_for(half.is_there.wait(), HELD_S)
            else:
                await _until(lambda: struck.gates.holders(GATES[column][0]), f"held in {column}", HELD_S)
            if column == "decode":
                await _until(lambda: len(outcome.tokens[0]) == TOKENS_BEFORE, "streaming", 10.0)
            assert not asking.done(), f"it ended before it was struck: {outcome}"
            victim = before[struck.victim(role)]
            striking = asyncio.ensure_future(asyncio.to_thread(strike, victim.pid))
            await _until(lambda: _is_struck(victim.pid), "struck", 5.0)
            if strike is _kill:
                await asyncio.sleep(NOTICED_S)
        finally:
            struck.gates.open_all()
            half.goes_on.set()
        has_ended = asyncio.Event()
        meanwhile = asyncio.ensure_future(_serve_meanwhile(struck, has_ended, may_connect_fail=role == "router"))
        await asyncio.gather(asking, striking)
        has_ended.set()
        await meanwhile
        await _expect_clean(struck, victim.id)
        await _serve_until_whole(struck, may_connect_fail=role == "router")
    after = struck.members()
    assert after is not None
    for one in after.values():
        is_new = one.id == victim.id and is_replaced
        assert one.epoch == before[one.id].epoch + is_new, f"{one} follows {before[one.id]}"
    survivors = [one for one in after.values() if one.pid == before[one.id].pid]
    assert len(survivors) == len(after) - is_replaced
    for one in survivors:
        most = len(descriptors[one.id]) + (RAY_DESCRIPTORS if one.id == "controller" else 0)
        now: list[str] = []
        deadline_s = time.monotonic() + DESCRIPTORS_S
        while len(now := one.descriptors()) > most:
            new = Counter(now) - Counter(descriptors[one.id])
            assert time.monotonic() < deadline_s, (
                f"{one}: new descriptors {new}, gone {Counter(descriptors[one.id]) - Counter(now)}"
            )
            await asyncio.sleep(0.1)
    async with _client(struck) as client:
        undisturbed = await ask(client, struck.running.model, question, "undisturbed")
    assert undisturbed.ending == "done", undisturbed
    assert outcome.tokens[0] == undisturbed.tokens[0][: len(outcome.tokens[0])], "wrong tokens"
    return _in_words(outcome, undisturbed)


def _in_words(outcome: Outcome, undisturbed: Outcome) -> str:
    if outcome.ending == "done":
        assert outcome.tokens == undisturbed.tokens, "an answer that ends well is whole"
        return "right"
    if outcome.ending == "stated":
        return "error event" if outcome.reason.startswith("event") else f"refused {outcome.reason[:3]}"
    assert outcome.ending == "connection", outcome
    return "cancelled"


def _is_struck(pid: int) -> bool:
    """Gone, or stopped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "TZX"
    except FileNotFoundError:
        return True


async def _ask_known(struck: Struck, number: int, *, may_connect_fail: bool) -> None:
    """One request whose answer is known: it is right, or 503 with Retry-After (nobody can be that for a router)."""
    question, expected = struck.known[number % len(struck.known)]
    async with _client(struck) as client:
        answer = await ask(client, struck.running.model, question, f"meanwhile-{number}")
    got = answer.tokens[0]
    assert got == expected[0][: len(got)], f"wrong tokens: {answer}, expected {expected}"
    if answer.ending == "done":
        assert answer.tokens == expected
    elif answer.ending == "stated":
        assert answer.reason.startswith("503"), answer  # `ask` has seen Retry-After
    else:
        assert answer.ending == "connection" and may_connect_fail, answer


async def _serve_meanwhile(struck: Struck, is_over: asyncio.Event, *, may_connect_fail: bool) -> None:
    for number in itertools.count():
        await _ask_known(struck, number, may_connect_fail=may_connect_fail)
        await asyncio.sleep(0.2)
        if is_over.is_set():
            return


async def _serve_until_whole(struck: Struck, *, may_connect_fail: bool) -> None:
    deadline_s = time.monotonic() + REST_S
    for number in itertools.count():
        await _ask_known(struck, number, may_connect_fail=may_connect_fail)
        if await asyncio.to_thread(struck.is_whole):
            return
        assert time.monotonic() < deadline_s, f"not whole within {REST_S} s: {struck.members()}"


async def _expect_clean(struck: Struck, victim: str) -> None:
    """The survivors hold nothing within lease time + 1 s, from when they can be asked."""
    await _until(lambda: struck.holders(victim) is not None, "audited")
    started_s, held = time.monotonic(), None
    while held != []:
        assert time.monotonic() - started_s < CLEAN_S, f"held {CLEAN_S} s after everything ended: {held}"
        held = await asyncio.to_thread(struck.holders, victim)


def _expected(row: str, column: str) -> str:
    if (row, column) == ("router-stopped", "selection"):
        return "refused 503"  # it has just come, as the page says below the table; `ask` has seen Retry-After
    outcome = TABLE[row, column]
    return "right" if outcome in ("recovered", "unaffected") else outcome


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stopper(seconds: float) -> Callable[[int], None]:
    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(seconds)  # it must notice nothing for so long
        with contextlib.suppress(ProcessLookupError):  # it was replaced
            os.kill(pid, signal.SIGCONT)

    return stop


@pytest.mark.parametrize(("role", "column"), CELLS)
def test_outcome_is_as_documented_when_a_process_is_killed(struck: Struck, role: str, column: str) -> None:
    found = asyncio.run(_play(struck, role, column, _kill, is_replaced=True))
    assert found == _expected(f"{role}-killed", column)


@pytest.mark.parametrize(("role", "column"), CELLS)
def test_outcome_is_as_documented_when_a_process_is_stopped_and_continued(
    struck: Struck, role: str, column: str
) -> None:
    found = asyncio.run(_play(struck, role, column, _stopper(STOP_S), is_replaced=False))
    assert found == _expected(f"{role}-stopped", column)


@pytest.mark.parametrize(("role", "column"), REPLACED_CELLS)
def test_process_is_replaced_when_it_is_stopped_for_long(struck: Struck, role: str, column: str) -> None:
    found = asyncio.run(_play(struck, role, column, _stopper(LONG_STOP_S), is_replaced=True))
    expected = {_expected(f"{role}-stopped", column)}
    if role == "router":  # Ray may end it only once it runs again: it then first ends what it has
        expected.add(_expected("router-killed", column))
    assert found in expected
