"""Events between a request and its reader: order, the limit, and what a reader gets that was too slow."""

import asyncio

import pytest

from core.errors import NoWorkerError, SlowReaderError
from router.buffer import UNREAD_TOKENS_MAX, EventBuffer
from router.generation import ChildDelta


def delta(num_tokens: int) -> ChildDelta:
    return ChildDelta(child=0, text="", token_ids=(1,) * num_tokens, logprobs=())


def test_events_come_in_order_and_the_error_after_them() -> None:
    async def main() -> None:
        buffer = EventBuffer(num_choices=2)
        buffer.put(0, delta(1))
        buffer.put(1, delta(2))
        buffer.fail(NoWorkerError(role="decode"))
        assert await buffer.next_event() == (0, delta(1))
        assert await buffer.next_event() == (1, delta(2))
        with pytest.raises(NoWorkerError):
            await buffer.next_event()

    asyncio.run(main())


def test_reader_is_too_slow_when_more_tokens_wait_than_its_choices_may_have() -> None:
    async def main() -> None:
        buffer = EventBuffer(num_choices=2)
        buffer.put(0, delta(2 * UNREAD_TOKENS_MAX))
        assert buffer.overflow is None
        buffer.put(1, delta(1))
        assert isinstance(buffer.overflow, SlowReaderError)
        await buffer.next_event()
        assert buffer.overflow is None

    asyncio.run(main())


def test_nothing_is_kept_for_a_reader_that_was_too_slow() -> None:
    async def main() -> None:
        buffer = EventBuffer(num_choices=1)
        for _ in range(3):
            buffer.put(0, delta(UNREAD_TOKENS_MAX))
        overflow = buffer.overflow
        assert overflow is not None
        buffer.fail(overflow)
        assert buffer.overflow is None
        with pytest.raises(SlowReaderError, match=f"{3 * UNREAD_TOKENS_MAX} tokens"):
            await buffer.next_event()

    asyncio.run(main())
