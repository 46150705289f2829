"""Admission: how many requests a router holds at once, and how many prompt tokens wait for their first answer token.

Every choice of a request counts as one. Both counts are released exactly once, whatever ends the request. Knows nothing
about HTTP or workers.
"""

from core.errors import InvalidRequestError, OverloadedError


class Ticket:
    """One admitted request's share. `release` may be called any number of times."""

    def __init__(self, admission: "Admission", num_children: int, num_prompt_tokens: int) -> None:
        self._admission = admission
        self._num_children = num_children
        self._num_prompt_tokens = num_prompt_tokens

    def release_prompt(self) -> None:
        """The prompt is computed: it no longer waits."""
        self._admission.num_queued_prompt_tokens -= self._num_prompt_tokens
        self._num_prompt_tokens = 0

    def release(self) -> None:
        """The request has ended."""
        self.release_prompt()
        self._admission.num_in_flight -= self._num_children
        self._num_children = 0


class Admission:
    """Counts of one router process."""

    def __init__(self, *, max_requests: int, max_queued_prompt_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_queued_prompt_tokens = max_queued_prompt_tokens
        self.num_in_flight = 0
        self.num_queued_prompt_tokens = 0

    def reserve(self, *, num_children: int, num_prompt_tokens: int) -> Ticket:
        """Admit a request as a whole or not at all.

        Raises OverloadedError when there is no room now, InvalidRequestError when there never will be. A prompt longer
        than the token limit is taken when nothing else waits.
        """
        if num_children > self.max_requests:
            text = f"The request asks for {num_children} choices; this server takes {self.max_requests} at once."
            raise InvalidRequestError(message=text, param="n")
        if self.num_in_flight + num_children > self.max_requests:
            raise OverloadedError(reason=f"{self.num_in_flight} of {self.max_requests} requests are in flight")
        queued = self.num_queued_prompt_tokens
        if queued and queued + num_prompt_tokens > self.max_queued_prompt_tokens:
            text = f"{queued} prompt tokens are waiting, the limit is {self.max_queued_prompt_tokens}"
            raise OverloadedError(reason=text)
        self.num_in_flight += num_children
        self.num_queued_prompt_tokens += num_prompt_tokens
        return Ticket(self, num_children, num_prompt_tokens)
