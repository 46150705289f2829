"""The control loop: observe, decide, record, act, publish. It owns the record of epochs and a link to every router.

What it decides is durable before it is done, so that a controller that dies at any point is replaced by one that
reads the record, looks at what runs and goes on. Nothing that serves a request waits for it (CL-2). Knows nothing
about Ray: processes are behind `cluster.runtime.Runtime`.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from cluster.reconcile import (
    Action,
    Decision,
    MemberId,
    MemberState,
    Phase,
    StartRouter,
    StartWorker,
    Stop,
    Target,
    decide,
)
from cluster.router_contact import RouterContact
from cluster.runtime import Observed, Runtime
from cluster.silence import SilenceWatch
from core.clock import Clock
from core.errors import ClusterError, TierFilesError
from core.ids import Epoch, RouterId, WorkerId
from core.link import Dialer
from core.messages import HEARTBEAT_TIMEOUT_S, WorkerAddress, WorkerSet
from kvtransfer.tiers.files import Files

LOOP_S = 0.5
OBSERVE_TIMEOUT_S = 30.0
ACT_TIMEOUT_S = 30.0
SHUTDOWN_TIMEOUT_S = 30.0
SETTLE_MARGIN_S = 1.0
"""What leases or links that have ended held is given back so soon after."""
RECORD_SCHEMA_VERSION = 1
CONTROLLER_FILE = "controller.json"
"""The record's name."""

logger = logging.getLogger("pdcluster.controller")


