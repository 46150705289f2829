"""When a signal may interrupt a command, and when it has to wait. Main thread only. Knows nothing about clusters."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and the end of the terminal raise KeyboardInterrupt, as Ctrl-C does; `nohup` keeps its meaning."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    with _handled(_interrupt, *(number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)):
        yield


@contextmanager
def uninterruptible() -> Iterator[None]:
    """No such signal does anything: what runs inside has its own deadlines and must come to its end."""
    with _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: int) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
