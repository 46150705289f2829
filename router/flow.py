"""One request's way through the cluster: a state machine over messages, losses, deadlines and cancellation.

Pure: state, an input and `now` in, actions out. It enforces RQ-1 (one terminal state; per child no gap and no duplicate
position), TX-2 (older attempts change nothing) and RQ-2 (every wait has a deadline). On every ending and before every
retry it tells each worker that may hold something to let go. Knows nothing about links, text or HTTP.

    SELECTED --Credit--> CREDITED --Offer--> PREFILLING --PullDone--> DECODING --all children ended--> FINISHED
        ^                    |                   |                       |
        '---- refusal or loss before the first token: attempt + 1 -------'
"""

import math
from dataclasses import dataclass

from msgspec.structs import replace

from core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    PdclusterError,
    RequestCancelledError,
    StalledError,
    TransferFailedError,
    WorkerLostError,
)
from core.ids import Attempt, WorkerId
from core.messages import (
    Cancel,
    Credit,
    Offer,
    Prefill,
    PullDone,
    Refused,
    Release,
    Renew,
    RequestMessage,
    Submit,
    Tokens,
    TokenUpdate,
)
from core.request import LEGAL_TRANSITIONS, TERMINAL_STATES, Request, RequestState
from router.actions import DEFAULT_STALL_LIMITS, Deliver, Fail, Finish, FlowAction, FlowFacts, Send, StallLimits
from router.select import Pair, WorkerLife

ATTEMPTS_MAX = 3
RETRY_DELAY_S = 0.05
"""Before attempt 1; doubles with each further one."""
RESELECT_WAIT_S = 10.0
"""A retry waits so long for workers to serve it."""


@dataclass(slots=True)
class _Child:
    """Progress of one child."""

    next_index: int = 0
    is_open: bool = True
    """Its tokens are still delivered."""
    runs_at_worker: bool = True
    """The worker has not ended it."""


