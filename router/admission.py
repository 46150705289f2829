"""Admission: how many prompts and choices a router holds at once, and how many prompt tokens wait for a first token.

The prompts of one client's request are admitted together or not at all. Every count is given back exactly once,
whatever ends a request. Knows nothing about HTTP or workers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from core.clock import Clock
from core.errors import InvalidRequestError, OverloadedError

RETRY_AFTER_S_MAX = 30
"""A refused client is never sent away for longer; an estimate over more is no better than none."""
_WINDOW_S = 30.0
"""What was given back longer ago than about this says nothing about now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one prompt takes."""

    num_children: int
    num_prompt_tokens: int


class Ticket:
    """One admitted prompt's share. `release` may be called any number of times."""

    def __init__(self, admission: "Admission", share: Share) -> None:
        self._admission = admission
        self._num_children = share.num_children
        self._num_prompt_tokens = share.num_prompt_tokens

    def release_prompt(self) -> None:
        """The prompt is computed: it no longer waits."""
        self._admission.take_back_tokens(self._num_prompt_tokens)
        self._num_prompt_tokens = 0

    def release(self) -> None:
        """The request has ended."""
        self.release_prompt()
        self._admission.take_back(self, self._num_children)
        self._num_children = 0

    @property
    def counts(self) -> tuple[int, int]:
        """(choices, queued prompt tokens) that it stands for."""
        return self._num_children, self._num_prompt_tokens


class DrainRate:
    """How fast something is given back, as an average that forgets."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = self._noted_s = clock.now()
        self._amount = 0.0

    def note(self, amount: int) -> None:
        """So much was given back now."""
        self._amount = self._remembered() + amount
        self._noted_s = self._clock.now()

    def seconds_until(self, amount: int) -> int:
        """When `amount` more will have been given back, in whole seconds a client can wait; 1 when nothing is known."""
        weight_s = _WINDOW_S * -math.expm1((self._began_s - self._clock.now()) / _WINDOW_S)
        remembered = self._remembered()
        if remembered <= 0 or weight_s <= 0:
            return 1
        return min(RETRY_AFTER_S_MAX, max(1, math.ceil(amount * weight_s / remembered)))

    def _remembered(self) -> float:
        return self._amount * math.exp((self._noted_s - self._clock.now()) / _WINDOW_S)


class Admission:
    """Counts of one router process."""

    def __init__(
        self, *, clock: Clock, max_requests: int, max_queued_prompt_tokens: int, max_running_sequences: int = 512
    ) -> None:
        self.max_requests = max_requests
        self.max_running_sequences = max_running_sequences
        self.max_queued_prompt_tokens = max_queued_prompt_tokens
        self.num_sequences = 0
        """Choices in flight."""
        self.num_queued_prompt_tokens = 0
        self.tickets: set[Ticket] = set()
        """Of prompts that have not ended."""
        self._requests_rate = DrainRate(clock)
        self._sequences_rate = DrainRate(clock)
        self._tokens_rate = DrainRate(clock)

    @property
    def num_in_flight(self) -> int:
        """Prompts in flight."""
        return len(self.tickets)

    def reserve(self, *, num_children: int, num_prompt_tokens: int) -> Ticket:
        """As `reserve_all`, for one prompt."""
        return self.reserve_all([Share(num_children=num_children, num_prompt_tokens=num_prompt_tokens)])[0]

    def reserve_all(self, shares: Sequence[Share]) -> list[Ticket]:
        """Admit the prompts of one request, in order, all of them or none.

        Raises OverloadedError when there is no room now, InvalidRequestError when there never will be. Prompts longer
        than the token limit are taken when nothing else waits.
        """
        num_sequences = sum(share.num_children for share in shares)
        num_tokens = sum(share.num_prompt_tokens for share in shares)
        self._refuse_impossible(len(shares), num_sequences)
        counts = (
            (self.num_in_flight, len(shares), self.max_requests, self._requests_rate, "requests are in flight"),
            (self.num_sequences, num_sequences, self.max_running_sequences, self._sequences_rate, "choices run"),
            (
                self.num_queued_prompt_tokens,
                num_tokens if self.num_queued_prompt_tokens else 0,
                self.max_queued_prompt_tokens,
                self._tokens_rate,
                "prompt tokens wait",
            ),
        )
        for held, asked, limit, rate, what in counts:
            if asked and held + asked > limit:
                retry_after_s = rate.seconds_until(min(held, held + asked - limit))
                reason = f"{held} of at most {limit} {what} and this needs {asked} more"
                raise OverloadedError(reason=reason, retry_after_s=retry_after_s)
        tickets = [Ticket(self, share) for share in shares]
        self.num_sequences += num_sequences
        self.num_queued_prompt_tokens += num_tokens
        self.tickets.update(tickets)
        return tickets

    def _refuse_impossible(self, num_prompts: int, num_sequences: int) -> None:
        if num_prompts > self.max_requests:
            text = f"The request has {num_prompts} prompts; this server takes {self.max_requests} at once."
            raise InvalidRequestError(message=text, param="prompt")
        if num_sequences > self.max_running_sequences:
            limit = self.max_running_sequences
            text = f"The request asks for {num_sequences} choices; this server runs {limit} at once."
            raise InvalidRequestError(message=text, param="n")

    def take_back_tokens(self, num_tokens: int) -> None:
        """For tickets only."""
        self.num_queued_prompt_tokens -= num_tokens
        if num_tokens:
            self._tokens_rate.note(num_tokens)

    def take_back(self, ticket: Ticket, num_children: int) -> None:
        """For tickets only."""
        self.num_sequences -= num_children
        if ticket in self.tickets:
            self.tickets.discard(ticket)
            self._requests_rate.note(1)
            self._sequences_rate.note(num_children)

    def check(self) -> None:
        """RQ-1: the counts are those of the tickets, which are the requests that have not ended."""
        counts = [ticket.counts for ticket in self.tickets]
        assert self.num_sequences == sum(count for count, _ in counts) >= 0, "RQ-1: choices in flight"
        assert self.num_queued_prompt_tokens == sum(tokens for _, tokens in counts) >= 0, "RQ-1: queued prompt tokens"
