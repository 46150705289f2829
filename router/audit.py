"""One audit of the workers that a router knows: asked of all at once, answered within a limit.

Knows nothing about what is checked.
"""

import itertools
from collections.abc import Callable, Iterable

from core.clock import Clock
from core.ids import WorkerId
from core.messages import Audit, Audited

AUDIT_TIMEOUT_S = 10.0
"""A worker that has not answered by then is called silent. It answers between two steps."""
_POLL_S = 0.05


class Audits:
    """The audits under way. Used from one asyncio loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._asked: dict[int, dict[WorkerId, Audited | None]] = {}

    def answer(self, worker: WorkerId, message: Audited) -> None:
        """Take what a worker said; an answer that came too late, or that nobody asked for, is dropped."""
        answers = self._asked.get(message.number)
        if answers is not None and worker in answers and message.member == worker:
            answers[worker] = message

    async def ask(
        self, workers: Iterable[WorkerId], send: Callable[[WorkerId, Audit], None]
    ) -> tuple[list[Audited], list[WorkerId]]:
        """Send each of `workers` an Audit and wait for their answers. Returns these, and who was silent."""
        number = next(self._numbers)
        answers = self._asked[number] = dict.fromkeys(workers)
        deadline_s = self._clock.now() + AUDIT_TIMEOUT_S
        try:
            for worker in answers:
                send(worker, Audit(number=number))
            while None in answers.values() and self._clock.now() < deadline_s:
                await self._clock.sleep(_POLL_S)
        finally:
            del self._asked[number]
        silent = [worker for worker, answer in answers.items() if answer is None]
        return [answer for answer in answers.values() if answer is not None], silent
