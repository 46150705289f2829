"""What must be true of all receptions of a decode worker together, of its requests and of its reads.

The checks of `decode.intake` and `decode.worker` that compare one account with another. Pure; every function asserts,
changes nothing and names what is wrong. Knows nothing about how things came to be so.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from core.ids import Epoch, RequestId, WorkerId
from core.request import AttemptKey
from decode.reception import Reception
from kvtransfer.session import LEASE_MARGIN_S


def check_waiting(waiting: Iterable[Reception], peers: Mapping[WorkerId, Epoch], now: float) -> None:
    """TX-1, RQ-2: who waits for credit holds nothing, waits for a worker that is there, and not for ever."""
    for one in waiting:
        assert not (one.held or one.targets or one.num_reserved), f"KV-1: {one.name} waits for credit and holds blocks"
        assert one.session is None, f"TX-1: {one.name} waits for credit and reads"
        assert one.submit.prefill_worker in peers, (
            f"RQ-2: {one.name} waits for {one.submit.prefill_worker}, who is gone"
        )
        _check_deadline(one.name, one.deadline_s, now)


def check_active(active: Mapping[RequestId, Reception], peers: Mapping[WorkerId, Epoch], now: float) -> None:
    """TX-1, TX-2, RQ-2: who has credit has an open session with a peer that is there, and a deadline for each wait."""
    for request_id, one in active.items():
        session = one.session
        assert request_id == one.submit.request_id, f"TX-2: {one.name} is listed as {request_id}"
        assert session is not None and session.is_open, f"TX-1: {one.name} is listed without an open session"
        assert session.key == one.key, f"TX-2: {one.name} has a session of {session.key}"
        session.check()
        num_pull = len(one.keys) - len(one.held)
        assert session.num_blocks == num_pull, f"TX-3: {one.name} pulls {session.num_blocks} blocks, lacks {num_pull}"
        assert one.targets == session.targets, f"TX-1: {one.name} and its session differ about targets"
        assert len(one.targets) in (0, num_pull), f"TX-1: {one.name} has {len(one.targets)} of {num_pull} targets"
        assert peers.get(session.peer.worker) == session.peer.epoch, f"RQ-2: {one.name} reads from {session.peer}, gone"
        _check_deadline(one.name, one.deadline_s, now)
        _check_deadline(f"{one.name}: its session", session.deadline_s, now - LEASE_MARGIN_S)
        if session.in_flight:
            _check_deadline(f"{one.name}: its reads", one.read_deadline_s, now)


def check_abandoned(abandoned: Mapping[AttemptKey, Reception]) -> None:
    """TX-1: who was given up keeps exactly the targets that may still be written, until the puller reports."""
    for key, one in abandoned.items():
        session = one.session
        assert one.key == key, f"TX-2: {one.name} is quarantined as {key}"
        assert session is not None and not session.is_open, f"TX-1: {one.name} is quarantined and goes on"
        assert session.in_flight > 0, f"TX-1: {one.name} is quarantined although nothing reads"
        assert one.targets and not one.held, f"TX-1: {one.name} is quarantined without targets, or with held blocks"


def check_reads(receptions: Iterable[Reception], pending: Mapping[AttemptKey, int]) -> None:
    """TX-1: the blocks that sessions wait for are those that the puller was asked for and has not reported."""
    waited: Counter[AttemptKey] = Counter()
    for one in receptions:
        if one.session is not None and one.session.in_flight:
            waited[one.key] += one.session.in_flight
    for key in {**waited, **pending}:
        assert waited[key] == pending.get(key, 0), (
            f"TX-1: {key.request_id} attempt {key.attempt} waits for {waited[key]} blocks, "
            f"the puller reads {pending.get(key, 0)}"
        )


def _check_deadline(name: str, deadline_s: float, now: float) -> None:
    """RQ-2. `now`: when expiries were last looked at."""
    assert math.isfinite(deadline_s), f"RQ-2: {name} waits without a deadline"
    assert deadline_s >= now, f"RQ-2: {name} is {now - deadline_s:.3f} s past its deadline"
