"""An event loop whose time is virtual: when nothing is ready it jumps to the next timer, so that an hour passes in the
time that its events take. Everything on it, asyncio's own timeouts included, runs in one thread and in one order.

What runs in a `SimProcess` (`cluster.sim.process`) is held back while that is stopped and dropped once it is dead:
each callback belongs to the process in whose context it was scheduled. Knows nothing about what the processes do.
"""

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from core.errors import SimulationError

RESOLUTION_S = 1e-9
"""Timers that are due within it are due now; the same on every machine."""
Outcome = TypeVar("Outcome")


class Owner(Protocol):
    """Whose turn a callback is."""

    def take_turn(self, turn: "Turn") -> None:
        """Run it now, keep it, or drop it."""
        ...


OWNER: contextvars.ContextVar[Owner | None] = contextvars.ContextVar("owner", default=None)
"""The process that runs; None outside of all."""


class Turn:
    """One callback of a process."""

    __slots__ = ("arguments", "callback", "context", "handle", "owner")

    def __init__(
        self, owner: Owner, callback: Callable[..., object], arguments: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self.owner = owner
        self.callback = callback
        self.arguments = arguments
        self.context = context
        self.handle: asyncio.Handle | None = None
        """As whoever scheduled it has it, to cancel it."""

    def __call__(self) -> None:
        self.owner.take_turn(self)

    def run(self) -> None:
        """Unless it was cancelled meanwhile."""
        if self.handle is None or not self.handle.cancelled():
            self.callback(*self.arguments)


class _Jumps(selectors.SelectSelector):
    """Waits by moving the time on; nothing from outside ever comes."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise SimulationError(problem="nothing can happen any more, and somebody still waits")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. Starts at second 0."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self._jumps.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        owner = OWNER.get() if context is None else context.get(OWNER)
        if owner is None:
            return super().call_soon(callback, *args, context=context)
        turn = Turn(owner, callback, args, contextvars.copy_context() if context is None else context)
        turn.handle = super().call_soon(turn, context=turn.context)
        return turn.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        owner = OWNER.get() if context is None else context.get(OWNER)
        if owner is None:
            return super().call_at(when, callback, *args, context=context)
        turn = Turn(owner, callback, args, contextvars.copy_context() if context is None else context)
        handle = super().call_at(when, turn, context=turn.context)
        turn.handle = handle
        return handle

    def run_turn(self, turn: Turn) -> None:
        """Run one that was kept, soon."""
        super().call_soon(turn, context=turn.context)


class LoopClock:
    """The loop's time as a `Clock`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wall_start_s: float = 1_700_000_000.0) -> None:
        self._loop = loop
        self._wall_start_s = wall_start_s

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._wall_start_s + self._loop.time()

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(max(seconds, 0.0), _wake, future)
        try:
            await future
        finally:
            timer.cancel()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def run_virtual(main: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
    """Run `main()` on a virtual loop of its own. Raises what it raises, and SimulationError when nothing can happen any
    more before it has ended.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
