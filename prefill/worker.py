"""The prefill worker: computes the full blocks of prompts and leases them to whoever will decode. It never samples.

A synchronous state machine (`core.worker.Worker`), driven by its host. A prompt is admitted only if the whole of it
fits; every block that is offered is pinned by a lease until released or expired (KV-4), with its digest taken the
moment it is final. Knows nothing about links, threads, decode workers' pools or text.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from core.books import Check
from core.hashing import ExtraKey
from core.ids import Attempt, BlockDigest, BlockId, Epoch, RequestId, Role, RouterId, WorkerId
from core.layout import Handshake
from core.messages import (
    Audit,
    Cancel,
    Drain,
    FromWorker,
    Prefill,
    Release,
    Renew,
    ToWorker,
    WorkerStatus,
)
from core.outbox import Outbox, RefusalKind
from core.step_meter import STEP_COUNTERS, StepMeter
from core.worker import audit
from engine.scheduler import Progress, Scheduler, Sequence
from engine.step import Runner
from kvtransfer.integrity import Digester
from kvtransfer.lease import LeaseTable
from kvtransfer.plan import demand, num_full_blocks
from kvtransfer.puller import BlockPuller
from prefill.handoff import Handoff

PREFILLS_WAITING_MAX = 1024
"""Prompts queued at one prefill worker; more are refused as overloaded."""

PREFILL_COUNTERS = (
    "pdcluster_prefill_computed_tokens_total",
    "pdcluster_prefill_cached_tokens_total",
    "pdcluster_prefill_prompts_total",
    "pdcluster_leases_granted_total",
    "pdcluster_leases_released_total",
    "pdcluster_leases_cancelled_total",
    "pdcluster_leases_expired_total",
    "pdcluster_blocks_offered_total",
    *STEP_COUNTERS,
)
LEASE_ENDED = "the lease ended before the reader took the blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """Limits and names of one prefill worker."""

    worker_id: WorkerId
    epoch: Epoch
    handshake: Handshake
    max_model_len: int
    vocab_size: int
    lease_s: float


class PrefillWorker:
    """See the module."""

    role: Role = "prefill"

    def __init__(
        self,
        settings: PrefillSettings,
        *,
        scheduler: Scheduler,
        runner: Runner,
        digester: Digester,
        serving: BlockPuller,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.worker_id = settings.worker_id
        self.epoch = settings.epoch
        self._settings = settings
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._block_size = scheduler.table.block_size
        self._windows = scheduler.table.windows
        self._max_tokens = settings.handshake.layout.max_tokens(scheduler.pool.num_blocks)
        self._runner = runner
        self._digester = digester
        self._serving = serving
        self._leases = LeaseTable(settings.lease_s)
        self._handoffs: dict[RequestId, Handoff] = {}
        self._by_sequence: dict[int, Handoff] = {}
        self._outbox = Outbox(settings.worker_id, settings.epoch, PREFILL_COUNTERS)
        self._meter = StepMeter(self._outbox, num_rows=scheduler.table.num_rows, now=timer)
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
        if isinstance(message, Prefill):
            self._on_prefill(source, message, now)
        elif isinstance(message, Cancel):
            self._cancel(message.request_id, message.attempt)
        elif isinstance(message, Release | Renew):
            self._on_lease_message(message, now)
        elif isinstance(message, Drain):
            self._is_draining = True
        elif isinstance(message, Audit):
            self._outbox.send(source, audit(self, message))

    def _on_lease_message(self, message: Release | Renew, now: float) -> None:
        """TX-2: a lease id counts only together with its attempt."""
        if not self._leases.belongs(message.lease_id, message.request_id, message.attempt):
            return
        if isinstance(message, Release):
            self._outbox.count("pdcluster_leases_released_total")
            self._pool.release(self._leases.release(message.lease_id))
        else:
            self._leases.renew(message.lease_id, now)

    def _on_prefill(self, source: RouterId, message: Prefill, now: float) -> None:
        leased = self._leases.latest_attempt(message.request_id)
        if leased is not None and message.attempt <= leased:
            return
        known = self._handoffs.get(message.request_id)
        if known is not None:
            if message.attempt <= known.attempt:
                return
            self._cancel(message.request_id, known.attempt)
        num_tokens = max(len(message.request.token_ids), 1)  # a prompt without tokens demands nothing, and is refused
        num_blocks = num_full_blocks(num_tokens, self._block_size)
        entries = demand(num_tokens, self._windows, self._block_size)
        refusal = self._refusal(message, num_blocks, len(entries))
        if refusal is not None:
            self._outbox.refuse(source, message, *refusal)
            return
        request = message.request
        sequence = Sequence(
            name=f"{message.request_id}/{message.attempt}",
            token_ids=list(request.token_ids[: num_blocks * self._block_size]),
            prompt_length=len(request.token_ids),
            sampling=None,
            extra_keys=(ExtraKey(tag="salt", value=request.salt),) if request.salt else (),
        )
        handoff = Handoff(
            request_id=message.request_id,
            attempt=message.attempt,
            router=source,
            sequence=sequence,
            num_held=message.num_held_blocks,
            entries=entries,
            received_s=now,
            deadline_s=now + request.deadline_s,
        )
        self._handoffs[message.request_id] = handoff
        self._by_sequence[id(sequence)] = handoff
        self._scheduler.add(sequence)

    def _refusal(self, message: Prefill, num_blocks: int, num_demanded: int) -> tuple[RefusalKind, str] | None:
        token_ids = message.request.token_ids
        if self._is_draining:
            return "draining", "the worker is draining"
        if not 0 <= message.num_held_blocks < num_demanded:
            text = f"num_held_blocks is {message.num_held_blocks}, the prompt demands {num_demanded} blocks"
            return "invalid", text
        if len(token_ids) > self._settings.max_model_len or num_blocks * self._block_size > self._max_tokens:
            limit = min(self._settings.max_model_len, self._max_tokens + self._block_size)
            text = f"the prompt has {len(token_ids)} tokens, this worker takes {limit}"
            return "too_long", text
        if min(token_ids) < 0 or max(token_ids) >= self._settings.vocab_size:
            return "invalid", f"token ids must lie in [0, {self._settings.vocab_size})"
        if self._scheduler.num_waiting >= PREFILLS_WAITING_MAX:
            return "overloaded", f"{PREFILLS_WAITING_MAX} prompts are waiting"
        return None

    def _cancel(self, request_id: RequestId, attempt: Attempt) -> None:
        """Stop computing and give the lease back. Older and newer attempts are left alone (TX-2)."""
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.attempt == attempt:
            self._end(handoff)
        num_leases = self._leases.num_leases
        self._pool.release(self._leases.release_request(request_id, attempt))
        self._outbox.count("pdcluster_leases_cancelled_total", num_leases - self._leases.num_leases)

    def _end(self, handoff: Handoff) -> None:
        self._scheduler.remove(handoff.sequence)
        del self._handoffs[handoff.request_id]
        del self._by_sequence[id(handoff.sequence)]

    def disconnect(self, source: RouterId, now: float) -> None:
        for handoff in [h for h in self._handoffs.values() if h.router == source]:
            self._cancel(handoff.request_id, handoff.attempt)

    # ---- work ------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> bool:
        self._advanced_s = now
        self._meter.lap("idle")
        self._expire(now)
        self._meter.lap("transfer")
        plan = self._scheduler.plan()
        progress = self._scheduler.take_admission_progress()
        if plan is not None:
            for sequence in [h.sequence for h in self._handoffs.values() if h.sequence.row is not None]:
                self._mark_started(sequence, now)
        self._meter.lap("plan")
        if plan is not None:
            output = self._runner.execute(plan)
            self._meter.step(num_tokens=plan.num_tokens, num_sequences=plan.num_sequences, timings_s=output.timings_s)
            self._outbox.count("pdcluster_prefill_computed_tokens_total", plan.num_tokens)
            progress += self._scheduler.apply(plan, output)
            now += sum(output.timings_s.values())  # leases start when the step ended, not when it began
        for item in _latest(progress):
            self._mark_started(item.sequence, now)
            self._offer_final_blocks(item, now)
        self._serving.serve_hint(self._leases.num_leases > 0)
        self._serving.poll()  # nothing is read here; it raises when nobody can read from here any more
        self._meter.lap("apply")
        return plan is not None or bool(progress)

    def _mark_started(self, sequence: Sequence, now: float) -> None:
        handoff = self._by_sequence[id(sequence)]
        if handoff.started_s is None:
            handoff.started_s = now
            self._outbox.count("pdcluster_prefill_cached_tokens_total", sequence.num_cached_tokens)

    def _expire(self, now: float) -> None:
        for lease in self._leases.reap(now):
            self._outbox.count("pdcluster_leases_expired_total")
            self._pool.release(list(lease.block_ids))
            handoff = self._handoffs.get(lease.request_id)
            if handoff is not None and handoff.lease_id == lease.lease_id:
                self._end(handoff)
                self._outbox.refuse(handoff.router, handoff.key, "transfer_failed", LEASE_ENDED)
        for handoff in [h for h in self._handoffs.values() if h.deadline_s <= now]:
            self._cancel(handoff.request_id, handoff.attempt)
            self._outbox.refuse(
                handoff.router,
                handoff.key,
                "overloaded",
                "the request's deadline passed before its prompt was computed",
            )

    def _offer_final_blocks(self, progress: Progress, now: float) -> None:
        """Lease and digest the blocks that became final, say so, and let the sequence go when all are."""
        handoff = self._by_sequence[id(progress.sequence)]
        final = handoff.final_entries(progress.num_computed // self._block_size)
        if final:
            row = progress.sequence.row
            assert row is not None, f"{progress.sequence.name} progressed without a row"
            blocks = [self._scheduler.table.row_block(row, group, index) for group, index in final]
            if not self._lease(handoff, blocks, now):
                self._cancel(handoff.request_id, handoff.attempt)
                self._outbox.refuse(handoff.router, handoff.key, "transfer_failed", LEASE_ENDED)
                return
            handoff.append(blocks, self._digests(blocks))
            self._outbox.count("pdcluster_blocks_offered_total", len(blocks))
            offer = handoff.offer(
                worker=self.worker_id,
                epoch=self.epoch,
                lease_ttl_s=self._settings.lease_s,
                num_cached_blocks=progress.sequence.num_cached_tokens // self._block_size,
                now=now,
            )
            self._outbox.send(handoff.router, offer)
        if progress.is_complete:
            self._outbox.count("pdcluster_prefill_prompts_total")
            self._end(handoff)

    def _lease(self, handoff: Handoff, blocks: list[BlockId], now: float) -> bool:
        """Pin blocks under the handoff's lease, renewed by the way. False, and nothing changed, when it has ended."""
        if handoff.lease_id is None:
            handoff.lease_id = self._leases.grant(handoff.request_id, handoff.attempt, now).lease_id
            self._outbox.count("pdcluster_leases_granted_total")
        if not self._leases.renew(handoff.lease_id, now):
            return False
        self._pool.acquire(blocks)
        assert self._leases.extend(handoff.lease_id, blocks), "KV-4: a renewed lease did not take blocks"
        return True

    def _digests(self, blocks: list[BlockId]) -> list[BlockDigest]:
        missing = [b for b in blocks if self._pool.digest(b) is None]
        for block, digest in zip(missing, self._digester.digest(missing), strict=True):
            self._pool.set_digest(block, digest)
        return [d for b in blocks if (d := self._pool.digest(b)) is not None]

    # ---- reports ---------------------------------------------------------------------------------------------------

    def take_outbound(self) -> list[tuple[RouterId, FromWorker]]:
        return self._outbox.take()

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            worker=self.worker_id,
            role=self.role,
            epoch=self.epoch,
            state="draining" if self._is_draining else "ready",
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_leases=self._leases.num_leases,
            num_pins=self._leases.num_blocks,
            kv=self._pool.usage(),
            counters=dict(self._outbox.counters),
        )

    def books(self) -> dict[str, int]:
        return {
            "requests": len(self._handoffs),
            "waiting": self._scheduler.num_waiting,
            "running": self._scheduler.num_running,
            "blocks_used": self._pool.num_used,
            "leases": self._leases.num_leases,
            "lease_pins": self._leases.num_blocks,
        }

    def checks(self) -> tuple[Check, ...]:
        return (
            self._scheduler.check,
            self._leases.check,
            lambda: self._pool.check_claims(itertools.chain(self._scheduler.claims(), self._leases.claims())),
            self._check_handoffs,
        )

    def check(self) -> None:
        for check in self.checks():
            check()

    def _check_handoffs(self) -> None:
        """RQ-2: every sequence is a hand-off's and the reverse; no hand-off and no lease is past its deadline."""
        known = {id(handoff.sequence) for handoff in self._handoffs.values()}
        assert known == set(self._by_sequence), "RQ-1: hand-offs and their index by sequence differ"
        names = {id(sequence): sequence.name for sequence in self._scheduler.sequences()}
        strays = [name for key, name in names.items() if key not in known]
        assert not strays, f"RQ-1: computed for no hand-off: {strays}"
        for request_id, handoff in self._handoffs.items():
            name = f"hand-off of {request_id} attempt {handoff.attempt}"
            assert handoff.request_id == request_id, f"TX-2: the {name} is listed as {handoff.request_id}"
            assert id(handoff.sequence) in names, f"RQ-1: the {name} is not computed any more and waits for ever"
            assert math.isfinite(handoff.deadline_s), f"RQ-2: the {name} has no deadline"
            assert handoff.deadline_s >= self._advanced_s, f"RQ-2: the {name} is past its deadline"
        lease_end_s = self._leases.next_deadline()
        assert lease_end_s is None or lease_end_s >= self._advanced_s, "KV-4: a lease is past its deadline"

    def close(self) -> None:
        self._serving.close()


def _latest(progress: list[Progress]) -> list[Progress]:
    """The last progress of each sequence, in order."""
    return list({id(p.sequence): p for p in progress}.values())
