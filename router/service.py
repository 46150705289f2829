"""The one request path: admits a prepared request, runs its flow over the workers and yields text, whoever asked.

Performs what `router.flow` decides. Used from one asyncio loop only. Knows nothing about HTTP or OpenAI.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Literal

from core.books import find_problems
from core.clock import Clock
from core.errors import InvalidRequestError, OverloadedError
from core.ids import Epoch, RequestId, RouterId, WorkerId
from core.link import Dialer
from core.messages import (
    Audited,
    AuditReport,
    RequestMessage,
    RouterStatus,
    WorkerAddress,
    WorkerSet,
    WorkerStatus,
)
from core.request import Request, RequestState
from router.actions import DEFAULT_STALL_LIMITS, Deliver, Fail, FlowAction, Send, StallLimits
from router.admission import Admission, Share, Ticket
from router.audit import Audits
from router.buffer import EventBuffer, IndexedEvent
from router.flow import RequestFlow
from router.generation import GenerationEvent, PreparedRequest, Summary
from router.metrics import RouterMetrics
from router.pool import WorkerPool
from router.run import Run
from router.select import RoundRobin, WorkerLife
from router.text import TextCodec
from router.worker_metrics import WorkerView
from router.workers.base import WorkerClient, WorkerListener
from router.workers.native import NativeClient

TICK_S = 0.1
"""How often deadlines are looked at."""
CHECK_S = 5.0
"""How often a router asserts its invariants; O(requests)."""
ASLEEP_S = 1.0
"""A look at the deadlines that comes so much late says that this process did not run in between."""

Mode = Literal["disaggregated", "colocated"]

_log = logging.getLogger(__name__)


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
        max_running_sequences: int = 512,
        max_queued_prompt_tokens: int = 262_144,
        request_timeout_s: float = 600.0,
        stall: StallLimits = DEFAULT_STALL_LIMITS,
        url: str = "",
        pid: int | None = None,
        facts: Callable[[], dict[str, int]] = dict,
        check_s: float = CHECK_S,
    ) -> None:
        """`facts`: numbers about the process, added to the books of an audit. `check_s`: how often the invariants are
        asserted, in seconds; 0: whenever deadlines are looked at."""
        self.router_id = router_id
        self.epoch = epoch
        self.clock = clock
        self.text = text
        self.model_name = model_name
        self.mode = mode
        self.url = url
        self._pid = os.getpid() if pid is None else pid
        self.started_wall_s = clock.wall()
        self.is_draining = False
        self.admission = Admission(
            clock=clock,
            max_requests=max_requests,
            max_running_sequences=max_running_sequences,
            max_queued_prompt_tokens=max_queued_prompt_tokens,
        )
        self._audits = Audits(clock)
        self._facts = facts
        self._dialer = dialer
        self._request_timeout_s = request_timeout_s
        self._stall = stall
        self._selector = RoundRobin()
        self.runs: dict[RequestId, Run] = {}
        self._numbers = itertools.count()
        self._ticker: asyncio.Task[None] | None = None
        self._check_s = check_s
        self._looked_s = clock.now()
        self.on_failure: Callable[[BaseException], None] = lambda _error: None
        """Called when an invariant is broken or deadlines are not watched any more: the process must end then."""
        self.pool = WorkerPool(clock=clock, make_client=self._make_client, sink=self, is_colocated=mode == "colocated")
        self._metrics = RouterMetrics(router_id=router_id, model_name=model_name, workers=self._worker_views)

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to watch deadlines. Workers come with `update_workers`."""
        assert self._ticker is None, "a router is started once"
        self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="deadlines")
        self._ticker.add_done_callback(self._ticker_ended)

    async def close(self) -> None:
        """End every request with an error and give all workers up."""
        self.is_draining = True
        for run in list(self.runs.values()):
            self._apply(run, run.flow.cancel())
            run.fail(OverloadedError(reason="the router is stopping"))
        await asyncio.sleep(0)  # cancellations leave with the next iteration
        await self.pool.close()
        if self._ticker is not None:
            self._ticker.cancel()
            (ended,) = await asyncio.gather(self._ticker, return_exceptions=True)
            if isinstance(ended, Exception):
                raise ended

    def drain(self) -> None:
        """Admit nothing more; what runs goes on."""
        self.is_draining = True

    def update_workers(self, workers: WorkerSet) -> None:
        """Follow a new set of workers."""
        self.pool.update(workers)

    def _ticker_ended(self, ticker: asyncio.Task[None]) -> None:
        if not ticker.cancelled() and (error := ticker.exception()) is not None:
            _log.critical("router %s cannot go on", self.router_id, exc_info=error)
            self.on_failure(error)

    async def _tick(self) -> None:
        self._looked_s = check_at_s = self.clock.now()
        while True:
            await self.clock.sleep(TICK_S)
            now = self.clock.now()
            asleep_s, self._looked_s = now - self._looked_s - TICK_S, now
            for run in list(self.runs.values()):
                if asleep_s >= ASLEEP_S:
                    run.flow.slept(asleep_s)
                self._apply(run, run.flow.expire(now))
                self._select(run)
            if now >= check_at_s:
                check_at_s = now + self._check_s
                self.check()

    # ---- what is there -----------------------------------------------------------------------------------------------

    def worker_statuses(self) -> list[WorkerStatus]:
        """The last heartbeat of each live worker."""
        return [client.status for client in self.pool.live() if client.status is not None]

    def _worker_views(self) -> list[WorkerView]:
        now = self.clock.now()
        return [
            WorkerView(
                status=client.status,
                heartbeat_age_s=now - client.heard_s,
                block_size=client.welcome.handshake.layout.block_size,
            )
            for client in self.pool.live()
            if client.status is not None and client.welcome is not None
        ]

    def num_workers_ready(self) -> dict[str, int]:
        """Workers that take requests, by role."""
        topology = self.pool.topology()
        return {"prefill": len(topology.prefill), "decode": len(topology.decode)}

    def num_pairs(self) -> int:
        """Pairs of workers that could serve a request."""
        return self.pool.topology().num_pairs

    def is_ready(self) -> bool:
        """A request could be served now."""
        return not self.is_draining and self._missing_role() is None

    def _missing_role(self) -> str | None:
        if self.num_pairs():
            return None
        return "prefill" if self.pool.topology().decode else "decode"

    def status(self) -> RouterStatus:
        """The heartbeat for the controller."""
        return RouterStatus(
            router=self.router_id,
            epoch=self.epoch,
            pid=self._pid,
            url=self.url,
            num_in_flight=self.admission.num_in_flight,
            num_in_flight_max=self.admission.max_requests,
            num_workers_ready=self.num_workers_ready(),
            workers=tuple(self.worker_statuses()),
        )

    def books(self) -> dict[str, int]:
        """What is held for requests, by name; all 0 when nothing runs."""
        return {
            "requests": len(self.runs),
            "in_flight": self.admission.num_in_flight,
            "queued_prompt_tokens": self.admission.num_queued_prompt_tokens,
            "open_choices": sum(run.num_open for run in self.runs.values()),
        }

    def check(self) -> None:
        """RQ-1, RQ-2: every request has a ticket and a deadline, and is in one state."""
        self.admission.check()
        self.pool.check()
        assert len(self.admission.tickets) == len(self.runs), (
            f"RQ-1: {len(self.admission.tickets)} tickets for {len(self.runs)} requests"
        )
        for request_id, run in self.runs.items():
            assert run.flow.request.request_id == request_id, f"RQ-1: {request_id} is misplaced"
            run.check()
            late_s = 0.0 if run.flow.is_ended else self._looked_s - run.flow.next_deadline()
            assert late_s <= 0, f"RQ-2: {request_id} is {late_s:.3f} s past its deadline"

    async def audit(self, number: int) -> AuditReport:
        """Let every worker that is known here check itself, and this router too."""
        answers, silent = await self._audits.ask(self.pool.workers(), self.pool.send)
        problems = find_problems([self.check])
        live = self.pool.live()
        facts = {"links": len(live), "undelivered": sum(client.num_undelivered for client in live), **self._facts()}
        books = {**self.books(), **facts}
        own = Audited(number=number, member=self.router_id, epoch=self.epoch, problems=problems, books=books)
        return AuditReport(number=number, members=(own, *answers), silent=tuple(silent))

    def render_metrics(self) -> bytes:
        """Prometheus' text format."""
        flows = [run.flow for run in self.runs.values()]
        num_running = sum(flow.request.num_children for flow in flows if flow.has_output)
        return self._metrics.render(
            num_in_flight=self.admission.num_in_flight,
            num_queued_prompt_tokens=self.admission.num_queued_prompt_tokens,
            num_waiting=sum(flow.request.num_children for flow in flows) - num_running,
            num_running=num_running,
        )

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self, prepared: PreparedRequest, client_request_id: str = ""
    ) -> AsyncGenerator[GenerationEvent, None]:
        """As `generate_all`, for one prompt."""
        async with aclosing(self.generate_all([prepared], client_request_id)) as events:
            async for _prompt, event in events:
                yield event

    async def generate_all(
        self, prompts: Sequence[PreparedRequest], client_request_id: str = ""
    ) -> AsyncGenerator[IndexedEvent, None]:
        """Events of the prompts of one client's request as they come, a Summary at the end of each prompt's.
        `client_request_id`: by which `abort` finds it; need not be unique.

        Raises a PdclusterError: at the first step when not all of them are admitted, later when one fails. Closing the
        iterator cancels what still runs at the workers.
        """
        tickets = self._admit(prompts)
        buffer = EventBuffer(sum(prompt.num_children for prompt in prompts))
        runs: list[Run] = []
        try:
            for index, prompt in enumerate(prompts):
                runs.append(self._open(prompt, client_request_id, buffer, index))
            for run in runs:
                self._select(run)
            num_open = len(runs)
            while num_open:
                index, event = await buffer.next_event()
                if runs[index].flow.has_output:
                    tickets[index].release_prompt()
                yield index, event
                num_open -= isinstance(event, Summary)
        finally:
            for ticket in tickets:
                ticket.release()
            for run in runs:
                self._apply(run, run.flow.cancel())
                del self.runs[run.flow.request.request_id]
                self._metrics.ended(run.outcome(), run.flow.facts.phase())

    def _admit(self, prompts: Sequence[PreparedRequest]) -> list[Ticket]:
        """A place for each. Raises OverloadedError, or InvalidRequestError when there never will be one."""
        if self.is_draining:
            self._metrics.refused("draining")
            raise OverloadedError(reason="the router is draining")
        shares = [Share(num_children=p.num_children, num_prompt_tokens=len(p.token_ids)) for p in prompts]
        try:
            return self.admission.reserve_all(shares)
        except (InvalidRequestError, OverloadedError) as error:
            self._metrics.refused("admission" if isinstance(error, OverloadedError) else "invalid")
            raise

    def abort(self, client_request_id: str) -> int:
        """End every request that has this id with a RequestCancelledError; both its workers let go at once. Returns
        how many there were; an id of "" names none.
        """
        runs = [run for run in self.runs.values() if client_request_id and run.client_request_id == client_request_id]
        runs = [run for run in runs if not run.flow.is_ended]
        for run in runs:
            self._apply(run, run.flow.abort())
        return len(runs)

    def _open(self, prepared: PreparedRequest, client_request_id: str, buffer: EventBuffer, prompt: int) -> Run:
        request = Request(
            request_id=RequestId(f"{self.router_id}-{self.epoch}-{next(self._numbers)}"),
            token_ids=prepared.token_ids,
            sampling=prepared.sampling,
            num_children=prepared.num_children,
            deadline_s=self._request_timeout_s,
        )
        flow = RequestFlow(request, self.clock.now(), self._stall)
        run = Run(
            flow=flow,
            prepared=prepared,
            text=self.text,
            metrics=self._metrics,
            buffer=buffer,
            prompt=prompt,
            client_request_id=client_request_id,
        )
        self.runs[request.request_id] = run
        return run

    def _select(self, run: Run) -> None:
        now = self.clock.now()
        if not run.flow.needs_pair(now):
            return
        pair = self._selector.select(self.pool.topology(), run.flow.failed)
        if pair is None:
            self._apply(run, run.flow.no_pair(self._missing_role() or "decode"))
            return
        self._metrics.attempt(run.flow.last_error)
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
                if (overflow := run.buffer.overflow) is not None:
                    self._apply(run, run.flow.abort(overflow))
            elif isinstance(action, Fail):
                if run.flow.state is RequestState.FAILED:
                    self._metrics.failed(action.error)
                run.fail(action.error)
            else:
                run.finish()

    # ---- reports of the pool -----------------------------------------------------------------------------------------

    def request_message(self, worker: WorkerId, message: RequestMessage) -> None:
        run = self.runs.get(message.request_id)
        if run is not None:
            self._apply(run, run.flow.handle(worker, message, self.clock.now()))

    def audited(self, worker: WorkerId, answer: Audited) -> None:
        self._metrics.audited(worker, len(answer.problems))
        self._audits.answer(worker, answer)

    def worker_lost(self, life: WorkerLife) -> None:
        self._metrics.worker_lost(life.worker)
        for run in list(self.runs.values()):
            self._apply(run, run.flow.worker_lost(life, self.clock.now()))

    def topology_changed(self) -> None:
        for run in list(self.runs.values()):
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
