"""The one request path: admits a prepared request, runs its flow over the workers and yields text, whoever asked.

Performs what `router.flow` decides. Used from one asyncio loop only. Knows nothing about HTTP or OpenAI.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Iterable
from typing import Literal

from core.clock import Clock
from core.errors import NoWorkerError, OverloadedError
from core.ids import Epoch, RequestId, RouterId, WorkerId
from core.link import Dialer
from core.messages import RequestMessage, RouterStatus, WorkerAddress, WorkerSet, WorkerStatus
from core.request import Request
from router.actions import Deliver, Fail, FlowAction, Send
from router.admission import Admission
from router.flow import RequestFlow
from router.generation import GenerationEvent, PreparedRequest, Summary
from router.metrics import RouterMetrics
from router.pool import WorkerPool
from router.run import Run
from router.select import RoundRobin, WorkerLife
from router.text import TextCodec
from router.workers.base import WorkerClient, WorkerListener
from router.workers.native import NativeClient

TICK_S = 0.1
"""How often deadlines are looked at."""

Mode = Literal["disaggregated", "colocated"]


class RouterService:
    """One router."""

    def __init__(
        self,
        *,
        router_id: RouterId,
        epoch: Epoch,
        clock: Clock,
        dialer: Dialer,
        text: TextCodec,
        model_name: str,
        mode: Mode = "disaggregated",
        max_requests: int = 256,
        max_queued_prompt_tokens: int = 262_144,
        request_timeout_s: float = 600.0,
        url: str = "",
    ) -> None:
        self.router_id = router_id
        self.epoch = epoch
        self.clock = clock
        self.text = text
        self.model_name = model_name
        self.mode = mode
        self.url = url
        self.started_wall_s = clock.wall()
        self.is_draining = False
        self.admission = Admission(max_requests=max_requests, max_queued_prompt_tokens=max_queued_prompt_tokens)
        self._dialer = dialer
        self._request_timeout_s = request_timeout_s
        self._selector = RoundRobin()
        self._runs: dict[RequestId, Run] = {}
        self._numbers = itertools.count()
        self._ticker: asyncio.Task[None] | None = None
        self.pool = WorkerPool(clock=clock, make_client=self._make_client, sink=self, is_colocated=mode == "colocated")
        self._metrics = RouterMetrics(model_name, self.worker_statuses)

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to watch deadlines. Workers come with `update_workers`."""
        assert self._ticker is None, "a router is started once"
        self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="deadlines")

    async def close(self) -> None:
        """End every request with an error and give all workers up."""
        self.is_draining = True
        for run in list(self._runs.values()):
            self._apply(run, run.flow.cancel())
            run.fail(OverloadedError(reason="the router is stopping"))
        await asyncio.sleep(0)  # cancellations leave with the next iteration
        await self.pool.close()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)

    def drain(self) -> None:
        """Admit nothing more; what runs goes on."""
        self.is_draining = True

    def update_workers(self, workers: WorkerSet) -> None:
        """Follow a new set of workers."""
        self.pool.update(workers)

    async def _tick(self) -> None:
        while True:
            await self.clock.sleep(TICK_S)
            now = self.clock.now()
            for run in list(self._runs.values()):
                self._apply(run, run.flow.expire(now))
                self._select(run)

    # ---- what is there -----------------------------------------------------------------------------------------------

    def worker_statuses(self) -> list[WorkerStatus]:
        """The last heartbeat of each live worker."""
        return [client.status for client in self.pool.live() if client.status is not None]

    def num_workers_ready(self) -> dict[str, int]:
        """Workers that take requests, by role."""
        topology = self.pool.topology()
        return {"prefill": len(topology.prefill), "decode": len(topology.decode)}

    def num_pairs(self) -> int:
        """Pairs of workers that could serve a request."""
        topology = self.pool.topology()
        return sum(len(topology.pairs_of(decode)) for decode in topology.decode)

    def is_ready(self) -> bool:
        """A request could be served now."""
        return not self.is_draining and self._missing_role() is None

    def _missing_role(self) -> str | None:
        if self.num_pairs():
            return None
        return "prefill" if self.pool.topology().decode else "decode"

    def max_model_len(self) -> int | None:
        """Tokens of prompt plus output that every live decode worker can hold; None without one."""
        limits = [
            min(w.max_model_len, w.handshake.num_blocks * w.handshake.layout.block_size)
            for client in self.pool.live("decode")
            if (w := client.welcome) is not None
        ]
        return min(limits, default=None)

    def require_max_model_len(self) -> int:
        """As `max_model_len`; raises NoWorkerError without a decode worker."""
        limit = self.max_model_len()
        if limit is None:
            raise NoWorkerError(role="decode")
        return limit

    def status(self) -> RouterStatus:
        """The heartbeat for the controller."""
        return RouterStatus(
            router=self.router_id,
            epoch=self.epoch,
            pid=os.getpid(),
            url=self.url,
            num_in_flight=self.admission.num_in_flight,
            num_in_flight_max=self.admission.max_requests,
            num_workers_ready=self.num_workers_ready(),
            workers=tuple(self.worker_statuses()),
        )

    def render_metrics(self) -> bytes:
        """Prometheus' text format."""
        running = sum(run.flow.has_output for run in self._runs.values())
        return self._metrics.render(
            num_in_flight=self.admission.num_in_flight,
            num_queued_prompt_tokens=self.admission.num_queued_prompt_tokens,
            num_waiting=len(self._runs) - running,
            num_running=running,
        )

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, prepared: PreparedRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Events of one request, a Summary at the end.

        Raises a PdclusterError: at the first step when the request is not admitted, later when it fails. Closing the
        iterator cancels the request at the workers.
        """
        if self.is_draining:
            raise OverloadedError(reason="the router is draining")
        ticket = self.admission.reserve(num_children=prepared.num_children, num_prompt_tokens=len(prepared.token_ids))
        run = self._open(prepared)
        try:
            self._select(run)
            while True:
                event = await run.next_event()
                if run.flow.has_output:
                    ticket.release_prompt()
                yield event
                if isinstance(event, Summary):
                    return
        finally:
            self._apply(run, run.flow.cancel())
            del self._runs[run.flow.request.request_id]
            ticket.release()
            self._metrics.ended(run.outcome())

    def _open(self, prepared: PreparedRequest) -> Run:
        request = Request(
            request_id=RequestId(f"{self.router_id}-{self.epoch}-{next(self._numbers)}"),
            token_ids=prepared.token_ids,
            sampling=prepared.sampling,
            num_children=prepared.num_children,
            deadline_s=self._request_timeout_s,
        )
        flow = RequestFlow(request, self.clock.now())
        run = Run(flow=flow, prepared=prepared, text=self.text, clock=self.clock, metrics=self._metrics)
        self._runs[request.request_id] = run
        return run

    def _select(self, run: Run) -> None:
        now = self.clock.now()
        if not run.flow.needs_pair(now):
            return
        pair = self._selector.select(self.pool.topology(), run.flow.avoid)
        if pair is None:
            self._apply(run, run.flow.no_pair(self._missing_role() or "decode"))
            return
        self._metrics.attempt()
        decode = next(client for client in self.pool.live("decode") if client.life == pair.decode)
        assert decode.welcome is not None
        run.block_size = decode.welcome.handshake.layout.block_size
        self._apply(run, run.flow.assign(pair, now))

    def _apply(self, run: Run, actions: Iterable[FlowAction]) -> None:
        """Perform actions in order."""
        for action in actions:
            if isinstance(action, Send):
                self.pool.send(action.worker, action.message)
            elif isinstance(action, Deliver):
                for child in run.deliver(action.updates):
                    self._apply(run, run.flow.end_child(child))
            elif isinstance(action, Fail):
                run.fail(action.error)
            else:
                run.finish()

    # ---- reports of the pool -----------------------------------------------------------------------------------------

    def request_message(self, worker: WorkerId, message: RequestMessage) -> None:
        run = self._runs.get(message.request_id)
        if run is not None:
            self._apply(run, run.flow.handle(worker, message, self.clock.now()))

    def worker_lost(self, life: WorkerLife) -> None:
        for run in list(self._runs.values()):
            self._apply(run, run.flow.worker_lost(life, self.clock.now()))

    def topology_changed(self) -> None:
        for run in list(self._runs.values()):
            self._select(run)

    def _make_client(self, address: WorkerAddress, listener: WorkerListener) -> WorkerClient:
        return NativeClient(
            address=address,
            router_id=self.router_id,
            router_epoch=self.epoch,
            clock=self.clock,
            dialer=self._dialer,
            listener=listener,
        )
