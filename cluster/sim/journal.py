"""What happened in a simulation, line by line: the last lines for whoever reads a failure, a digest of all for whoever
compares two runs, and all of them in a file if asked for.

Knows nothing about what the lines mean.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from typing import TextIO

from core.messages import Alive, AnyMessage, RequestMessage, RouterStatus, WorkerStatus

HEARTBEATS = (Alive, WorkerStatus, RouterStatus)
LINES_MAX = 400
"""Lines that are kept."""


class Journal:
    """Lines with the second that they were written in."""

    def __init__(self, now: Callable[[], float], file: TextIO | None = None) -> None:
        self._now = now
        self._file = file
        self._digest = hashlib.sha256()
        self.last: deque[str] = deque(maxlen=LINES_MAX)

    def note(self, text: str) -> None:
        """Write a line."""
        line = f"{self._now():12.6f} {text}"
        self._digest.update(line.encode())
        self.last.append(line)
        if self._file is not None:
            self._file.write(line + "\n")

    def note_frame(self, sender: str, receiver: str, messages: list[AnyMessage]) -> None:
        """A frame on a link; heartbeats are left out."""
        said = [_describe(message) for message in messages if not isinstance(message, HEARTBEATS)]
        if said:
            self.note(f"{sender} > {receiver}: {', '.join(said)}")

    def digest(self) -> str:
        """Of all lines so far, hexadecimal."""
        return self._digest.hexdigest()


def _describe(message: AnyMessage) -> str:
    kind = type(message).__name__
    return f"{kind} {message.request_id}/{message.attempt}" if isinstance(message, RequestMessage) else kind
