"""The decode worker: takes requests in, computes the tail of their prompts (all of it in colocated mode) and samples
every token.

A synchronous state machine (`core.worker.Worker`), driven by its host. A request whose prompt blocks come from a
prefill worker enters through `decode.intake`; the scheduler sees it only when every demanded block is verified
(TX-1). Knows nothing about links, threads or text.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from core.books import Check
from core.hashing import ExtraKey, group_hash, hash_blocks
from core.ids import Attempt, Epoch, RequestId, Role, RouterId, WorkerId
from core.layout import Handshake, needed_entries
from core.messages import (
    Audit,
    Cancel,
    Connect,
    Credit,
    Disconnect,
    Drain,
    FromWorker,
    Offer,
    Submit,
    TokenUpdate,
    ToWorker,
    WorkerStatus,
)
from core.outbox import Outbox, RefusalKind
from core.request import Request
from core.step_meter import STEP_COUNTERS, StepMeter
from core.worker import audit
from decode.counters import CREDITS_GRANTED, INTAKE_COUNTERS
from decode.intake import Intake
from decode.live import LiveRequest, check_live, token_update
from decode.peers import PeerTable
from decode.reception import Ready, Reception
from engine.scheduler import Progress, Scheduler, Sequence
from engine.step import Runner, StepPlan
from kvtransfer.plan import demand, num_full_blocks
from kvtransfer.puller import BlockPuller, PeerResult, PullResult
from kvtransfer.transport.base import Peer

SEQUENCES_WAITING_MAX = 4096
"""Sequences queued at one decode worker; more are refused as overloaded."""

DECODE_COUNTERS = (
    "pdcluster_decode_prompt_tokens_computed_total",
    "pdcluster_decode_prompt_tokens_cached_total",
    "pdcluster_decode_tokens_total",
    "pdcluster_preemptions_total",
    *STEP_COUNTERS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """Limits and names of one decode worker."""

    worker_id: WorkerId
    epoch: Epoch
    handshake: Handshake
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    credit_s: float


class DecodeWorker:
    """See the module."""

    role: Role = "decode"

    def __init__(
        self,
        settings: DecodeSettings,
        *,
        scheduler: Scheduler,
        runner: Runner,
        puller: BlockPuller,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.worker_id = settings.worker_id
        self.epoch = settings.epoch
        self._settings = settings
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._block_size = scheduler.table.block_size
        self._windows = scheduler.table.windows
        room = settings.handshake.layout.max_tokens(scheduler.pool.num_blocks)
        self._max_tokens = min(settings.max_model_len, room)
        self._runner = runner
        self._puller = puller
        self._outbox = Outbox(settings.worker_id, settings.epoch, (*DECODE_COUNTERS, *INTAKE_COUNTERS))
        self._meter = StepMeter(self._outbox, num_rows=scheduler.table.num_rows, now=timer)
        self._intake = Intake(
            pool=scheduler.pool,
            puller=puller,
            credit_s=settings.credit_s,
            tail_blocks=len(self._windows),
            outbox=self._outbox,
        )
        self._live: dict[RequestId, LiveRequest] = {}
        self._by_sequence: dict[int, LiveRequest] = {}
        self._peers = PeerTable(settings.worker_id, settings.handshake, puller)
        self._is_draining = False
        self._advanced_s = -math.inf

    def handshake(self) -> Handshake:
        return self._settings.handshake

    # ---- messages --------------------------------------------------------------------------------------------------

    def handle(self, source: RouterId, message: ToWorker, now: float) -> None:
        self._meter.lap("idle")
        self._handle(source, message, now)
        self._meter.lap("messages")

    def _handle(self, source: RouterId, message: ToWorker, now: float) -> None:
        if isinstance(message, Submit):
            self._on_submit(source, message, now)
        elif isinstance(message, Offer):
            self._intake.on_offer(message, now)
        elif isinstance(message, Cancel):
            self._cancel(message.request_id, message.attempt)
        elif isinstance(message, Connect):
            self._on_connect(source, message)
        elif isinstance(message, Disconnect):
            peer = Peer(worker=message.worker, epoch=message.epoch)
            if self._peers.disconnect(source, peer):
                self._lose_peer(peer)
        elif isinstance(message, Drain):
            self._is_draining = True
        elif isinstance(message, Audit):
            self._outbox.send(source, audit(self, message))

    def _on_submit(self, source: RouterId, message: Submit, now: float) -> None:
        known = self._attempt_of(message.request_id)
        if known is not None:
            if message.attempt <= known:
                return
            self._cancel(message.request_id, known)
        refusal = self._refusal(message)
        if refusal is not None:
            self._outbox.refuse(source, message, *refusal)
            return
        request = message.request
        num_blocks = num_full_blocks(len(request.token_ids), self._block_size)
        chain = request.token_ids[: num_blocks * self._block_size]
        hashes = hash_blocks(chain, self._block_size, extra_keys=_extra_keys(request))
        entries = demand(len(request.token_ids), self._windows, self._block_size)
        found = self._pool.find_prefix(hashes, self._windows, self._block_size, held={}, num_held=0)
        if message.prefill_worker is not None and found.num_blocks < num_blocks:
            reception = Reception(
                submit=message,
                router=source,
                keys=[group_hash(hashes[index], group) for group, index in entries],
                block_indexes=[index for _group, index in entries],
                hashes=hashes,
                received_s=now,
                deadline_s=now + request.deadline_s,
            )
            self._intake.add(reception)
            return
        held = [found.blocks[e] for e in needed_entries(self._windows, found.num_blocks, self._block_size)]
        self._pool.acquire(held)
        credit = Credit(
            request_id=message.request_id,
            attempt=message.attempt,
            num_held_blocks=len(entries),
            num_demanded_blocks=len(entries),
            ttl_s=self._settings.credit_s,
        )
        self._outbox.count(CREDITS_GRANTED)
        self._outbox.send(source, credit)
        ready = Ready(
            submit=message,
            router=source,
            hashes=hashes,
            num_blocks=found.num_blocks,
            blocks=held,
            received_s=now,
        )
        self._start(ready, now)

    def _attempt_of(self, request_id: RequestId) -> Attempt | None:
        live = self._live.get(request_id)
        return live.attempt if live is not None else self._intake.attempt_of(request_id)

    def _refusal(self, message: Submit) -> tuple[RefusalKind, str] | None:
        request = message.request
        num_tokens = len(request.token_ids) + request.sampling.max_tokens
        if self._is_draining:
            return "draining", "the worker is draining"
        if not request.token_ids or min(request.token_ids) < 0 or max(request.token_ids) >= self._settings.vocab_size:
            text = f"the prompt needs at least one token id, all in [0, {self._settings.vocab_size})"
            return "invalid", text
        if request.num_children < 1 or request.sampling.max_tokens < 1:
            return "invalid", "at least one child and one token must be asked for"
        if num_tokens > self._max_tokens:
            text = f"prompt and output would be {num_tokens} tokens, this worker takes {self._max_tokens}"
            return "too_long", text
        if self._scheduler.num_waiting + request.num_children > SEQUENCES_WAITING_MAX:
            return "overloaded", f"{SEQUENCES_WAITING_MAX} sequences are waiting"
        return None

    def _start(self, ready: Ready, now: float) -> None:
        """Hand a request to the scheduler, one sequence per child; they share the prompt's blocks."""
        request = ready.submit.request
        live = LiveRequest(
            request=request,
            attempt=ready.submit.attempt,
            router=ready.router,
            ready_s=now,
            deadline_s=ready.received_s + request.deadline_s,
            num_unfinished=request.num_children,
        )
        self._live[ready.submit.request_id] = live
        for child in range(request.num_children):
            if child > 0:
                self._pool.acquire(ready.blocks)
            sequence = self._sequence(request, child, ready)
            live.sequences.append(sequence)
            self._by_sequence[id(sequence)] = live
            self._scheduler.add(sequence)

    def _sequence(self, request: Request, child: int, ready: Ready) -> Sequence:
        return Sequence(
            name=f"{request.request_id}/{child}",
            token_ids=list(request.token_ids),
            prompt_length=len(request.token_ids),
            sampling=request.sampling,
            child=child,
            eos_token_ids=self._settings.eos_token_ids,
            hashes=list(ready.hashes),
            extra_keys=_extra_keys(request),
            num_held_blocks=ready.num_blocks,
            held_blocks=list(ready.blocks),
        )

    def _cancel(self, request_id: RequestId, attempt: Attempt) -> None:
        """Give everything back; another attempt's state is left alone (TX-2)."""
        if self._intake.attempt_of(request_id) == attempt:
            self._intake.cancel(request_id)
        live = self._live.get(request_id)
        if live is not None and live.attempt == attempt:
            self._end(live)

    def _end(self, live: LiveRequest) -> None:
        for sequence in live.sequences:
            self._scheduler.remove(sequence)
            del self._by_sequence[id(sequence)]
        del self._live[live.request.request_id]

    def disconnect(self, source: RouterId, now: float) -> None:
        self._intake.cancel_router(source)
        self._peers.forget_router(source)
        for live in [r for r in self._live.values() if r.router == source]:
            self._end(live)

    # ---- peers -----------------------------------------------------------------------------------------------------

    def _on_connect(self, source: RouterId, message: Connect) -> None:
        older, answers = self._peers.connect(source, message)
        for peer in older:
            self._lose_peer(peer)
        for router, answer in answers:
            self._outbox.send(router, answer)

    def _on_peer_result(self, result: PeerResult) -> None:
        if result.is_ready and self._peers.knows(result.peer):
            self._intake.peer_ready(result.peer)
        for router, answer in self._peers.answer(result):
            self._outbox.send(router, answer)
        if not result.is_ready:
            self._lose_peer(result.peer)

    def _lose_peer(self, peer: Peer) -> None:
        self._intake.peer_lost(peer)
        self._peers.remove(peer)

    # ---- work ------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> bool:
        self._advanced_s = now
        self._meter.lap("idle")
        results = self._puller.poll()
        for result in results:
            if isinstance(result, PullResult):
                self._intake.on_pull(result, now)
            else:
                self._on_peer_result(result)
        self._intake.advance(
            now, may_grant=not self._scheduler.is_short_of_blocks, headroom=self._scheduler.num_running
        )
        for ready in self._intake.take_ready():
            self._start(ready, now)
        self._expire(now)
        self._meter.lap("transfer")
        plan = self._scheduler.plan()
        if plan is not None:
            self._mark_started(plan, now)
        self._meter.lap("plan")
        if plan is None:
            return bool(results)
        output = self._runner.execute(plan)
        self._meter.step(num_tokens=plan.num_tokens, num_sequences=plan.num_sequences, timings_s=output.timings_s)
        self._deliver(self._scheduler.apply(plan, output))
        self._meter.lap("apply")
        return True

    def _expire(self, now: float) -> None:
        for live in [r for r in self._live.values() if r.deadline_s <= now]:
            self._outbox.refuse(live.router, live.key, "overloaded", "the request's deadline passed")
            self._end(live)

    def _mark_started(self, plan: StepPlan, now: float) -> None:
        counts = np.diff(plan.query_start)
        lengths = np.repeat(self._scheduler.table.prompt_length[plan.rows], counts)
        computed = int(np.count_nonzero(plan.positions < lengths))
        self._outbox.count("pdcluster_decode_prompt_tokens_computed_total", computed)
        if computed:
            for live in self._live.values():
                for sequence in live.sequences:
                    if sequence.first_step_s is None and sequence.row is not None:
                        sequence.first_step_s = now
                        self._outbox.count("pdcluster_decode_prompt_tokens_cached_total", sequence.num_cached_tokens)

    def _deliver(self, progress: Iterable[Progress]) -> None:
        """One Tokens message per request with everything this step produced for it."""
        updates: dict[RequestId, list[TokenUpdate]] = {}
        for item in progress:
            live = self._by_sequence[id(item.sequence)]
            updates.setdefault(live.request.request_id, []).append(token_update(item))
        for request_id, tokens in updates.items():
            live = self._live[request_id]
            self._outbox.count("pdcluster_decode_tokens_total", len(tokens))
            self._outbox.send(live.router, live.answer(tokens))
            live.num_unfinished -= sum(update.finish_reason is not None for update in tokens)
            if live.num_unfinished == 0:
                self._end(live)

    # ---- reports ---------------------------------------------------------------------------------------------------

    def take_outbound(self) -> list[tuple[RouterId, FromWorker]]:
        return self._outbox.take()

    def status(self) -> WorkerStatus:
        counters = {**self._outbox.counters, "pdcluster_preemptions_total": float(self._scheduler.num_preemptions)}
        return WorkerStatus(
            worker=self.worker_id,
            role=self.role,
            epoch=self.epoch,
            state="draining" if self._is_draining else "ready",
            num_waiting=self._scheduler.num_waiting + self._intake.num_waiting,
            num_running=self._scheduler.num_running,
            num_leases=0,
            num_pins=self._intake.num_pins,
            kv=self._pool.usage(),
            counters=counters,
            num_waiting_credit=self._intake.num_waiting,
        )

    def books(self) -> dict[str, int]:
        return {
            "requests": len(self._live),
            "waiting": self._scheduler.num_waiting,
            "running": self._scheduler.num_running,
            "blocks_used": self._pool.num_used,
            **self._intake.books(),
        }

    def checks(self) -> tuple[Check, ...]:
        return (
            self._scheduler.check,
            self._intake.check,
            lambda: self._peers.check(self._intake.peers),
            lambda: self._pool.check_claims(itertools.chain(self._scheduler.claims(), self._intake.claims())),
            lambda: check_live(self._live, self._by_sequence, self._scheduler.sequences(), self._advanced_s),
        )

    def check(self) -> None:
        for check in self.checks():
            check()

    def close(self) -> None:
        self._puller.close()


def _extra_keys(request: Request) -> tuple[ExtraKey, ...]:
    return (ExtraKey(tag="salt", value=request.salt),) if request.salt else ()
