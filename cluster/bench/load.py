"""Sends prompts at their times, at most so many at once, and times the whole.

Knows nothing about HTTP or statistics: it drives anything that turns a prompt into a record.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from cluster.bench.record import RequestRecord
from cluster.bench.workload import Prompt
from core.clock import Clock

Sender = Callable[[Prompt, float], Awaitable[RequestRecord]]
"""Sends a prompt that waited so many seconds for the limit on concurrency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What a load came to."""

    records: list[RequestRecord]
    """In order of the prompts."""
    duration_s: float
    """From before the first request was due to the end of the last one."""
    lateness_s: float
    """By how much the client itself was late at worst: due to handed over, before any wait for concurrency."""


async def run_load(
    send: Sender, prompts: Sequence[Prompt], offsets_s: Sequence[float], max_concurrency: int | None, clock: Clock
) -> LoadResult:
    """Hand each prompt to `send` at its offset from now. Ends when all have ended."""
    limit: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    )

    async def one(prompt: Prompt) -> RequestRecord:
        due_s = clock.now()
        async with limit:
            return await send(prompt, clock.now() - due_s)

    begun_s, lateness_s = clock.now(), 0.0
    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt, offset_s in zip(prompts, offsets_s, strict=True):
            if (wait_s := begun_s + offset_s - clock.now()) > 0:
                await clock.sleep(wait_s)
            lateness_s = max(lateness_s, clock.now() - begun_s - offset_s)
            tasks.append(group.create_task(one(prompt)))
    records = [task.result() for task in tasks]
    return LoadResult(records=records, duration_s=clock.now() - begun_s, lateness_s=lateness_s)


async def run_until(
    send: Sender,
    prompts: Sequence[Prompt],
    offsets_s: Sequence[float],
    until_s: float,
    clock: Clock,
) -> list[RequestRecord]:
    """As `run_load`, but nothing is sent after the time `until_s`; waits for what was sent."""
    begun_s = clock.now()
    due = [(p, o) for p, o in zip(prompts, offsets_s, strict=True) if begun_s + o < until_s]
    result = await run_load(send, [p for p, _ in due], [o for _, o in due], None, clock)
    await clock.sleep(until_s - clock.now())
    return result.records
