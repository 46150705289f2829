"""Stop strings in a stream of text: finds the first to complete, holds back only what could be the beginning of one.

The result does not depend on how the text is cut into pieces. Knows nothing about tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """What one piece of text led to."""

    text: str
    """Text that may be delivered now; a stop string is never part of it."""
    stop: str | None = None
    """The stop string that completed, after which nothing more is delivered."""


class StopMatcher:
    """Matches stop strings in one child's text. The string whose end comes first wins, then the longest one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Take more text in. Not to be called after a match."""
        if not self._stops:
            return StopResult(text=text)
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            self._held = ""
            start, stop = match
            return StopResult(text=buffer[:start], stop=stop)
        num_held = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - num_held :]
        return StopResult(text=buffer[: len(buffer) - num_held])

    def finish(self) -> str:
        """The text ended: what was held back is part of it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop` but not all of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
