"""The request path over scripted workers: what goes over the links, what the reader sees, that nothing stays held."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    PdclusterError,
    TransferFailedError,
    WorkerLostError,
)
from core.messages import (
    AnyMessage,
    Cancel,
    Connect,
    Disconnect,
    FromWorker,
    Offer,
    Prefill,
    Refused,
    Release,
    RequestMessage,
    Submit,
)
from core.request import SamplingParams
from router.generation import ChildDelta, GenerationEvent, PreparedRequest, Summary
from tests.router.scripted import Stage, open_stage, settle

LONG = tuple(range(40))
"""A prompt of 2 demanded blocks."""


def prepared(
    token_ids: tuple[int, ...] = LONG, *, n: int = 1, max_tokens: int = 32, stop: tuple[str, ...] = ()
) -> PreparedRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return PreparedRequest(token_ids=token_ids, sampling=sampling, num_children=n, stop=stop)


async def read(stage: Stage, request: PreparedRequest, seconds: float = 1.0) -> list[GenerationEvent]:
    """All events, while time passes."""

    async def collect() -> list[GenerationEvent]:
        return [event async for event in stage.service.generate(request)]

    task = asyncio.ensure_future(collect())
    await stage.run_for(seconds)
    assert task.done(), "the request did not end in time"
    return task.result()


def text_of(events: list[GenerationEvent], child: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, ChildDelta) and event.child == child)


def refuse(kind: str) -> Callable[[RequestMessage], list[FromWorker] | None]:
    def reply(message: RequestMessage) -> list[FromWorker] | None:
        if not isinstance(message, Submit | Prefill):
            return None
        refused = Refused(request_id=message.request_id, attempt=message.attempt, kind=kind, reason="no")  # type: ignore[arg-type]
        return [refused]

    return reply


def stay_silent(*kinds: type[RequestMessage]) -> Callable[[RequestMessage], list[FromWorker] | None]:
    return lambda message: [] if isinstance(message, kinds) else None


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_prompt_is_prefilled_pulled_and_decoded_when_all_is_well(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            events = await read(stage, prepared())
            assert text_of(events) == "Hi there"
            summary = events[-1]
            assert isinstance(summary, Summary)
            assert (summary.num_prompt_tokens, summary.num_output_tokens, summary.num_cached_tokens) == (40, 9, 16)
            timing = summary.timing
            assert sum(seconds or 0.0 for seconds in timing.phases().values()) == timing.total_s
            assert timing.prefill_s is not None and timing.transfer_s is not None
            decode, prefill = stage.workers["decode-0"], stage.workers["prefill-0"]
            assert len(decode.sent(Submit)) == len(decode.sent(Offer)) == len(prefill.sent(Release)) == 1
            assert not decode.sent(Cancel) and not prefill.sent(Cancel)
            assert stage.service.admission.num_in_flight == 0

    run(main())


def test_no_prefill_is_asked_when_the_prompt_has_no_full_block(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            events = await read(stage, prepared(tuple(range(16))))
            assert text_of(events) == "Hi there"
            assert not stage.workers["prefill-0"].sent(Prefill)

    run(main())


def test_decode_does_it_all_when_colocated(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=0, mode="colocated") as stage:
            assert stage.service.is_ready()
            events = await read(stage, prepared())
            assert text_of(events) == "Hi there"
            submit = stage.workers["decode-0"].sent(Submit)[0]
            assert isinstance(submit, Submit) and submit.prefill_worker is None

    run(main())


def test_child_ends_before_the_stop_string_when_one_appears(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            events = await read(stage, prepared(stop=("the", "xyz")))
            assert text_of(events) == "Hi "
            deltas = [event for event in events if isinstance(event, ChildDelta)]
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "the")
            assert isinstance(events[-1], Summary) and events[-1].num_output_tokens == 6
            assert len(stage.cancels("decode-0")) == 1

    run(main())


def test_every_child_is_complete_when_n_is_three(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            decode = stage.workers["decode-0"]
            replies = [stage.reply(text) for text in ("one", "stop here", "three")]
            decode.script = lambda request, child: replies[child](request, child)
            events = await read(stage, prepared(n=3, stop=("stop",)))
            assert [text_of(events, child) for child in range(3)] == ["one", "", "three"]
            reasons = [event.finish_reason for event in events if isinstance(event, ChildDelta)]
            assert reasons.count("stop") == 3

    run(main())


@pytest.mark.parametrize("kind", ["transfer_failed", "credit_lapsed", "unknown_peer", "draining"])
def test_another_pair_serves_when_one_refuses(model_directory: Path, kind: str) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=2, num_decode=2) as stage:
            stage.workers["decode-0"].replies = refuse(kind)
            for _ in range(2):
                assert text_of(await read(stage, prepared())) == "Hi there"
            submits = stage.workers["decode-1"].sent(Submit)
            assert {m.attempt for m in submits if isinstance(m, Submit)} == {0, 1}

    run(main())


def test_request_fails_after_three_attempts_when_everything_refuses(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            stage.workers["prefill-0"].replies = refuse("transfer_failed")
            with pytest.raises(TransferFailedError):
                await read(stage, prepared())
            decode = stage.workers["decode-0"]
            assert [m.attempt for m in decode.sent(Submit) if isinstance(m, Submit)] == [0, 1, 2]
            assert [m.attempt for m in decode.sent(Cancel) if isinstance(m, Cancel)] == [0, 1, 2]
            assert stage.service.admission.num_in_flight == 0

    run(main())


@pytest.mark.parametrize(
    ("kind", "error"),
    [("overloaded", OverloadedError), ("invalid", InvalidRequestError), ("too_long", InvalidRequestError)],
)
def test_client_is_told_at_once_when_decode_cannot_take_it(
    model_directory: Path, kind: str, error: type[PdclusterError]
) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            stage.workers["decode-0"].replies = refuse(kind)
            with pytest.raises(error):
                await read(stage, prepared())
            assert len(stage.workers["decode-0"].sent(Submit)) == 1

    run(main())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_another_pair_serves_when_a_worker_dies_before_the_first_token(model_directory: Path, victim: str) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=2, num_decode=2) as stage:
            stage.workers["prefill-0"].replies = stay_silent(Prefill)
            task = asyncio.ensure_future(read(stage, prepared(), 2.0))
            await settle()
            stage.kill(victim)
            stage.workers.get("prefill-0", stage.workers["prefill-1"]).replies = lambda message: None
            assert text_of(await task) == "Hi there"
            if victim == "prefill-0":
                assert len(stage.cancels("decode-0")) == 1
                assert len(stage.workers["decode-0"].sent(Disconnect)) == 1
            else:
                assert len(stage.cancels("prefill-0")) == 1

    run(main())


def test_stream_ends_with_an_error_when_decode_dies_after_the_first_token(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            decode = stage.workers["decode-0"]
            decode.replies = lambda m: decode.ordinary(m)[:3] if isinstance(m, Offer) else None
            events: list[GenerationEvent] = []

            async def collect() -> None:
                async for event in stage.service.generate(prepared()):
                    events.append(event)

            task = asyncio.ensure_future(collect())
            await settle()
            assert text_of(events) == "Hi"
            stage.kill("decode-0")
            await settle()
            with pytest.raises(WorkerLostError):
                task.result()
            assert not stage.service.is_ready()

    run(main())


def test_worker_is_dead_and_dialled_again_when_its_heartbeats_stop(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            decode = stage.workers["decode-0"]
            decode.is_silent = True
            await stage.run_for(4.5)
            assert stage.service.is_ready()
            await stage.run_for(1.5)
            assert not stage.service.is_ready() or len(stage.network.links) > 2
            decode.is_silent = False
            await stage.run_for(1.0)
            assert stage.service.is_ready() and len(decode.sent(Connect)) == 2

    run(main())


def test_both_workers_are_cancelled_when_the_reader_goes(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            stage.workers["decode-0"].replies = stay_silent(Offer)
            async with aclosing(stage.service.generate(prepared())) as events:
                task = asyncio.ensure_future(anext(events))
                await settle()
                assert stage.service.admission.num_in_flight == 1
                task.cancel()
                await settle()
            assert len(stage.cancels("decode-0")) == len(stage.cancels("prefill-0")) == 1
            assert stage.service.admission.num_in_flight == stage.service.admission.num_queued_prompt_tokens == 0

    run(main())


def test_request_fails_when_its_deadline_passes(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, request_timeout_s=5.0) as stage:
            stage.workers["decode-0"].replies = stay_silent(Submit)
            with pytest.raises(DeadlineExceededError, match="within 5 s"):
                await read(stage, prepared(), 6.0)
            assert len(stage.cancels("decode-0")) == 1

    run(main())


def test_request_fails_at_once_when_there_is_no_worker(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=0) as stage:
            with pytest.raises(NoWorkerError, match="prefill"):
                await read(stage, prepared())
            assert not stage.service.is_ready()

    run(main())


def test_request_is_refused_when_the_router_is_full(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, max_running_sequences=2) as stage:
            stage.workers["decode-0"].replies = stay_silent(Submit)
            async with aclosing(stage.service.generate(prepared(n=2))) as held:
                task = asyncio.ensure_future(anext(held))
                await settle()
                with pytest.raises(OverloadedError):
                    await anext(stage.service.generate(prepared()))
                task.cancel()
                await settle()
            assert stage.service.admission.num_in_flight == 0

    run(main())


def test_new_life_serves_when_a_worker_restarts_with_a_higher_epoch(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            stage.kill("decode-0")
            stage.add("decode", 0, text="again", epoch=2)
            stage.publish()
            await stage.run_for(0.6)
            assert text_of(await read(stage, prepared())) == "again"

    run(main())


def test_worker_gets_no_request_when_it_drains(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_decode=2) as stage:
            stage.workers["decode-0"].state = "draining"
            await stage.run_for(0.6)
            for _ in range(3):
                await read(stage, prepared())
            assert len(stage.workers["decode-1"].sent(Submit)) == 3

    run(main())


def test_messages_of_one_iteration_leave_as_one_frame_when_many_are_sent(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            frames: list[int] = []
            link = stage.network.links[1]
            send = link.send

            def count(messages: list[AnyMessage]) -> None:
                frames.append(len(messages))
                send(messages)

            link.send = count  # type: ignore[method-assign]
            tasks = [asyncio.ensure_future(anext(stage.service.generate(prepared()))) for _ in range(5)]
            await settle()
            assert frames[0] == 5
            for task in tasks:
                task.cancel()
            await settle()

    run(main())


def test_status_counts_workers_and_requests_when_asked(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_decode=2) as stage:
            status = stage.service.status()
            assert status.num_workers_ready == {"prefill": 1, "decode": 2}
            assert (status.num_in_flight, status.num_in_flight_max) == (0, 256)
            assert [worker.worker for worker in status.workers] == ["decode-0", "decode-1", "prefill-0"]

    run(main())
