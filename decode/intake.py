"""The intake: credit, bind, pull, verify, commit. How a request's prompt blocks get from a prefill worker into this
pool.

    Submit -> (waits for credit) -> Credit -> first Offer: blocks are bound -> reads -> verified -> committed -> ready

A request that waits for credit holds nothing. Credit is a promise in numbers; blocks are bound at the first offer. A
block enters the pool's index only after its digest was verified (KV-5), and a request is ready only when every demanded
block is (TX-1). Destinations of a read that was given up stay bound until the puller says that nothing can write them
any more. Pure but for the puller behind its seam. Knows nothing about sampling or steps.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from core.books import Claim
from core.ids import Attempt, Epoch, LeaseId, RequestId, RouterId, WorkerId
from core.messages import Credit, FromWorker, Offer, PullDone, Renew
from core.outbox import Outbox, RefusalKind
from core.request import AttemptKey
from decode.accounts import check_abandoned, check_active, check_reads, check_waiting
from decode.counters import CREDITS_GRANTED, count_read
from decode.reception import Ready, Reception
from engine.kv.pool import BlockPool
from kvtransfer.puller import READ_TIMEOUT_S, BlockPuller, PullJob, PullResult
from kvtransfer.session import RENEW_FRACTION, BlockPull, PullSession, SessionFailure
from kvtransfer.transport.base import Peer

CREDITS_WAITING_MAX = 1024
"""Requests that wait for credit at one decode worker; more are refused as overloaded."""

NO_OFFER = "no offer came in time"
NO_ROOM = "the promised blocks did not become free"
READ_HOPELESS_S = 1.5 * READ_TIMEOUT_S
"""A read whose end was not reported by then fails its attempt; its destinations stay bound until the report."""


class Intake:
    """All receptions of one decode worker."""

    def __init__(
        self, *, pool: BlockPool, puller: BlockPuller, credit_s: float, tail_blocks: int, outbox: Outbox
    ) -> None:
        """`tail_blocks`: blocks that the tail of a prompt takes, one for each group of layers."""
        self._pool = pool
        self._puller = puller
        self._tail_blocks = tail_blocks
        self._credit_s = credit_s
        self._peers: dict[WorkerId, Epoch] = {}
        self._waiting: deque[Reception] = deque()
        self._active: dict[RequestId, Reception] = {}
        self._abandoned: dict[AttemptKey, Reception] = {}
        self._ready: list[Ready] = []
        self._outbox = outbox
        self._advanced_s = -math.inf

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_pins(self) -> int:
        """References to blocks that receptions hold."""
        return sum(len(r.held) + len(r.targets) for r in self._receptions())

    def add(self, reception: Reception) -> None:
        """Take a request that needs blocks from its prefill worker; answered by Credit or Refused."""
        worker = reception.submit.prefill_worker
        if worker is None or worker not in self._peers:
            self._refuse(reception, "unknown_peer", f"no connection to prefill worker {worker}")
        elif len(self._waiting) >= CREDITS_WAITING_MAX:
            self._refuse(reception, "overloaded", f"{CREDITS_WAITING_MAX} requests wait for credit")
        else:
            self._waiting.append(reception)

    def attempt_of(self, request_id: RequestId) -> Attempt | None:
        """The attempt that waits or pulls here, or the latest whose reads have not ended."""
        reception = self._find(request_id)
        if reception is not None:
            return reception.submit.attempt
        return max((key.attempt for key in self._abandoned if key.request_id == request_id), default=None)

    def cancel(self, request_id: RequestId) -> None:
        """Give up a request without an answer. Idempotent."""
        reception = self._find(request_id)
        if reception is not None:
            self._drop(reception)

    def cancel_router(self, router: RouterId) -> None:
        """Give up everything a router asked for."""
        for reception in [r for r in (*self._waiting, *self._active.values()) if r.router == router]:
            self._drop(reception)

    def _find(self, request_id: RequestId) -> Reception | None:
        waiting = next((r for r in self._waiting if r.submit.request_id == request_id), None)
        return waiting or self._active.get(request_id)

    # ---- peers -----------------------------------------------------------------------------------------------------

    def peer_ready(self, peer: Peer) -> None:
        self._peers[peer.worker] = peer.epoch

    def peer_lost(self, peer: Peer) -> None:
        """Reads from a peer that is gone fail at once instead of at their deadline."""
        if self._peers.get(peer.worker) != peer.epoch:
            return
        del self._peers[peer.worker]
        lost = [r for r in (*self._waiting, *self._active.values()) if r.submit.prefill_worker == peer.worker]
        for reception in lost:
            self._fail(reception, "transfer_failed", f"prefill worker {peer.worker} (epoch {peer.epoch}) is gone")

    # ---- credit ----------------------------------------------------------------------------------------------------

    def _grant_credits(self, now: float, headroom: int) -> None:
        """First come, first served: a promise is made only for blocks that are neither used nor promised, less
        `headroom` for those who run to grow into. Who needs more than there is without the quarantined blocks lets
        others by: reads that were given up may never end.
        """
        usable = self._pool.num_blocks - sum(len(r.targets) for r in self._abandoned.values())
        promised = sum(r.num_reserved for r in self._active.values()) + headroom * self._tail_blocks
        for reception in list(self._waiting):
            held = self._pool.known_prefix(reception.keys)
            # A prompt that fills the pool leaves no block to every child: they run one after the other.
            needed = len(reception.keys) - len(held) + reception.submit.request.num_children * self._tail_blocks
            needed = min(needed, self._pool.num_blocks - len(held))
            if not self._pool.fits(held, needed + promised):
                if needed > usable - len(held):
                    continue
                return
            self._waiting.remove(reception)
            self._pool.acquire(held)
            reception.held = held
            self._grant(reception, needed, now)
            promised += needed

    def _grant(self, reception: Reception, num_reserved: int, now: float) -> None:
        num_pull = len(reception.keys) - len(reception.held)
        if num_pull:
            worker = reception.submit.prefill_worker
            assert worker is not None
            reception.num_reserved = num_reserved
            reception.session = PullSession(
                key=reception.key,
                peer=Peer(worker=worker, epoch=self._peers[worker]),
                first_block_index=len(reception.held),
                num_blocks=num_pull,
                credit_deadline_s=now + self._credit_s,
            )
            self._active[reception.submit.request_id] = reception
        else:
            self._make_ready(reception)
        self._outbox.count(CREDITS_GRANTED)
        credit = Credit(
            request_id=reception.submit.request_id,
            attempt=reception.submit.attempt,
            num_held_blocks=len(reception.held),
            num_demanded_blocks=len(reception.keys),
            ttl_s=self._credit_s,
        )
        self._send(reception, credit)

    # ---- offers and reads ------------------------------------------------------------------------------------------

    def on_offer(self, offer: Offer, now: float) -> None:
        """A (relayed) offer; one of another attempt changes nothing (TX-2)."""
        reception = self._active.get(offer.request_id)
        if reception is None or reception.submit.attempt != offer.attempt:
            return
        if offer.is_final and reception.offered_final_s is None:
            reception.offered_final_s = now
        self._take_offer(reception, offer, now)

    def _take_offer(self, reception: Reception, offer: Offer, now: float) -> None:
        session = reception.session
        assert session is not None
        if not reception.targets:
            targets = self._pool.allocate(len(reception.keys) - len(reception.held))
            if targets is None:
                if reception.offer is None:
                    reception.renew_at_s = now + offer.lease_ttl_s * RENEW_FRACTION
                reception.offer = offer
                return
            reception.targets = targets
            reception.num_reserved = reception.submit.request.num_children * self._tail_blocks
            session.bind(targets)
        reception.offer = None
        reception.read_deadline_s = now + READ_HOPELESS_S
        pulls = session.on_offer(offer, now)
        if isinstance(pulls, SessionFailure):
            self._fail(reception, "transfer_failed", pulls.reason)
        elif pulls:
            self._submit(reception, pulls)

    def _submit(self, reception: Reception, pulls: Sequence[BlockPull]) -> None:
        assert reception.session is not None
        indexes = [p.index for p in pulls]
        self._puller.submit(
            PullJob(
                key=reception.key,
                peer=reception.session.peer,
                indexes=indexes,
                sources=[p.source for p in pulls],
                targets=[reception.targets[i] for i in indexes],
                digests=[p.digest for p in pulls],
            )
        )

    def on_pull(self, result: PullResult, now: float) -> None:
        """The end of one read: commit what was verified, retry or fail what was not."""
        abandoned = self._abandoned.get(result.key)
        if abandoned is not None:
            self._settle(abandoned, result)
            return
        reception = self._active.get(result.key.request_id)
        if reception is None or reception.key != result.key or reception.session is None:
            return
        reception.num_bytes += result.num_bytes
        reception.read_s += result.seconds
        count_read(self._outbox, result)
        session = reception.session
        for index in result.verified:
            self._pool.cache(reception.targets[index], reception.keys[len(reception.held) + index])
        session.on_verified(result.verified)
        reception.read_deadline_s = now + READ_HOPELESS_S
        if result.bad:
            outcome = session.on_bad(result.bad, result.reason)
            if isinstance(outcome, SessionFailure):
                self._fail(reception, "transfer_failed", outcome.reason)
                return
            self._submit(reception, outcome)
        if session.is_complete:
            self._commit(reception, now)

    def _commit(self, reception: Reception, now: float) -> None:
        session = reception.session
        assert session is not None and session.lease_id is not None
        del self._active[reception.submit.request_id]
        self._outbox.count("pdcluster_pulls_total")
        final_s = reception.offered_final_s if reception.offered_final_s is not None else now
        done = PullDone(
            request_id=reception.submit.request_id,
            attempt=reception.submit.attempt,
            lease_id=session.lease_id,
            num_blocks=len(reception.hashes) - reception.block_indexes[len(reception.held)],
            num_bytes=reception.num_bytes,
            transfer_s=now - final_s,
            read_s=reception.read_s,
        )
        self._send(reception, done)
        self._make_ready(reception)

    def _make_ready(self, reception: Reception) -> None:
        self._ready.append(
            Ready(
                submit=reception.submit,
                router=reception.router,
                hashes=reception.hashes,
                num_blocks=len(reception.hashes),
                blocks=reception.held + reception.targets,
                received_s=reception.received_s,
            )
        )

    # ---- time and endings ------------------------------------------------------------------------------------------

    def advance(self, now: float, *, may_grant: bool = True, headroom: int = 0) -> None:
        """Expiries, renewals, late bindings and, if it may, credits."""
        self._advanced_s = now
        for reception in [r for r in (*self._waiting, *self._active.values()) if r.deadline_s <= now]:
            self._fail(reception, "overloaded", "the request's deadline passed before its prompt was here")
        for reception in list(self._active.values()):
            session = reception.session
            assert session is not None
            if session.is_complete:  # the final offer had no new blocks
                self._commit(reception, now)
            elif session.deadline_s <= now:
                self._lapse(reception, session)
            elif session.in_flight and reception.read_deadline_s <= now:
                self._fail(reception, "transfer_failed", f"a read did not end within {READ_HOPELESS_S:g} s")
            elif reception.offer is not None:
                self._take_late_offer(reception, reception.offer, now)
            elif session.lease_id is not None and session.renew_at_s <= now:
                session.renewed(now)
                self._renew(reception, session.lease_id)
        if may_grant:
            self._grant_credits(now, headroom)

    def _lapse(self, reception: Reception, session: PullSession) -> None:
        """The credit or the lease has ended."""
        if session.lease_id is not None:
            self._fail(reception, "transfer_failed", "the lease ended before all was read")
            return
        self._outbox.count("pdcluster_credits_lapsed_total")
        problem = NO_OFFER if reception.offer is None else NO_ROOM
        self._fail(reception, "credit_lapsed", problem)

    def _take_late_offer(self, reception: Reception, offer: Offer, now: float) -> None:
        """Bind blocks for an offer that came while there were none, or keep its lease alive."""
        self._take_offer(reception, offer, now)
        if reception.offer is not None and reception.renew_at_s <= now:
            reception.renew_at_s = now + offer.lease_ttl_s * RENEW_FRACTION
            self._renew(reception, offer.lease_id)

    def _renew(self, reception: Reception, lease_id: LeaseId) -> None:
        key = reception.key
        self._send(reception, Renew(request_id=key.request_id, attempt=key.attempt, lease_id=lease_id))

    def _fail(self, reception: Reception, kind: RefusalKind, reason: str) -> None:
        self._outbox.count("pdcluster_pulls_failed_total")
        self._refuse(reception, kind, reason)

    def _refuse(self, reception: Reception, kind: RefusalKind, reason: str) -> None:
        self._outbox.refuse(reception.router, reception.key, kind, reason)
        self._drop(reception)

    def _drop(self, reception: Reception) -> None:
        """Give everything back; what a read may still write stays bound until the puller reports its end."""
        if reception in self._waiting:
            self._waiting.remove(reception)
        elif self._active.get(reception.submit.request_id) is reception:
            del self._active[reception.submit.request_id]
        self._pool.release(reception.held)
        reception.held = []
        reception.num_reserved = 0
        session = reception.session
        if session is not None and session.in_flight > 0:
            session.cancel()
            self._abandoned[reception.key] = reception
            self._puller.abandon(reception.key)
        else:
            self._pool.release(reception.targets)
            reception.targets = []

    def _settle(self, reception: Reception, result: PullResult) -> None:
        session = reception.session
        assert session is not None
        session.on_ended(len(result.verified) + len(result.bad))
        if session.in_flight == 0:
            del self._abandoned[result.key]
            self._pool.release(reception.targets)
            reception.targets = []

    def claims(self) -> Iterator[Claim]:
        """Every reference to a block that a reception has, those given up included."""
        for one in self._receptions():
            yield Claim(f"reception of {one.name}", [*one.held, *one.targets])
        for ready in self._ready:
            yield Claim(f"ready {ready.submit.request_id}", ready.blocks)

    def books(self) -> dict[str, int]:
        """What is held, by name."""
        return {
            "credits_waiting": len(self._waiting),
            "receptions": len(self._active),
            "blocks_promised": sum(r.num_reserved for r in self._active.values()),
            "quarantined_blocks": sum(len(r.targets) for r in self._abandoned.values()),
            "intake_pins": self.num_pins,
            "blocks_in_flight": sum(self._puller.pending().values()),
        }

    @property
    def peers(self) -> Mapping[WorkerId, Epoch]:
        """Prefill workers that requests are pulled from."""
        return self._peers

    def check(self) -> None:
        """Assert that receptions are what their place says, have a deadline, and that the puller reads for them."""
        check_waiting(self._waiting, self._peers, self._advanced_s)
        check_active(self._active, self._peers, self._advanced_s)
        check_abandoned(self._abandoned)
        check_reads(self._receptions(), self._puller.pending())

    def _receptions(self) -> Iterator[Reception]:
        yield from self._waiting
        yield from self._active.values()
        yield from self._abandoned.values()

    def _send(self, reception: Reception, message: FromWorker) -> None:
        self._outbox.send(reception.router, message)

    def take_ready(self) -> list[Ready]:
        ready, self._ready = self._ready, []
        return ready
