"""The events of one client's request on their way from the router to whoever reads them, bounded.

A reader that falls too far behind is cut, so that a client that does not read costs no more memory than the limit.
Knows nothing about workers or HTTP.
"""

import asyncio

from core.errors import PdclusterError, SlowReaderError
from router.generation import ChildDelta, GenerationEvent

UNREAD_TOKENS_MAX = 1024
"""Tokens of one choice that may wait for their reader."""

IndexedEvent = tuple[int, GenerationEvent]
"""Index of the prompt, and an event of it."""


class EventBuffer:
    """One writer for each prompt, one reader for all. Used from one asyncio loop only."""

    def __init__(self, num_choices: int) -> None:
        """`num_choices`: over all prompts."""
        self.limit = UNREAD_TOKENS_MAX * num_choices
        self._num_unread = 0
        self._events: asyncio.Queue[IndexedEvent | PdclusterError] = asyncio.Queue()

    @property
    def overflow(self) -> SlowReaderError | None:
        """Why the reader must be cut, or None."""
        if self._num_unread <= self.limit:
            return None
        return SlowReaderError(num_tokens=self._num_unread, limit=self.limit)

    def put(self, prompt: int, event: GenerationEvent) -> None:
        if isinstance(event, ChildDelta):
            self._num_unread += len(event.token_ids)
        self._events.put_nowait((prompt, event))

    def fail(self, error: PdclusterError) -> None:
        """The request has ended with an error. Its reader gets what came before, unless it was too slow."""
        if isinstance(error, SlowReaderError):
            while not self._events.empty():
                self._events.get_nowait()
            self._num_unread = 0
        self._events.put_nowait(error)

    async def next_event(self) -> IndexedEvent:
        """The next event; raises the error that ended the request."""
        item = await self._events.get()
        if isinstance(item, PdclusterError):
            raise item
        if isinstance(item[1], ChildDelta):
            self._num_unread -= len(item[1].token_ids)
        return item
