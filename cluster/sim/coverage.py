"""Which cells of the fault matrix (`docs/faults.md`) a run has reached: what struck, while the request that it concerns
was at which point of its way.

Watches routers, pools and frames; changes nothing. Knows nothing about outcomes.
"""

from collections import Counter

from cluster.sim.clients import Reply
from cluster.sim.schedule import Fault, FaultKind
from cluster.sim.world import World
from core.errors import DeadlineExceededError
from core.ids import RequestId, RouterId, WorkerId
from core.messages import AnyMessage, KvUsage, Tokens
from core.request import RequestState
from router.run import Run
from router.service import RouterService

COLUMNS = ("selection", "credit", "queued", "chunks", "pull", "first-step", "decode", "finish")
ROWS = (
    "client-hang-up", "client-cancel", "deadline", "router-killed", "prefill-killed", "prefill-killed-last",
    "decode-killed", "decode-killed-last", "controller-killed", "router-stopped", "prefill-stopped", "decode-stopped",
    "controller-stopped", "prefill-stalled", "decode-stalled", "prefill-link-cut", "decode-link-cut", "transport-error",
    "late-write", "digest-mismatch", "handshake-refusal", "prefill-pool-full", "decode-pool-full",
)  # fmt: skip
READ_ROWS: dict[FaultKind, str] = {
    "spoil": "transport-error",
    "write-late": "late-write",
    "corrupt": "digest-mismatch",
}
SUFFIX: dict[FaultKind, str] = {"kill": "killed", "stop": "stopped", "stall": "stalled"}
_COLUMN_OF_PHASE = {
    "queue": "selection", "credit": "credit", "transfer": "pull", "tail": "first-step", "decode": "decode",
}  # fmt: skip

Cell = tuple[str, str]


class Coverage:
    """Of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._columns: dict[str, str] = {}
        """By client: where its request was when it was last looked at."""
        self._num_finished: Counter[RequestId] = Counter()
        """Choices whose last token has left its worker."""
        self.cells: Counter[Cell] = Counter()
        noting = world.network.on_send

        def on_send(sender: str, receiver: str, messages: list[AnyMessage]) -> None:
            self._see(messages)
            noting(sender, receiver, messages)

        world.network.on_send = on_send

    def _see(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            if isinstance(message, Tokens):
                ended = sum(update.finish_reason is not None for update in message.updates)
                self._num_finished[message.request_id] += ended

    def look(self) -> None:
        """Where every request is now, and whose pool is full."""
        workers = self._world.cluster.workers
        full = {id_: worker.role for id_, worker in workers.items() if _is_full(worker.status().kv)}
        for _router, run in self._runs():
            column = self._columns[run.client_request_id] = self._column(run)
            # Who has no pair yet may be given any.
            struck = full.values() if run.flow.pair is None else (full.get(one) for one in _workers(run).values())
            for role in {*struck} - {None}:
                self.cells[f"{role}-pool-full", column] += 1

    def client(self, row: str, answer: Reply) -> None:
        """A client leaves, or its request is cancelled, now."""
        for _router, run in self._runs():
            if run.client_request_id == answer.name:
                self.cells[row, self._column(run)] += 1

    def ended(self, answer: Reply) -> None:
        """An answer has ended."""
        if isinstance(answer.error, DeadlineExceededError):
            self.cells["deadline", self._columns.get(answer.name, "selection")] += 1

    def strikes(self, fault: Fault) -> None:
        """A fault strikes now."""
        for router, run in self._runs():
            for row in self._rows(fault, router, run):
                self.cells[row, self._column(run)] += 1

    def _rows(self, fault: Fault, router: RouterId, run: Run) -> list[str]:
        """The rows that this fault is to this request."""
        if (row := READ_ROWS.get(fault.kind)) is not None:
            return [row]
        role = fault.target.rsplit("-", 1)[0]
        if role == "controller":
            return [f"controller-{SUFFIX[fault.kind]}"] if fault.kind in SUFFIX else []
        if role == "router" and fault.kind in SUFFIX:
            return [f"router-{SUFFIX[fault.kind]}"] if fault.target == router else []
        if fault.kind == "cut":
            struck = fault.other.rsplit("-", 1)[0]
            return [f"{struck}-link-cut"] if fault.target == router and _concerns(run, struck, fault.other) else []
        if not _concerns(run, role, fault.target):
            return []
        if fault.kind == "other-weights":
            return ["handshake-refusal"] if role == "prefill" else []
        if fault.kind not in SUFFIX:
            return []
        is_last = fault.kind == "kill" and self._num_of(role) == 1
        return [f"{role}-{SUFFIX[fault.kind]}{'-last' if is_last else ''}"]

    def _num_of(self, role: str) -> int:
        return sum(worker.role == role for worker in self._world.cluster.workers.values())

    def _runs(self) -> list[tuple[RouterId, Run]]:
        routers: list[RouterService] = self._world.routers()
        return [(router.router_id, run) for router in routers for run in router.runs.values() if not run.flow.is_ended]

    def _column(self, run: Run) -> str:
        flow = run.flow
        if self._num_finished[flow.request.request_id] >= flow.request.num_children:
            return "finish"
        phase = flow.facts.phase()
        if phase == "prefill":
            return "queued" if flow.state is RequestState.CREDITED else "chunks"
        return _COLUMN_OF_PHASE[phase]


def _workers(run: Run) -> dict[str, WorkerId]:
    """Who serves a request now, by role."""
    pair = run.flow.pair
    if pair is None:
        return {}
    return {"decode": pair.decode.worker} | ({"prefill": pair.prefill.worker} if pair.prefill else {})


def _concerns(run: Run, role: str, worker: str) -> bool:
    """The worker serves the request, or may be chosen for it."""
    return run.flow.pair is None or _workers(run).get(role) == worker


def _is_full(kv: KvUsage) -> bool:
    return kv.blocks_free + kv.blocks_cached == 0