class DurableMember(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a member's state that outlives the controller. Times do not: they are of one process's clock."""

    epoch: int
    phase: Phase
    num_restarts: int
    num_start_failures: int
    problem: str


class DurableRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's record file."""

    schema_version: int
    epoch: int
    """Of the controller itself: grows with each of its starts."""
    members: dict[str, DurableMember]


class RecordFile:
    """The record on disk, as JSON, replaced atomically."""

    def __init__(self, files: Files, path: Path, cluster: str) -> None:
        """`path`: where people find it, its last part the name of the file; `cluster`: for messages, too."""
        self._files = files
        self._name = path.name
        self._path = path
        self._cluster = cluster

    def read(self) -> DurableRecord:
        """The last record; an empty one when there is none. Raises ClusterError when it cannot be understood."""
        try:
            content = self._files.pread(self._name, 0, self._files.size_bytes(self._name))
            return msgspec.json.decode(content, type=DurableRecord)
        except TierFilesError as error:
            if error.kind == "missing":
                return DurableRecord(schema_version=RECORD_SCHEMA_VERSION, epoch=0, members={})
            raise self._unreadable(error) from error
        except msgspec.DecodeError as error:
            raise self._unreadable(error) from error

    def write(self, record: DurableRecord) -> None:
        """Replace the record: after a crash the old one or the new one is there. Raises TierFilesError."""
        files, temporary = self._files, f"{self._name}.new"
        if temporary in files.names():  # of a controller that died while it wrote: its bytes may reach further
            files.remove(temporary)
        files.pwrite(temporary, 0, msgspec.json.format(msgspec.json.encode(record)))
        files.fsync(temporary)
        files.rename(temporary, self._name)
        files.fsync_directory()

    def _unreadable(self, error: Exception) -> ClusterError:
        problem = f"the controller's record {self._path} cannot be read: {error}"
        return ClusterError(name=self._cluster, problem=problem)


class Controller:
    """The control loop of one cluster. Used from one asyncio loop; `status` may be called from any thread."""

    def __init__(
        self,
        *,
        target: Target,
        runtime: Runtime,
        clock: Clock,
        dialer: Dialer,
        record: RecordFile,
        pid: int | None = None,
    ) -> None:
        """`pid`: of the process it runs in; None: this one."""
        self._target = target
        self._pid = os.getpid() if pid is None else pid
        self._runtime = runtime
        self._clock = clock
        self._dialer = dialer
        self._file = record
        self._durable = record.read()
        self._durable = msgspec.structs.replace(self._durable, epoch=self._durable.epoch + 1)
        self._file.write(self._durable)
        self._states = _restore(self._durable, clock.now())
        self._problems: list[Observed] = []
        self._contacts: dict[MemberId, tuple[RouterContact, asyncio.Task[None]]] = {}
        self._silence = SilenceWatch()
        self._num_audits = 0
        self._is_stopping = False
        self._status: dict[str, Any] = {"name": target.config.name, "state": "starting", "reason": ""}
        self._status |= {"workers": [], "routers": [], "controller": self._describe_self("")}

    def status(self) -> dict[str, Any]:
        """What was published last, as builtins: name, state, reason, workers, routers, controller."""
        return self._status

    async def audit(self) -> dict[str, Any]:
        """What every member found when it checked itself, as builtins:

        reports     each router's AuditReport by its id; None for one that did not answer
        members     state by id of every member that should run
        settle_s    seconds within which what an ended request held is given back
        """
        self._num_audits += 1
        contacts = {str(member_id): contact for member_id, (contact, _task) in self._contacts.items()}
        reports = await asyncio.gather(*(contact.audit(self._num_audits) for contact in contacts.values()))
        return {
            "reports": {
                member_id: None if report is None else msgspec.to_builtins(report)
                for member_id, report in zip(contacts, reports, strict=True)
            },
            "members": {one["id"]: one["state"] for one in [*self._status["workers"], *self._status["routers"]]},
            "settle_s": max(self._target.config.transfer.lease_s, HEARTBEAT_TIMEOUT_S) + SETTLE_MARGIN_S,
        }

    async def run(self) -> None:
        """Loop until `shutdown`."""
        while not self._is_stopping:
            await self.step()
            await self._clock.sleep(LOOP_S)

    async def step(self) -> None:
        """One round of the loop."""
        # 1. Observe. A runtime that does not answer is no reason to change anything.
        try:
            observed = await asyncio.wait_for(self._runtime.observe(), OBSERVE_TIMEOUT_S)
        except (ClusterError, TimeoutError) as error:
            self._cannot(str(error) or f"the runtime did not answer within {OBSERVE_TIMEOUT_S:.0f} s")
            return
        if self._is_stopping:
            return
        observed, self._problems = observed + self._problems, []
        # 2. Decide.
        decision = decide(self._target, self._states, self._listen(observed), self._clock.now())
        # 3. Record, before anything is done. What cannot be recorded is not done, and decided again.
        try:
            self._write(decision.record)
        except TierFilesError as error:
            self._problems = [one for one in observed if not one.alive]  # the runtime reports them once
            self._cannot(str(error))
            return
        self._states = decision.record
        self._log(decision)
        # 4. Act.
        for action in decision.actions:
            if self._is_stopping:
                return
            await self._act(action)
        # 5. Publish.
        self._publish(observed, decision)

    def _cannot(self, problem: str) -> None:
        """This round changes nothing, and says why."""
        if problem != self._status["controller"]["problem"]:
            logger.warning("nothing changes: %s", problem)
        self._status = {**self._status, "controller": self._describe_self(problem)}

    def _listen(self, observed: list[Observed]) -> list[Observed]:
        """What was observed, with how long each listening member has been silent."""
        listening = {(one.id, one.epoch): one for one in observed if one.alive and one.endpoint}
        heard = {
            (contact.router.id, contact.router.epoch): contact.status
            for contact, _task in self._contacts.values()
            if contact.status is not None and contact.is_heard()
        }
        silent = self._silence.look(
            [life for life, one in listening.items() if one.role == "router"],
            [life for life, one in listening.items() if one.role != "router"],
            heard,
            self._clock.now(),
        )
        return [replace(one, silent_s=silent.get((one.id, one.epoch), 0.0)) for one in observed]

    async def shutdown(self) -> None:
        """End every process, routers first, and the loop. Idempotent."""
        self._is_stopping = True
        for _contact, task in self._contacts.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self._contacts.values()), return_exceptions=True)
        self._contacts.clear()
        observed = await asyncio.wait_for(self._runtime.observe(), OBSERVE_TIMEOUT_S)
        for group in (
            [one for one in observed if one.role == "router"],
            [one for one in observed if one.role != "router"],
        ):
            stops = [self._runtime.stop(one.id, one.epoch) for one in group if one.alive]
            await asyncio.wait_for(asyncio.gather(*stops), SHUTDOWN_TIMEOUT_S)

    async def _act(self, action: Action) -> None:
        try:
            async with asyncio.timeout(ACT_TIMEOUT_S):
                match action:
                    case StartWorker(spec=spec):
                        await self._runtime.start_worker(spec)
                    case StartRouter(spec=router):
                        await self._runtime.start_router(router)
                    case Stop(id=member_id, epoch=epoch):
                        await self._runtime.stop(member_id, epoch)
        except (ClusterError, TimeoutError) as error:
            logger.warning("%s: %s", action, error)
            if not isinstance(action, Stop):  # a stop that failed is decided again
                failed = action.spec
                problem = str(error) or f"could not be started within {ACT_TIMEOUT_S:.0f} s"
                self._problems.append(
                    Observed(id=failed.id, role=failed.role, epoch=failed.epoch, alive=False, problem=problem)
                )

    def _write(self, states: Mapping[MemberId, MemberState]) -> None:
        members = {str(member_id): _keep(state) for member_id, state in states.items()}
        durable = msgspec.structs.replace(self._durable, members=members)
        if durable != self._durable:
            self._file.write(durable)
            self._durable = durable

    def _publish(self, observed: list[Observed], decision: Decision) -> None:
        epochs = {member_id: state.epoch for member_id, state in self._states.items()}
        current = {one.id: one for one in observed if one.alive and one.epoch == epochs.get(one.id)}
        self._contact_routers([one for one in current.values() if one.role == "router" and one.endpoint])
        workers = WorkerSet(
            workers=tuple(
                WorkerAddress(
                    worker=WorkerId(one.id), role=one.role, epoch=one.epoch, endpoint=one.endpoint, pid=one.pid or 0
                )
                for one in sorted(current.values(), key=lambda one: one.id)
                if one.role != "router" and one.endpoint
            )
        )
        for contact, _task in self._contacts.values():
            contact.tell(workers)
        described = [self._describe(member_id, role, current) for member_id, role in self._target.members().items()]
        self._status = {
            "name": self._target.config.name,
            "state": decision.state,
            "reason": decision.reason,
            "workers": [one for one in described if one["role"] != "router"],
            "routers": [one for one in described if one["role"] == "router"],
            "controller": self._describe_self(""),
        }

    def _contact_routers(self, routers: list[Observed]) -> None:
        """Open a contact to each router process that listens, and give up those to any other."""
        wanted = {one.id: one for one in routers}
        for member_id, (contact, task) in list(self._contacts.items()):
            if wanted.get(member_id) != contact.router:
                task.cancel()
                del self._contacts[member_id]
        for member_id, router in wanted.items():
            if member_id not in self._contacts:
                epoch = Epoch(self._durable.epoch)
                contact = RouterContact(router=router, epoch=epoch, dialer=self._dialer, clock=self._clock)
                self._contacts[member_id] = (contact, asyncio.create_task(contact.run()))

    def _describe(self, member_id: MemberId, role: str, current: Mapping[MemberId, Observed]) -> dict[str, Any]:
        state, one = self._states[member_id], current.get(member_id)
        described: dict[str, Any] = {
            "id": str(member_id),
            "role": role,
            "epoch": int(state.epoch),
            "state": "restarting" if state.phase == "absent" else state.phase,
            "pid": one.pid if one else None,
            "endpoint": one.endpoint if one else None,
            "problem": state.problem,
            "restarts": state.num_restarts,
        }
        if role == "router":
            described["url"] = one.url if one else None
            contact = self._contacts[member_id][0] if member_id in self._contacts else None
            described["status"] = msgspec.to_builtins(contact.status) if contact and contact.is_heard() else None
            described["silent_s"] = round(contact.silent_s(), 3) if contact else None
        return described

    def _describe_self(self, problem: str) -> dict[str, Any]:
        return {"pid": self._pid, "epoch": self._durable.epoch, "problem": problem}

    def _log(self, decision: Decision) -> None:
        for action in decision.actions:
            match action:
                case Stop(id=member_id, epoch=epoch):
                    logger.info("stop %s, epoch %d", member_id, epoch)
                case StartWorker(spec=spec):
                    logger.info("start %s, epoch %d", spec.id, spec.epoch)
                case StartRouter(spec=router):
                    logger.info("start %s, epoch %d", router.id, router.epoch)
        if decision.reason and decision.reason != self._status["reason"]:
            logger.warning("%s: %s", decision.state, decision.reason)


def _keep(state: MemberState) -> DurableMember:
    return DurableMember(
        epoch=state.epoch,
        phase=state.phase,
        num_restarts=state.num_restarts,
        num_start_failures=state.num_start_failures,
        problem=state.problem,
    )


def _restore(record: DurableRecord, now: float) -> dict[MemberId, MemberState]:
    """The states at the start of a controller: what was recorded, at this process's time."""
    states: dict[MemberId, MemberState] = {}
    for member_id, kept in record.members.items():
        states[RouterId(member_id)] = MemberState(
            epoch=Epoch(kept.epoch),
            phase=kept.phase,
            since_s=now,
            retry_at_s=now,
            num_restarts=kept.num_restarts,
            num_start_failures=kept.num_start_failures,
            problem=kept.problem,
        )
    return states