class RequestFlow:
    """The decider for one request. The driver asks `needs_pair`, and performs what the methods return, in order."""

    def __init__(self, request: Request, now: float, limits: StallLimits = DEFAULT_STALL_LIMITS) -> None:
        self.request = request
        self.state = RequestState.SELECTED
        self.attempt = Attempt(0)
        self.pair: Pair | None = None
        self.failed: dict[WorkerId, int] = {}
        """Workers that earlier attempts failed on, each with the number of the attempt that came after it."""
        self.facts = FlowFacts(arrived_s=now)
        self._deadline = now + request.deadline_s
        self._limits = limits
        self._phase_limit_s = request.deadline_s
        self._phase_deadline = self._deadline
        self._retry_at = now
        self._children = [_Child() for _ in range(request.num_children)]
        self._decode_holds = False
        self._prefill_holds = False
        self._last_error: PdclusterError | None = None

    @property
    def is_ended(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def has_output(self) -> bool:
        return self.facts.first_token_s is not None

    @property
    def last_error(self) -> PdclusterError | None:
        """What ended the attempt before this one."""
        return self._last_error

    def needs_pair(self, now: float) -> bool:
        """A pair of workers should be chosen now."""
        return not self.is_ended and self.pair is None and now >= self._retry_at

    def check(self) -> None:
        """RQ-1, RQ-2: what is held belongs to a pair, an ended request holds nothing, a wait has an end."""
        holds = self._decode_holds or self._prefill_holds
        assert self.pair is not None or not holds, f"RQ-1: {self.request.request_id} holds something at nobody"
        assert not (self.is_ended and holds), f"RQ-1: {self.request.request_id} has ended and holds something"
        assert math.isfinite(self.next_deadline()), f"RQ-2: {self.request.request_id} waits without a deadline"

    def next_deadline(self) -> float:
        """When `expire` has something to do."""
        return min(self._deadline, self._phase_deadline)

    # ---- selection ---------------------------------------------------------------------------------------------------

    def assign(self, pair: Pair, now: float) -> list[FlowAction]:
        """Workers were chosen: ask decode for credit."""
        assert self.needs_pair(now), "a pair was assigned to a request that has one"
        self.pair = pair
        self.facts.submitted_s = now
        self._decode_holds = True
        self._wait(self._limits.prompt_s, now)
        request = replace(self.request, deadline_s=max(0.0, self._deadline - now))
        submit = Submit(
            request_id=request.request_id,
            attempt=self.attempt,
            request=request,
            prefill_worker=pair.prefill.worker if pair.prefill else None,
        )
        return [Send(worker=pair.decode.worker, message=submit)]

    def no_pair(self, missing_role: str) -> list[FlowAction]:
        """Nobody can serve it now. The first attempt fails at once; a retry waits for RESELECT_WAIT_S."""
        if self.attempt == 0:
            return self._fail(NoWorkerError(role=missing_role))
        return []

    # ---- messages ----------------------------------------------------------------------------------------------------

    def handle(self, source: WorkerId, message: RequestMessage, now: float) -> list[FlowAction]:
        """A message from a worker. What does not belong to the current attempt and pair changes nothing (TX-2)."""
        pair = self.pair
        if self.is_ended or pair is None or message.attempt != self.attempt:
            return []
        if source == pair.decode.worker:
            return self._from_decode(pair, message, now)
        if pair.prefill is not None and source == pair.prefill.worker:
            return self._from_prefill(pair, message, now)
        return []

    def _from_decode(self, pair: Pair, message: RequestMessage, now: float) -> list[FlowAction]:
        if isinstance(message, Credit):
            return self._on_credit(pair, message, now)
        if isinstance(message, Tokens):
            return self._on_tokens(message, now)
        if isinstance(message, PullDone):
            return self._on_pull_done(pair, message, now)
        if isinstance(message, Renew) and pair.prefill is not None and self._prefill_holds:
            return [Send(worker=pair.prefill.worker, message=message)]
        if isinstance(message, Refused):
            self._decode_holds = False
            return self._on_refused(pair.decode.worker, message, now)
        return []

    def _from_prefill(self, pair: Pair, message: RequestMessage, now: float) -> list[FlowAction]:
        if isinstance(message, Offer):
            return self._on_offer(pair, message, now)
        if isinstance(message, Refused) and self._prefill_holds:
            assert pair.prefill is not None
            self._prefill_holds = False
            return self._on_refused(pair.prefill.worker, message, now)
        return []

    def _on_credit(self, pair: Pair, credit: Credit, now: float) -> list[FlowAction]:
        if self.state is not RequestState.SELECTED:
            return []
        self._move(RequestState.CREDITED)
        self.facts.credited_s = now
        if credit.num_held_blocks >= credit.num_demanded_blocks:
            self._wait(self._limits.prompt_s, now)
            return []
        if pair.prefill is None:
            return self._violation(pair.decode.worker, "asks for a prefill that was not offered to it")
        self._prefill_holds = True
        self.facts.needs_prefill = True
        self._wait(self._limits.prompt_s, now)
        prefill = Prefill(
            request_id=self.request.request_id,
            attempt=self.attempt,
            request=replace(self.request, deadline_s=max(0.0, self._deadline - now)),
            decode_worker=pair.decode.worker,
            num_held_blocks=credit.num_held_blocks,
        )
        return [Send(worker=pair.prefill.worker, message=prefill)]

    def _on_offer(self, pair: Pair, offer: Offer, now: float) -> list[FlowAction]:
        assert pair.prefill is not None
        if not self._prefill_holds or offer.epoch != pair.prefill.epoch or offer.worker != pair.prefill.worker:
            return []
        if self.state is RequestState.CREDITED:
            self._move(RequestState.PREFILLING)
        self._wait(self._limits.prompt_s, now)
        facts = self.facts
        facts.prefill_queue_s = offer.queue_s
        if offer.is_final and facts.offered_s is None:
            facts.offered_s = now
        facts.num_prefill_cached_blocks = offer.num_cached_blocks
        return [Send(worker=pair.decode.worker, message=offer)]

    def _on_pull_done(self, pair: Pair, done: PullDone, now: float) -> list[FlowAction]:
        if self.state is not RequestState.PREFILLING or pair.prefill is None:
            return []
        self._move(RequestState.DECODING)
        self._prefill_holds = False
        self._wait(self._limits.prompt_s, now)
        self.facts.pulled_s = now
        self.facts.num_pulled_blocks = done.num_blocks
        release = Release(request_id=done.request_id, attempt=done.attempt, lease_id=done.lease_id)
        return [Send(worker=pair.prefill.worker, message=release)]

    def _on_tokens(self, tokens: Tokens, now: float) -> list[FlowAction]:
        assert self.pair is not None
        worker = self.pair.decode.worker
        if self.state is RequestState.SELECTED:
            return self._violation(worker, "sent tokens without credit")
        if self.state is not RequestState.DECODING:
            self._move(RequestState.DECODING)
        delivered: list[TokenUpdate] = []
        for update in tokens.updates:
            problem = self._problem(update)
            if problem is not None:
                return self._violation(worker, problem)
            child = self._children[update.child]
            child.next_index += len(update.token_ids)
            child.runs_at_worker = update.finish_reason is None
            if child.is_open:
                delivered.append(update)
                child.is_open = child.runs_at_worker
        self._note_tokens(tokens, now)
        actions: list[FlowAction] = [Deliver(updates=tuple(delivered))] if delivered else []
        return actions + self._finish_if_done()

    def _problem(self, update: TokenUpdate) -> str | None:
        """What breaks RQ-1 in this update, or None."""
        if not 0 <= update.child < len(self._children):
            return f"sent tokens of choice {update.child} of {len(self._children)}"
        child = self._children[update.child]
        if not child.runs_at_worker:
            return f"sent more tokens of choice {update.child} after its end"
        if update.first_index != child.next_index:
            return f"sent token {update.first_index} of choice {update.child}, expected {child.next_index}"
        if self.request.sampling.num_logprobs is not None and len(update.logprobs) != len(update.token_ids):
            return f"sent {len(update.logprobs)} log-probabilities for {len(update.token_ids)} tokens"
        if update.finish_reason not in (None, "stop", "length"):
            return f"ended choice {update.child} with '{update.finish_reason}'"
        return None

    def _note_tokens(self, tokens: Tokens, now: float) -> None:
        facts = self.facts
        if not tokens.updates:
            return
        self._wait(self._limits.stream_s, now)
        facts.last_token_s = now
        if facts.first_token_s is None:
            facts.first_token_s = now
            facts.tail_queue_s = tokens.queue_s
            facts.num_decode_cached_tokens = tokens.num_cached_tokens

    def _on_refused(self, worker: WorkerId, refused: Refused, now: float) -> list[FlowAction]:
        if now >= self._deadline:  # the workers watch it too, and may see it first
            return self._fail(self._too_late())
        is_decode = self.pair is not None and worker == self.pair.decode.worker
        if refused.kind in ("invalid", "too_long"):
            return self._fail(InvalidRequestError(message=refused.reason))
        if refused.kind == "overloaded":
            error: PdclusterError = OverloadedError(reason=refused.reason, retry_after_s=refused.retry_after_s)
            if is_decode:
                return self._fail(error)
        elif refused.kind == "draining":
            error = NoWorkerError(role="decode" if is_decode else "prefill")
        else:
            assert self.pair is not None
            source = self.pair.prefill.worker if self.pair.prefill else "nobody"
            error = TransferFailedError(source=source, target=self.pair.decode.worker, reason=refused.reason)
            return self._retry(error, self.pair.workers(), now)  # who of the two is to blame is not known here
        return self._retry(error, frozenset({worker}), now)

    # ---- losses, time, endings ---------------------------------------------------------------------------------------

    def worker_lost(self, life: WorkerLife, now: float) -> list[FlowAction]:
        """The link to a worker is gone, and with it everything the worker held for this router."""
        pair = self.pair
        if self.is_ended or pair is None:
            return []
        if life == pair.decode:
            self._decode_holds = False
        elif life == pair.prefill and self._depends_on_prefill():
            self._prefill_holds = False
        else:
            return []
        error = WorkerLostError(worker=life.worker, phase=self.state.value)
        return self._retry(error, frozenset({life.worker}), now)

    def _depends_on_prefill(self) -> bool:
        return self._prefill_holds or self.state is RequestState.SELECTED

    def expire(self, now: float) -> list[FlowAction]:
        """Deadlines that have passed."""
        if self.is_ended or now < self.next_deadline():
            return []
        if now >= self._deadline:
            return self._fail(self._too_late())
        if self.pair is None:
            return self._fail(self._last_error or NoWorkerError(role="decode"))
        workers = self.pair.workers()
        named = " and ".join(sorted(workers))
        error = StalledError(workers=named, limit_s=f"{self._phase_limit_s:g}", phase=self.state.value)
        return self._retry(error, workers, now)

    def _too_late(self) -> DeadlineExceededError:
        return DeadlineExceededError(phase=self.state.value, limit_s=f"{self.request.deadline_s:g}")

    def slept(self, seconds: float) -> None:
        """This process did not run for so long: nobody could show it progress. The request's own deadline stays."""
        self._phase_deadline += seconds

    def abort(self, error: PdclusterError | None = None) -> list[FlowAction]:
        """Somebody asked for its end, or `error` says why nobody can want it any more; whoever reads it is told."""
        if self.is_ended:
            return []
        return [*self._end(RequestState.CANCELLED), Fail(error=error or RequestCancelledError())]

    def cancel(self) -> list[FlowAction]:
        """The client went away."""
        return [] if self.is_ended else self._end(RequestState.CANCELLED)

    def end_child(self, child: int) -> list[FlowAction]:
        """The router saw a stop string in delivered tokens: what the worker still sends of this child is ignored."""
        if self.is_ended:
            return []
        self._children[child].is_open = False
        return self._finish_if_done()

    def _finish_if_done(self) -> list[FlowAction]:
        if any(child.is_open for child in self._children):
            return []
        if not any(child.runs_at_worker for child in self._children):
            self._decode_holds = False
        return [*self._end(RequestState.FINISHED), Finish()]

    def _retry(self, error: PdclusterError, culprits: frozenset[WorkerId], now: float) -> list[FlowAction]:
        """Before the first token: attempt + 1 on other workers, if there are any. After it: the end."""
        if self.has_output or self.attempt + 1 >= ATTEMPTS_MAX:
            return self._fail(error)
        actions = self._let_go()
        self._move(RequestState.SELECTED)
        self.attempt = Attempt(self.attempt + 1)
        self.pair = None
        self.failed |= dict.fromkeys(culprits, int(self.attempt))
        self.facts = FlowFacts(arrived_s=self.facts.arrived_s, retried_s=now)
        self._last_error = error
        self._retry_at = now + RETRY_DELAY_S * 2 ** (self.attempt - 1)
        self._phase_deadline = self._retry_at + RESELECT_WAIT_S
        return actions

    def _violation(self, worker: WorkerId, problem: str) -> list[FlowAction]:
        return self._fail(PdclusterError(message=f"Worker {worker} {problem}; the request was given up."))

    def _fail(self, error: PdclusterError) -> list[FlowAction]:
        return [*self._end(RequestState.FAILED), Fail(error=error)]

    def _end(self, state: RequestState) -> list[FlowAction]:
        self._move(state)
        return self._let_go()

    def _let_go(self) -> list[FlowAction]:
        """Cancel at every worker that may hold something for the current attempt."""
        if self.pair is None:
            return []
        cancel = Cancel(request_id=self.request.request_id, attempt=self.attempt)
        actions: list[FlowAction] = []
        if self._decode_holds:
            actions.append(Send(worker=self.pair.decode.worker, message=cancel))
        if self._prefill_holds and self.pair.prefill is not None:
            actions.append(Send(worker=self.pair.prefill.worker, message=cancel))
        self._decode_holds = self._prefill_holds = False
        return actions

    def _wait(self, limit_s: float, now: float) -> None:
        self._phase_limit_s = limit_s
        self._phase_deadline = now + limit_s

    def _move(self, state: RequestState) -> None:
        assert state in LEGAL_TRANSITIONS[self.state], f"illegal transition {self.state} -> {state}"
        self.state = state
