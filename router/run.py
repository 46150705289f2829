"""One request while it runs: its flow, the text of its choices, and the queue that its reader waits on.

Turns checked tokens into text, finds stop strings, and closes with a Summary or an error. Knows nothing about workers.
"""

import asyncio
from collections.abc import Iterable

from core.clock import Clock
from core.errors import PdclusterError
from core.messages import TokenUpdate
from core.request import RequestState
from router.flow import RequestFlow
from router.generation import ChildDelta, GenerationEvent, PreparedRequest, Summary, make_timing
from router.metrics import RouterMetrics
from router.text import TextCodec, TextStream


class Run:
    """See above."""

    def __init__(
        self, *, flow: RequestFlow, prepared: PreparedRequest, text: TextCodec, clock: Clock, metrics: RouterMetrics
    ) -> None:
        self.flow = flow
        self.block_size = 1
        """Of the workers that serve the current attempt."""
        self._clock = clock
        self._metrics = metrics
        self._streams = [TextStream(text, prepared.stop) for _ in range(prepared.num_children)]
        self._stop_token_ids = frozenset(prepared.sampling.stop_token_ids)
        self._num_tokens = [0] * prepared.num_children
        self._reasons: list[str] = []
        self._events: asyncio.Queue[GenerationEvent | PdclusterError] = asyncio.Queue()
        self._last_message_s: float | None = None

    async def next_event(self) -> GenerationEvent:
        """The next event; raises the error that ended the request."""
        event = await self._events.get()
        if isinstance(event, PdclusterError):
            raise event
        return event

    def deliver(self, updates: Iterable[TokenUpdate]) -> list[int]:
        """Queue the text of new tokens. Returns the children that a stop string ended."""
        stopped: list[int] = []
        num_new = 0
        for update in updates:
            if update.child in stopped:
                continue
            delta = self._delta(update)
            num_new += len(delta.token_ids)
            self._num_tokens[update.child] += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._reasons.append(delta.finish_reason)
            if isinstance(delta.stop_reason, str):
                stopped.append(update.child)
            self._events.put_nowait(delta)
        self._count(num_new)
        return stopped

    def _delta(self, update: TokenUpdate) -> ChildDelta:
        is_last = update.finish_reason is not None
        has_stop_id = update.stop_token_id is not None and update.token_ids[-1:] == (update.stop_token_id,)
        piece = self._streams[update.child].push(update.token_ids, is_last=is_last, num_silent=1 if has_stop_id else 0)
        if piece.stop is not None:
            return ChildDelta(
                child=update.child,
                text=piece.text,
                token_ids=update.token_ids[: piece.num_tokens],
                logprobs=update.logprobs[: piece.num_tokens],
                finish_reason="stop",
                stop_reason=piece.stop,
            )
        return ChildDelta(
            child=update.child,
            text=piece.text,
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            finish_reason=None if not is_last else "stop" if update.finish_reason == "stop" else "length",
            stop_reason=update.stop_token_id if update.stop_token_id in self._stop_token_ids else None,
        )

    def _count(self, num_new: int) -> None:
        if not num_new:
            return
        now = self._clock.now()
        if self._last_message_s is None:
            self._metrics.first_token(len(self.flow.request.token_ids))
        gap_s = now - self._last_message_s if self._last_message_s is not None else None
        self._metrics.tokens(num_new, gap_s)
        self._last_message_s = now

    def finish(self) -> None:
        """All choices ended well."""
        facts = self.flow.facts
        if facts.was_prefilled:
            num_cached = facts.num_prefill_cached_blocks * self.block_size
        else:
            num_cached = facts.num_decode_cached_tokens
        num_prompt, num_output = len(self.flow.request.token_ids), sum(self._num_tokens)
        timing = make_timing(facts, self._clock.now(), max(self._num_tokens))
        self._metrics.finished(
            timing, num_prompt=num_prompt, num_cached=num_cached, num_output=num_output, reasons=self._reasons
        )
        summary = Summary(
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            num_cached_tokens=num_cached,
            timing=timing,
        )
        self._events.put_nowait(summary)

    def fail(self, error: PdclusterError) -> None:
        """The request ended with an error."""
        self._events.put_nowait(error)

    def outcome(self) -> str:
        """How it ended, for the metrics."""
        assert self.flow.is_ended, "a run is counted once it has ended"
        return {RequestState.FINISHED: "finished", RequestState.FAILED: "failed"}.get(self.flow.state, "cancelled")
