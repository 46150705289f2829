"""When a signal may interrupt a command, and when it has to wait. Main thread only. Knows nothing about clusters."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def uninterruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM do nothing: what runs inside has its own deadlines and must come to its end."""
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
