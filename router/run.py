"""One request while it runs: its flow, and the text of its choices on their way to its reader.

Turns checked tokens into text, finds stop strings, and closes with a Summary or an error. Knows nothing about workers.
"""

from collections.abc import Iterable
from typing import Literal

from core.errors import PdclusterError
from core.messages import TokenUpdate
from core.request import RequestState
from router.buffer import EventBuffer
from router.flow import RequestFlow
from router.generation import ChildDelta, PreparedRequest, Summary, make_timing
from router.metrics import ChoiceTimes, RouterMetrics
from router.text import TextCodec, TextStream


class Run:
    """See above."""

    def __init__(
        self,
        *,
        flow: RequestFlow,
        prepared: PreparedRequest,
        text: TextCodec,
        metrics: RouterMetrics,
        buffer: EventBuffer,
        prompt: int = 0,
        client_request_id: str = "",
    ) -> None:
        """`buffer`: where events go; `prompt`: index of this prompt in it."""
        self.flow = flow
        self.client_request_id = client_request_id
        self.block_size = 1
        """Of the workers that serve the current attempt."""
        self._metrics = metrics
        self._streams = [TextStream(text, prepared.stop) for _ in range(prepared.num_children)]
        self._stop_token_ids = frozenset(prepared.sampling.stop_token_ids)
        self._choices = [ChoiceTimes() for _ in range(prepared.num_children)]
        self.buffer = buffer
        self._prompt = prompt
        self._has_counted_prompt = False
        self._num_endings = 0

    @property
    def num_open(self) -> int:
        """Choices whose text goes on."""
        return 0 if self.flow.is_ended else sum(not choice.finish_reason for choice in self._choices)

    def check(self) -> None:
        """RQ-1: the reader is told of one end, once the flow has ended, and not before. Flow's own invariants, too."""
        self.flow.check()
        name, state = self.flow.request.request_id, self.flow.state
        if not self.flow.is_ended:
            assert not self._num_endings, f"RQ-1: the reader of {name} was told of an end while it is {state.value}"
            assert self.num_open > 0, f"RQ-1: every choice of {name} has ended while it is {state.value}"
        elif state is not RequestState.CANCELLED:
            assert self._num_endings, f"RQ-1: {name} is {state.value} and its reader was told nothing"

    def deliver(self, updates: Iterable[TokenUpdate]) -> list[int]:
        """Queue the text of new tokens. Returns the children that a stop string ended."""
        stopped: list[int] = []
        now = self.flow.facts.last_token_s
        assert now is not None, "RQ-1: tokens came at no time"
        for update in updates:
            if update.child in stopped:
                continue
            delta = self._delta(update)
            choice = self._choices[update.child]
            if delta.token_ids:
                self._metrics.tokens(choice, self.flow.facts.arrived_s, len(delta.token_ids), now)
            choice.finish_reason = delta.finish_reason or ""
            if isinstance(delta.stop_reason, str):
                stopped.append(update.child)
            self.buffer.put(self._prompt, delta)
        if not self._has_counted_prompt:
            self._count_prompt()
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

    def _count_prompt(self) -> None:
        self._has_counted_prompt = True
        num_prompt, num_cached = len(self.flow.request.token_ids), self._num_cached_tokens()
        self._metrics.prompt_computed(
            self.flow.facts, num_prompt=num_prompt, num_cached=num_cached, block_size=self.block_size
        )

    def _num_cached_tokens(self) -> int:
        """Prompt tokens that no worker had to compute."""
        facts = self.flow.facts
        if facts.needs_prefill:
            return facts.num_prefill_cached_blocks * self.block_size
        return facts.num_decode_cached_tokens

    def finish(self) -> None:
        """All choices ended well."""
        request, facts = self.flow.request, self.flow.facts
        timing = make_timing(facts, max(choice.num_tokens for choice in self._choices))
        self._metrics.finished(request, facts.arrived_s, timing, self._choices)
        summary = Summary(
            num_prompt_tokens=len(request.token_ids),
            num_output_tokens=sum(choice.num_tokens for choice in self._choices),
            num_cached_tokens=self._num_cached_tokens(),
            timing=timing,
        )
        self._num_endings += 1
        self.buffer.put(self._prompt, summary)

    def fail(self, error: PdclusterError) -> None:
        """The request ended with an error."""
        self._num_endings += 1
        self.buffer.fail(error)

    def outcome(self) -> Literal["finished", "failed", "cancelled"]:
        """How it ended, for the metrics."""
        assert self.flow.is_ended, "a run is counted once it has ended"
        if self.flow.state is RequestState.FINISHED:
            return "finished"
        return "failed" if self.flow.state is RequestState.FAILED else "cancelled"
