"""What the text around the fault matrix promises: slow clients, answers that are not streamed, a last worker that is
back in time, requests of several prompts, limits from the YAML. RQ-1, RQ-2.
"""

from pathlib import Path

import pytest

from cluster.local_runtime import LocalRuntime
from cluster.runtime import RouterSpec
from core.config import parse_config
from core.ids import Epoch
from router import sse
from router.actions import StallLimits
from tests.e2e.faults.cells import MAX_TOKENS, PROMPT, play_cell
from tests.e2e.faults.client import Call
from tests.e2e.faults.columns import COLUMNS, open_all
from tests.e2e.faults.rows import NO_FAULT, killed_and_back
from tests.e2e.faults.stage import CONFIG, ROUTER, FaultStage, expected, play
from tests.e2e.faults.table import PAGE, read_table
from tests.e2e.stage import LetterCodec

TABLE = read_table(PAGE.read_text())


def test_everything_is_freed_when_a_client_does_not_read_for_the_stated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "WRITE_TIMEOUT_S", 0.02)
    stage = FaultStage(num_pairs=1)

    async def scene() -> None:
        await stage.open()
        idle = stage.tasks()
        COLUMNS["decode"].close(stage)
        call = await stage.enter(PROMPT, MAX_TOKENS)
        await stage.until(lambda: COLUMNS["decode"].is_there(stage))
        call.reads.clear()
        open_all(stage)
        await stage.until(call.task.done, 500.0)
        call.task.result()
        await stage.until(lambda: not stage.books() and stage.tasks() == idle, 0.5)
        await stage.close()

    play(stage, scene)


def test_answer_has_the_status_of_its_error_when_it_is_not_streamed_and_breaks_after_tokens() -> None:
    stage = FaultStage(num_pairs=1)

    async def scene() -> None:
        await stage.open()
        COLUMNS["decode"].close(stage)
        call = Call(stage.app, PROMPT, max_tokens=MAX_TOKENS, request_id="whole", is_streamed=False)
        await stage.until(lambda: len(stage.service.runs) == 1)
        (stage.run,) = stage.service.runs.values()
        await stage.until(lambda: COLUMNS["decode"].is_there(stage))
        await stage.cluster.kill_worker(stage.pair().decode.worker)
        await stage.until(call.task.done, 1.0)
        assert call.failure() == "refused 503 + Retry-After"
        await stage.close()

    play(stage, scene)


@pytest.mark.parametrize("column", ["credit", "chunks", "pull", "first-step"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_outcome_is_that_of_one_among_others_when_the_last_worker_is_back_in_time(role: str, column: str) -> None:
    assert play_cell(killed_and_back(role), column) == TABLE[f"{role}-killed", column]


def test_all_prompts_of_a_request_end_when_its_id_is_cancelled() -> None:
    stage = FaultStage(num_pairs=2)

    async def scene() -> None:
        await stage.open()
        COLUMNS["first-step"].close(stage)
        calls = [stage.call([n, *PROMPT], max_tokens=MAX_TOKENS, request_id="both") for n in range(2)]
        other = stage.call(PROMPT, max_tokens=MAX_TOKENS, request_id="other")
        await stage.until(lambda: len(stage.service.runs) == 3)
        assert stage.service.abort("both") == 2
        assert stage.service.abort("both") == 0
        open_all(stage)
        await stage.until(lambda: all(call.task.done() for call in (*calls, other)))
        assert [call.failure() for call in (*calls, other)] == ["refused 499", "refused 499", None]
        assert other.tokens == expected(PROMPT, MAX_TOKENS)
        await stage.until(lambda: not stage.books(), 0.5)
        await stage.close()

    play(stage, scene)


def test_limits_of_progress_are_those_of_the_yaml() -> None:
    stage = FaultStage(num_pairs=1)
    changes = ["router.prompt_stall_s=7.0", "router.stream_stall_s=8.0"]
    spec = RouterSpec(
        id=ROUTER, epoch=Epoch(1), config=parse_config(CONFIG, file="c", overrides=changes), model_path=Path("standin")
    )
    runtime = LocalRuntime(stage.cluster, clock=stage.clock, network=stage.network, text=LetterCodec())

    async def scene() -> None:
        await runtime.start_router(spec)
        assert runtime.routers[ROUTER]._stall == StallLimits(prompt_s=7.0, stream_s=8.0)
        await runtime.close()

    play(stage, scene)


@pytest.mark.parametrize("column", COLUMNS)
def test_request_is_unaffected_when_it_was_held_and_nothing_broke(column: str) -> None:
    """The stage alone changes nothing."""
    assert play_cell(NO_FAULT, column) == "unaffected"
