"""All workers a router knows: one client for each, which pairs can exchange KV, and who is told when one comes or goes.

Follows the latest WorkerSet. Connects every live decode worker to every live prefill worker. Knows nothing about
requests beyond handing their messages on.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from core.clock import Clock
from core.errors import NoWorkerError
from core.ids import Role, WorkerId
from core.messages import (
    Audited,
    Connect,
    Disconnect,
    FromWorker,
    PeerReady,
    PeerRefused,
    RequestMessage,
    ToWorker,
    WorkerAddress,
    WorkerSet,
    WorkerStatus,
)
from router.select import Topology, WorkerLife
from router.workers.base import WorkerClient, WorkerListener

CONNECT_RETRY_S = 5.0
"""A pair that is not ready is asked again after so long."""

_log = logging.getLogger(__name__)

MakeClient = Callable[[WorkerAddress, WorkerListener], WorkerClient]


class RequestSink(Protocol):
    """Who handles what workers say about requests."""

    def request_message(self, worker: WorkerId, message: RequestMessage) -> None: ...

    def worker_lost(self, life: WorkerLife) -> None: ...

    def topology_changed(self) -> None: ...

    def audited(self, worker: WorkerId, answer: Audited) -> None: ...


class WorkerPool:
    """See above. Used from one asyncio loop only."""

    def __init__(self, *, clock: Clock, make_client: MakeClient, sink: RequestSink, is_colocated: bool) -> None:
        self._clock = clock
        self._make_client = make_client
        self._sink = sink
        self._is_colocated = is_colocated
        self._clients: dict[WorkerId, WorkerClient] = {}
        self._connected: set[tuple[WorkerLife, WorkerLife]] = set()
        self._refused: dict[tuple[WorkerLife, WorkerLife], str] = {}
        self._asked_s: dict[tuple[WorkerLife, WorkerLife], float] = {}
        self._closing: set[asyncio.Task[None]] = set()

    # ---- what is there -----------------------------------------------------------------------------------------------

    def live(self, role: Role | None = None) -> list[WorkerClient]:
        """Workers with a working link, draining ones included, by name."""
        clients = [c for c in self._clients.values() if c.welcome is not None and role in (None, c.role)]
        return sorted(clients, key=lambda c: c.worker)

    def workers(self) -> list[WorkerId]:
        """Every worker of the latest set, with a link or without."""
        return sorted(self._clients)

    def topology(self) -> Topology:
        """Workers that take requests."""
        ready = [c for c in self.live() if c.state == "ready"]
        return Topology(
            prefill=tuple(c.life for c in ready if c.role == "prefill"),
            decode=tuple(c.life for c in ready if c.role == "decode"),
            connected=frozenset(self._connected),
            is_colocated=self._is_colocated,
        )

    def max_model_len(self) -> int | None:
        """Tokens of prompt plus output that every live decode worker can hold; None without one."""
        limits = [
            min(w.max_model_len, w.handshake.layout.max_tokens(w.handshake.num_blocks))
            for client in self.live("decode")
            if (w := client.welcome) is not None
        ]
        return min(limits, default=None)

    def require_max_model_len(self) -> int:
        """As `max_model_len`; raises NoWorkerError without a decode worker."""
        limit = self.max_model_len()
        if limit is None:
            raise NoWorkerError(role="decode")
        return limit

    def refusals(self) -> list[str]:
        """Why some live pairs cannot exchange KV."""
        return list(self._refused.values())

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        """Dropped when the worker is gone: whoever sends is told of the loss."""
        client = self._clients.get(worker)
        if client is not None:
            client.send(message)

    # ---- the set of workers ------------------------------------------------------------------------------------------

    def update(self, workers: WorkerSet) -> None:
        """Follow a new set. A worker at another endpoint or in another epoch is a new life."""
        wanted = {address.worker: address for address in workers.workers}
        for worker, client in list(self._clients.items()):
            address = wanted.get(worker)
            if address is None or (address.endpoint, address.epoch) != (client.address.endpoint, client.address.epoch):
                self._give_up(client)
        for worker, address in wanted.items():
            if worker not in self._clients:
                client = self._make_client(address, self)
                self._clients[worker] = client
                client.start()

    def _give_up(self, client: WorkerClient) -> None:
        del self._clients[client.worker]
        if client.welcome is not None:
            self._forget(client)
        task = asyncio.get_running_loop().create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for client in list(self._clients.values()):
            self._give_up(client)
        await asyncio.gather(*self._closing)

    # ---- reports of the clients --------------------------------------------------------------------------------------

    def worker_up(self, client: WorkerClient) -> None:
        if self._clients.get(client.worker) is not client:
            return
        for other in self.live("prefill" if client.role == "decode" else "decode"):
            self._connect(*((client, other) if client.role == "decode" else (other, client)))
        self._sink.topology_changed()

    def worker_message(self, client: WorkerClient, message: FromWorker) -> None:
        if self._clients.get(client.worker) is not client:
            return
        if isinstance(message, RequestMessage):
            self._sink.request_message(client.worker, message)
        elif isinstance(message, WorkerStatus):
            self._connect_again(client)
        elif isinstance(message, Audited):
            self._sink.audited(client.worker, message)
        elif isinstance(message, PeerReady | PeerRefused):
            self._peer_answered(client, message)

    def worker_down(self, client: WorkerClient, reason: str) -> None:
        if self._clients.get(client.worker) is client:
            self._forget(client)

    def _forget(self, client: WorkerClient) -> None:
        """Everything known about this life ends, and whoever depends on it is told."""
        life = client.life
        self._connected = {pair for pair in self._connected if life not in pair}
        self._refused = {pair: reason for pair, reason in self._refused.items() if life not in pair}
        self._asked_s = {pair: asked for pair, asked in self._asked_s.items() if life not in pair}
        if client.role == "prefill":
            for decode in self.live("decode"):
                decode.send(Disconnect(worker=life.worker, epoch=life.epoch))
        self._sink.worker_lost(life)
        self._sink.topology_changed()

    def check(self) -> None:
        """TX-2: pairs are of live lives only; links keep to their limits (RQ-2)."""
        lives = {client.life for client in self.live()}
        for pair in [*self._connected, *self._refused, *self._asked_s]:
            assert lives.issuperset(pair), f"TX-2: the pair {pair} outlived one of its workers"
        both = self._connected & set(self._refused)
        assert not both, f"TX-2: pairs are connected and refused: {both}"
        for client in self._clients.values():
            client.check()

    # ---- pairs -------------------------------------------------------------------------------------------------------

    def _connect(self, decode: WorkerClient, prefill: WorkerClient) -> None:
        assert prefill.welcome is not None
        self._asked_s[(decode.life, prefill.life)] = self._clock.now()
        life = prefill.life
        decode.send(Connect(worker=life.worker, epoch=life.epoch, handshake=prefill.welcome.handshake))

    def _connect_again(self, client: WorkerClient) -> None:
        if client.role != "decode":
            return
        for prefill in self.live("prefill"):
            pair = (client.life, prefill.life)
            asked_s = self._asked_s.get(pair, float("-inf"))
            if pair not in self._connected and self._clock.now() - asked_s >= CONNECT_RETRY_S:
                self._connect(client, prefill)

    def _peer_answered(self, decode: WorkerClient, message: PeerReady | PeerRefused) -> None:
        prefill = self._clients.get(message.worker)
        if prefill is None or prefill.welcome is None or prefill.life.epoch != message.epoch:
            return
        pair = (decode.life, prefill.life)
        if isinstance(message, PeerReady):
            self._connected.add(pair)
            self._refused.pop(pair, None)
            self._sink.topology_changed()
        else:
            if self._refused.get(pair) != message.reason:
                _log.warning("%s cannot read from %s: %s", decode.worker, prefill.worker, message.reason)
            self._connected.discard(pair)
            self._refused[pair] = message.reason
