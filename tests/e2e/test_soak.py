"""Thirty minutes of random faults on a real 2P2D cluster: nothing wrong, nothing hangs, nothing held, memory flat.

Sixteen clients ask SmolLM2 in `exact` while members of the cluster are killed (SIGKILL) or stopped (SIGSTOP) and
continued at random. Every answer equals the undisturbed one or ends with a stated error. The seed is printed;
PDCLUSTER_SOAK_MINUTES and PDCLUSTER_SOAK_SEED change the length and the course.
"""

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.ray_runtime import ClusterHandle, cluster_status
from cluster.state import ClusterRecord, StateStore
from cluster.status import build_status
from core.errors import ClusterError
from tests.e2e.soak_clients import Ledger, Question, Stream, ask, make_questions
from tests.e2e.test_http import Running

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MINUTES = float(os.environ.get("PDCLUSTER_SOAK_MINUTES", "30"))
SEED = int(os.environ.get("PDCLUSTER_SOAK_SEED", "1"))
NUM_STREAMS = 16
NUM_QUESTIONS = 24
LONGEST_PROMPT = 600
CALM_S = 180.0
"""All members run and nothing is held by then, once nobody disturbs any more."""
FAULT_GAP_S = 15.0
STOP_S_MAX = 25.0
SAMPLE_S = 5.0
GROWTH = 1.15
GROWTH_BYTES = 64 << 20
"""A process that lived for a third of the soak may grow by these in its last two thirds."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with socket.socket() as probe:  # a router that is started again comes back to its port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [
        f"router.port={port}",
        "transfer.lease_s=5",
        "transfer.credit_s=20",
        "router.request_timeout_s=120",
        "kv.device_blocks=160",
        "prefill.max_batched_tokens=128",
    ]
    cluster = Running("2p2d.yaml", tmp_path, "soak", *settings)
    yield cluster
    cluster.call("down", cluster.name)


class Storm:
    """Kills, stops and continues members of one cluster, and watches their memory."""

    def __init__(self, record: ClusterRecord, rng: random.Random) -> None:
        self._handle = ClusterHandle(
            name=record.name,
            ray_address=record.ray_address,
            namespace=record.namespace,
            controller=record.controller,
            started=record.started,
        )
        self._rng = rng
        self._asking = threading.Lock()
        self.faults: list[str] = []
        self.memory: dict[tuple[str, int], list[int]] = {}

    def status(self) -> dict[str, Any] | None:
        """What the controller says, None while it does not answer."""
        with self._asking:  # of Ray, which takes one process for one driver
            try:
                return build_status(cluster_status(self._handle))
            except ClusterError:
                return None

    def _members(self) -> list[tuple[str, int]]:
        status = self.status()
        if status is None:
            return []
        members = [*status["workers"], *status["routers"], {"id": "controller", "pid": status["controller"]["pid"]}]
        return [(member["id"], member["pid"]) for member in members if member["pid"]]

    async def rage(self, is_over: asyncio.Event) -> None:
        """A fault about every FAULT_GAP_S."""
        while not is_over.is_set():
            await asyncio.sleep(self._rng.expovariate(1 / FAULT_GAP_S))
            members = await asyncio.to_thread(self._members)
            if not members:
                continue
            name, pid = self._rng.choice(members)
            try:
                await self._strike(name, pid)
            except ProcessLookupError:
                continue

    async def _strike(self, name: str, pid: int) -> None:
        if self._rng.random() < 0.5:
            self.faults.append(f"kill {name}")
            os.kill(pid, signal.SIGKILL)
            return
        seconds = self._rng.uniform(0.2, STOP_S_MAX)
        self.faults.append(f"stop {name}")
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    async def watch(self, is_over: asyncio.Event) -> None:
        """Sample the resident memory of every member."""
        while not is_over.is_set():
            for member in await asyncio.to_thread(self._members):
                try:
                    pages = int(Path(f"/proc/{member[1]}/statm").read_text().split()[1])
                except (FileNotFoundError, ProcessLookupError):
                    continue
                self.memory.setdefault(member, []).append(pages * os.sysconf("SC_PAGE_SIZE"))
            await asyncio.sleep(SAMPLE_S)

    def grown(self) -> list[str]:
        """Members that lived for a third of the soak and grew after the first third of their life."""
        found = []
        for (name, pid), sizes in self.memory.items():
            if len(sizes) * SAMPLE_S < MINUTES * 20:
                continue
            early, late = max(sizes[: len(sizes) // 3]), max(sizes[-len(sizes) // 3 :])
            print(f"memory of {name} (pid {pid}): {early >> 20} MiB early, {late >> 20} MiB late, {len(sizes)} samples")
            if late > early * GROWTH + GROWTH_BYTES:
                found.append(f"{name}: {early >> 20} -> {late >> 20} MiB")
        return found


async def _undisturbed(url: str, model: str, questions: list[Question]) -> dict[Question, list[list[int]]]:
    answers = {}
    async with httpx.AsyncClient(base_url=url, timeout=240, trust_env=False) as client:
        for number, question in enumerate(questions):
            outcome = await ask(client, model, question, f"first-{number}")
            assert outcome.ending == "done", outcome
            answers[question] = outcome.tokens
    return answers


async def _soak(running: Running, storm: Storm, answers: dict[Question, list[list[int]]], ledger: Ledger) -> None:
    is_over = asyncio.Event()
    streams = [Stream(i, running.url, running.model, answers, ledger, SEED) for i in range(NUM_STREAMS)]
    tasks = [asyncio.ensure_future(stream.run(is_over)) for stream in streams]
    watching = asyncio.ensure_future(storm.watch(is_over))
    raging = asyncio.ensure_future(storm.rage(is_over))
    await asyncio.wait({watching, raging}, timeout=MINUTES * 60, return_when=asyncio.FIRST_COMPLETED)
    is_over.set()
    await asyncio.gather(*tasks, watching, raging)


def _is_at_rest(status: dict[str, Any] | None) -> bool:
    if status is None or status["state"] != "ready":
        return False
    requests = status["requests"]
    held = [requests["waiting"], requests["running"], requests["in_flight"], status["leases"], status["pins"]]
    return not any(held) and len(status["kv"]) == 4 and all(kv["used"] == 0 for kv in status["kv"].values())


def test_nothing_is_wrong_held_or_grown_after_random_faults(running: Running, tmp_path: Path) -> None:
    print(f"seed {SEED}, {MINUTES} minutes")
    rng = random.Random(SEED)
    questions = make_questions(rng, NUM_QUESTIONS, LONGEST_PROMPT)
    storm = Storm(StateStore(tmp_path).find(running.name), rng)
    answers = asyncio.run(_undisturbed(running.url, running.model, questions))
    ledger = Ledger()
    asyncio.run(_soak(running, storm, answers, ledger))
    print(f"{len(storm.faults)} faults: {storm.faults}")
    print(f"endings: {dict(ledger.endings)}")
    print("\n".join(f"{count:6} {text}" for text, count in ledger.errors.most_common(30)))
    assert not ledger.wrong, ledger.wrong[:3]
    assert ledger.endings["done"] > 0 and storm.faults
    deadline_s = time.monotonic() + CALM_S
    status = storm.status()
    while not _is_at_rest(status) and time.monotonic() < deadline_s:
        threading.Event().wait(0.5)  # other processes have to come to rest
        status = storm.status()
    assert _is_at_rest(status), status
    print(running.call("status", running.name, "--check"))
    assert asyncio.run(_undisturbed(running.url, running.model, questions)) == answers
    assert not storm.grown()
