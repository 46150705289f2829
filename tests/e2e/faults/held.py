"""The gates of the fault matrix in the processes of a real cluster, so that a request waits where it is to be struck.

`install` runs in every process that Ray starts (its setup hook), before anything of pdcluster does, and puts a gate in
front of production methods; a closed gate is a file in a directory that the test and the processes share. Knows nothing
about which request is held, or why.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core.errors import LinkClosedError, TransferFailedError
from core.ids import BlockId, WorkerId
from core.link_grpc import GrpcLink
from core.messages import AnyMessage, Tokens
from decode.intake import Intake
from decode.worker import DecodeWorker
from engine.step import StepPlan
from kvtransfer.transport.base import Peer, ReadId, ReadResult, ReadState
from kvtransfer.transport.nixl import NixlTransport
from prefill.worker import PrefillWorker
from router.select import NOBODY_FAILED, Pair, RoundRobin, Topology

DIRECTORY = "PDCLUSTER_TEST_GATES"
LOOK_S = 0.01
FIRST_HELD_ID = 1_000_000
"""Ids of reads that wait at the gate; the transport counts its own from zero."""


class GateFiles:
    """`closed-NAME` is there while a gate is closed, and holds how many steps it still lets through;
    `held-NAME-PID` says that this process waits at it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def close(self, name: str, num_steps: int = 0) -> None:
        path = self._directory / "new"
        path.write_text(str(num_steps))
        path.rename(self._directory / f"closed-{name}")

    def open_all(self) -> None:
        for path in [*self._directory.glob("closed-*"), *self._directory.glob("held-*")]:
            path.unlink()

    def limit(self, name: str) -> int | None:
        """Steps that this gate lets through; None while it is open."""
        try:
            return int((self._directory / f"closed-{name}").read_text())
        except FileNotFoundError:
            return None

    def is_closed(self, name: str) -> bool:
        return self.limit(name) is not None

    def say_held(self, name: str) -> None:
        (self._directory / f"held-{name}-{os.getpid()}").touch()

    def holders(self, name: str) -> list[int]:
        """Processes that wait at this gate."""
        return [int(path.name.rsplit("-", 1)[1]) for path in self._directory.glob(f"held-{name}-*")]

    def say_pair(self, pair: Pair | None) -> None:
        if pair is not None and pair.prefill is not None:
            path = self._directory / f"pair-{os.getpid()}"
            path.write_text(json.dumps([pair.prefill.worker, pair.decode.worker]))
            path.rename(self._directory / "pair")

    def pair(self) -> tuple[str, str]:
        """The prefill and the decode worker that a router chose last."""
        prefill, decode = json.loads((self._directory / "pair").read_text())
        return prefill, decode


def install() -> None:
    """Put the gates into this process."""
    gates = GateFiles(Path(os.environ[DIRECTORY]))
    _gate_selection(gates)
    _gate_credit(gates)
    _gate_steps(gates, PrefillWorker, "prefill")
    _gate_steps(gates, DecodeWorker, "decode")
    _gate_reads(gates)
    _gate_last_tokens(gates)


def _gate_selection(gates: GateFiles) -> None:
    """No gate: the selector says whom it chose."""
    select = RoundRobin.select

    def said(self: RoundRobin, topology: Topology, failed: Mapping[WorkerId, int] = NOBODY_FAILED) -> Pair | None:
        pair = select(self, topology, failed)
        gates.say_pair(pair)
        return pair

    RoundRobin.select = said  # type: ignore[method-assign]


def _gate_credit(gates: GateFiles) -> None:
    grant = Intake._grant_credits

    def gated(self: Intake, now: float, headroom: int) -> None:
        if self.num_waiting and gates.is_closed("credit"):
            gates.say_held("credit")
            return
        grant(self, now, headroom)

    Intake._grant_credits = gated  # type: ignore[method-assign]


