"""A request that a decode worker's scheduler knows, one sequence per child, and what must be true of all of them.

Knows nothing about how a request came in or how its tokens leave.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from core.ids import Attempt, RequestId, RouterId
from core.messages import Tokens, TokenUpdate
from core.request import AttemptKey, Request
from engine.scheduler import Progress, Sequence


@dataclass(eq=False, slots=True, kw_only=True)
class LiveRequest:
    """Lives until each of its children has ended, or it is given up."""

    request: Request
    attempt: Attempt
    router: RouterId
    ready_s: float
    """When its prompt's blocks were all here, or none had to come."""
    deadline_s: float
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    has_answered: bool = False

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(request_id=self.request.request_id, attempt=self.attempt)

    def answer(self, updates: list[TokenUpdate]) -> Tokens:
        """What one step produced for it; the first one says how its prompt came to be."""
        first = self.sequences[0]
        is_first, self.has_answered = not self.has_answered, True
        started_s = first.first_step_s if first.first_step_s is not None else self.ready_s
        return Tokens(
            request_id=self.request.request_id,
            attempt=self.attempt,
            updates=tuple(updates),
            num_cached_tokens=first.num_cached_tokens if is_first else 0,
            num_computed_tokens=first.prompt_length - first.num_cached_tokens if is_first else 0,
            queue_s=started_s - self.ready_s if is_first else 0.0,
        )


def token_update(item: Progress) -> TokenUpdate:
    """One sampled token of one child."""
    sequence = item.sequence
    assert item.token_id is not None
    return TokenUpdate(
        child=sequence.child,
        first_index=len(sequence.token_ids) - sequence.prompt_length - 1,
        token_ids=(item.token_id,),
        logprobs=(item.logprobs,) if item.logprobs is not None else (),
        finish_reason=item.finish_reason,
        stop_token_id=item.token_id if item.finish_reason == "stop" else None,
    )


def check_live(
    live: Mapping[RequestId, LiveRequest],
    by_sequence: Mapping[int, LiveRequest],
    scheduled: Iterable[Sequence],
    now: float,
) -> None:
    """RQ-1, RQ-2: every scheduled sequence is one live request's, and every live request has work and a deadline.

    by_sequence: the worker's index by `id(sequence)`; scheduled: who runs or waits; now: when expiries were looked at.
    """
    owners = {id(sequence): one for one in live.values() for sequence in one.sequences}
    assert owners == dict(by_sequence), "RQ-1: live requests and their index by sequence differ"
    names = {id(sequence): sequence.name for sequence in scheduled}
    strays = [name for key, name in names.items() if key not in owners]
    assert not strays, f"RQ-1: scheduled for no live request: {strays}"
    for request_id, one in live.items():
        name = f"{request_id} attempt {one.attempt}"
        assert one.request.request_id == request_id, f"TX-2: {name} is {one.request.request_id}"
        assert len(one.sequences) == one.request.num_children, f"RQ-1: {name} has {len(one.sequences)} sequences"
        num_scheduled = sum(id(sequence) in names for sequence in one.sequences)
        assert num_scheduled == one.num_unfinished > 0, (
            f"RQ-1: {name} has {one.num_unfinished} unfinished children, {num_scheduled} are scheduled"
        )
        assert math.isfinite(one.deadline_s), f"RQ-2: {name} has no deadline"
        assert one.deadline_s >= now, f"RQ-2: {name} is {now - one.deadline_s:.3f} s past its deadline"
