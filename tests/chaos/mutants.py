"""Bugs of the kind that prefill/decode systems really have, as small patches, for the chaos scenario to find.

Knows nothing about how they are planted.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug: in `file`, `old` (there once) becomes `new`."""

    name: str
    found_by: int
    """The first seed that found it when it was written: others may, once schedules are drawn otherwise."""
    area: str
    file: str
    old: str
    new: str


MUTANTS = (
    # ---- lease -------------------------------------------------------------------------------------------------------
    Mutant(
        name="cancelled-lease-keeps-its-blocks",
        found_by=1,
        area="lease",
        file="prefill/worker.py",
        old="        self._pool.release(self._leases.release_request(request_id, attempt))\n",
        new="        self._leases.release_request(request_id, attempt)\n",
    ),
    Mutant(
        name="lease-is-never-reaped",
        found_by=15,
        area="lease",
        file="kvtransfer/lease.py",
        old="if lease.deadline_s <= now]",
        new="if lease.deadline_s <= now - 3600.0]",
    ),
    Mutant(
        name="leased-blocks-are-not-pinned",
        found_by=1,
        area="lease",
        file="prefill/worker.py",
        old="        self._pool.acquire(blocks)\n        assert self._leases.extend",
        new="        assert self._leases.extend",
    ),
    Mutant(
        name="reader-never-renews",
        found_by=99,
        area="lease",
        file="decode/intake.py",
        old="            elif session.lease_id is not None and session.renew_at_s <= now:",
        new="            elif session.lease_id is not None and session.renew_at_s <= now - 3600.0:",
    ),
    # ---- plan --------------------------------------------------------------------------------------------------------
    Mutant(
        name="demand-includes-the-tail",
        found_by=20,
        area="plan",
        file="kvtransfer/plan.py",
        old="    return (num_prompt_tokens - 1) // block_size\n",
        new="    return num_prompt_tokens // block_size\n",
    ),
    Mutant(
        name="window-is-one-position-short",
        found_by=1,
        area="plan",
        file="core/layout.py",
        old="max(0, num_computed - window + 1)",
        new="max(0, num_computed - window + block_size)",
    ),
    Mutant(
        name="held-blocks-are-offered-again",
        found_by=3,
        area="plan",
        file="prefill/worker.py",
        old="            num_held=message.num_held_blocks,\n",
        new="            num_held=0,\n",
    ),
    # ---- session and reads -------------------------------------------------------------------------------------------
    Mutant(
        name="digest-of-what-arrived-is-not-computed",
        found_by=2,
        area="session",
        file="kvtransfer/puller.py",
        old="            digests = self._digester.digest(job.targets)\n",
        new="            digests = list(job.digests)\n",
    ),
    Mutant(
        name="targets-come-free-while-they-are-read",
        found_by=1,
        area="session",
        file="decode/intake.py",
        old="            self._abandoned[reception.key] = reception\n            self._puller.abandon(reception.key)\n",
        new="            self._puller.abandon(reception.key)\n            self._pool.release(reception.targets)\n",
    ),
    Mutant(
        name="bad-block-is-not-read-again",
        found_by=2,
        area="session",
        file="kvtransfer/session.py",
        old="        return self._pull(indexes)\n\n    def on_ended",
        new="        return []\n\n    def on_ended",
    ),
    Mutant(
        name="session-is-complete-without-the-final-offer",
        found_by=5,
        area="session",
        file="kvtransfer/session.py",
        old="        if self._is_final and len(self._verified) == self.num_blocks:",
        new="        if len(self._verified) == len(self._sources):",
    ),
    Mutant(
        name="block-is-findable-before-it-is-read",
        found_by=1,
        area="session",
        file="decode/intake.py",
        old="            reception.targets = targets\n            reception.num_reserved",
        new=(
            "            reception.targets = targets\n"
            "            for key, target in zip(reception.keys[len(reception.held) :], targets, strict=True):\n"
            "                self._pool.cache(target, key)\n"
            "            reception.num_reserved"
        ),
    ),
    # ---- credit ------------------------------------------------------------------------------------------------------
    Mutant(
        name="credit-is-not-returned-when-it-lapses",
        found_by=48,
        area="credit",
        file="decode/intake.py",
        old='        self._fail(reception, "credit_lapsed", problem)\n',
        new='        self._outbox.refuse(reception.router, reception.key, "credit_lapsed", problem)\n',
    ),
    Mutant(
        name="held-prefix-leaks-with-its-reception",
        found_by=1,
        area="credit",
        file="decode/intake.py",
        old="        self._pool.release(reception.held)\n        reception.held = []\n",
        new="        reception.held = []\n",
    ),
    Mutant(
        name="nobody-cancels-who-waits-for-credit",
        found_by=27,
        area="credit",
        file="decode/intake.py",
        old="        waiting = next((r for r in self._waiting if r.submit.request_id == request_id), None)\n",
        new="        waiting = None\n",
    ),
    # ---- pool and planner --------------------------------------------------------------------------------------------
    Mutant(
        name="used-block-is-evicted",
        found_by=1,
        area="pool",
        file="engine/kv/pool.py",
        old='                assert block in self._cached, f"KV-1: acquired free block {block}"\n'
        "                del self._cached[block]\n",
        new='                assert block in self._cached, f"KV-1: acquired free block {block}"\n',
    ),
    Mutant(
        name="evicted-block-keeps-its-hash",
        found_by=1,
        area="pool",
        file="engine/kv/pool.py",
        old="                self._forget(block)\n                self.num_evictions += 1\n",
        new="                self.num_evictions += 1\n",
    ),
    Mutant(
        name="known-prefix-skips-what-is-missing",
        found_by=11,
        area="pool",
        file="engine/kv/pool.py",
        old="            if block is None:\n                break\n            blocks.append(block)",
        new="            if block is None:\n                continue\n            blocks.append(block)",
    ),
    Mutant(
        name="preempted-sequence-is-forgotten",
        found_by=1,
        area="pool",
        file="engine/scheduler.py",
        old="        self._waiting.insert(index, sequence)\n",
        new="        self._waiting.insert(index, sequence) if index else None\n",
    ),
    # ---- link --------------------------------------------------------------------------------------------------------
    Mutant(
        name="silence-is-not-noticed",
        found_by=2,
        area="link",
        file="router/workers/native.py",
        old="        while self._clock.now() - self.heard_s < HEARTBEAT_TIMEOUT_S:",
        new="        while self._clock.now() - self.heard_s < 3600.0:",
    ),
    Mutant(
        name="lost-worker-is-not-dialled-again",
        found_by=10,
        area="link",
        file="router/workers/native.py",
        old="                if await self._serve(link):\n                    delay_s = REDIAL_FIRST_S\n",
        new="                if await self._serve(link):\n                    return\n",
    ),
    # ---- admission and flow ------------------------------------------------------------------------------------------
    Mutant(
        name="ticket-outlives-a-request-that-failed",
        found_by=1,
        area="admission",
        file="router/service.py",
        old="            for ticket in tickets:\n                ticket.release()\n            for run in runs:\n",
        new="            for ticket in tickets if all(run.flow.has_output for run in runs) else ():\n"
        "                ticket.release()\n            for run in runs:\n",
    ),
    Mutant(
        name="request-has-no-deadline",
        found_by=8,
        area="admission",
        file="router/flow.py",
        old="        if now >= self._deadline:\n            return self._fail(self._too_late())\n        if self.pair",
        new="        if self.pair",
    ),
    # ---- reconcile ---------------------------------------------------------------------------------------------------
    Mutant(
        name="restart-keeps-the-epoch",
        found_by=2,
        area="reconcile",
        file="cluster/reconcile.py",
        old="            state = replace(state, epoch=Epoch(state.epoch + 1), phase",
        new="            state = replace(state, epoch=Epoch(max(1, state.epoch)), phase",
    ),
    Mutant(
        name="vanished-member-counts-as-running",
        found_by=2,
        area="reconcile",
        file="cluster/reconcile.py",
        old="    if current is None or not current.alive:\n",
        new="    if current is None:\n        return state\n    if not current.alive:\n",
    ),
    Mutant(
        name="ended-member-waits-for-an-hour",
        found_by=2,
        area="reconcile",
        file="cluster/reconcile.py",
        old="        retry_at_s=now + backoff_s,\n",
        new="        retry_at_s=now + backoff_s * 3600,\n",
    ),
    Mutant(
        name="record-is-not-read-back",
        found_by=31,
        area="reconcile",
        file="cluster/controller.py",
        old="        self._states = _restore(self._durable, clock.now())\n",
        new="        self._states = {}\n",
    ),
)