def _gate_steps(gates: GateFiles, kind: Any, role: str) -> None:
    init = kind.__init__

    def gated_init(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self._scheduler.plan = _gated_plan(gates, self._scheduler, role)

    kind.__init__ = gated_init


def _gated_plan(gates: GateFiles, scheduler: Any, role: str) -> Callable[[], StepPlan | None]:
    plan = scheduler.plan
    num_planned = 0

    def gated() -> StepPlan | None:
        nonlocal num_planned
        limit = gates.limit(role)
        if limit is None:
            num_planned = 0
        elif num_planned >= limit:
            if scheduler.num_waiting or scheduler.num_running:
                gates.say_held(role)
            return None
        planned: StepPlan | None = plan()
        num_planned += planned is not None
        return planned

    return gated


class _HeldReads:
    """Reads of one transport that have not begun: they begin when the gate opens."""

    def __init__(self) -> None:
        self.waiting: dict[ReadId, tuple[Peer, list[BlockId], list[BlockId]]] = {}
        self.begun: dict[ReadId, ReadId] = {}
        """By the transport's own id, the one that was given out."""
        self.ended: list[ReadResult] = []
        self.ids = itertools.count(FIRST_HELD_ID)

    def end(self, read_id: ReadId, reason: str) -> None:
        self.ended.append(ReadResult(read_id=read_id, state=ReadState.FAILED, reason=reason, seconds=0.0))


def _gate_reads(gates: GateFiles) -> None:
    start, abandon, poll = NixlTransport.start_read, NixlTransport.abandon, NixlTransport.poll
    held_by: dict[int, _HeldReads] = {}

    def held(transport: NixlTransport) -> _HeldReads:
        return held_by.setdefault(id(transport), _HeldReads())

    def gated_start(self: NixlTransport, peer: Peer, sources: list[BlockId], targets: list[BlockId]) -> ReadId:
        if not gates.is_closed("pull"):
            return start(self, peer, sources, targets)
        gates.say_held("pull")
        read_id = ReadId(next(held(self).ids))
        held(self).waiting[read_id] = (peer, sources, targets)
        return read_id

    def gated_abandon(self: NixlTransport, read_id: ReadId) -> None:
        if held(self).waiting.pop(read_id, None) is not None:
            held(self).end(read_id, "given up before it began")
            return
        own = next((own for own, given in held(self).begun.items() if given == read_id), read_id)
        abandon(self, own)

    def gated_poll(self: NixlTransport) -> list[ReadResult]:
        mine = held(self)
        if mine.waiting and not gates.is_closed("pull"):
            for read_id, read in mine.waiting.items():
                try:
                    mine.begun[start(self, *read)] = read_id
                except TransferFailedError as error:  # it begins later than the puller asked, and fails as a read then
                    mine.end(read_id, str(error))
            mine.waiting.clear()
        found, mine.ended = [*mine.ended, *poll(self)], []
        return [_renamed(result, mine.begun.pop(result.read_id, result.read_id)) for result in found]

    NixlTransport.start_read = gated_start  # type: ignore[method-assign]
    NixlTransport.abandon = gated_abandon  # type: ignore[method-assign]
    NixlTransport.poll = gated_poll  # type: ignore[method-assign]


def _renamed(result: ReadResult, read_id: ReadId) -> ReadResult:
    return ReadResult(read_id=read_id, state=result.state, reason=result.reason, seconds=result.seconds)


def _gate_last_tokens(gates: GateFiles) -> None:
    """Last tokens wait before the router takes them, and are lost if the connection is meanwhile."""
    receive = GrpcLink.receive

    async def gated(self: GrpcLink) -> list[AnyMessage]:
        frame = await receive(self)
        updates = [update for message in frame if isinstance(message, Tokens) for update in message.updates]
        if any(update.finish_reason is not None for update in updates) and gates.is_closed("finish"):
            gates.say_held("finish")
            while gates.is_closed("finish"):
                if self.closed_reason is not None:
                    raise LinkClosedError(peer=self.peer, reason=self.closed_reason)
                await asyncio.sleep(LOOK_S)
        return frame

    GrpcLink.receive = gated  # type: ignore[method-assign]
