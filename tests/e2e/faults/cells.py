"""Plays one cell of the fault matrix: a request is brought to a point of its way and held there, something breaks, the
request goes on.

Says what came of it in the words of the table, and asserts what holds for every cell: right tokens as far as they go,
deadlines that the receivers rebased, clean books, and service afterwards. Knows nothing about what should come of it.
"""

from tests.e2e.faults.columns import COLUMNS, open_all
from tests.e2e.faults.rows import Row, Scene
from tests.e2e.faults.stage import FaultStage, expected, play

PROMPT = list(range(3, 44))
"""41 tokens: 10 full blocks of 4 to pull, and a tail."""
MAX_TOKENS = 12
PROMPT_AFTER = list(range(50, 90))
ENDS_S = 30.0
"""By then a request has ended, whatever happened."""
WAITS_S = 1.0
"""Who had to wait so long was affected."""


def play_cell(row: Row, column: str) -> str:
    """The outcome of one cell, in the words of the table; asserts what holds for all."""
    stage = FaultStage(num_pairs=row.num_pairs, request_timeout_s=row.request_timeout_s, stall=row.stall)

    async def scene() -> str:
        await stage.open()
        try:
            return await play_request(stage, row, column)
        finally:
            await stage.close()

    return play(stage, scene)


async def play_request(stage: FaultStage, row: Row, column: str) -> str:
    """As `play_cell`, on a stage that is open."""
    idle = stage.tasks()
    if row.before is not None:
        await row.before(stage, column)
    COLUMNS[column].close(stage)
    call = await stage.enter(PROMPT, MAX_TOKENS)
    await stage.until(lambda: COLUMNS[column].is_there(stage))
    pair = stage.pair()
    assert pair.prefill is not None
    scene = Scene(stage=stage, call=call, column=column, prefill=pair.prefill.worker, decode=pair.decode.worker)
    attempt = scene.attempt
    late = stage.late_deadlines()
    assert not late, f"RQ-2: somebody waits longer than the router: {late}"
    ended: list[float] = []
    call.task.add_done_callback(lambda _task: ended.append(stage.clock.now()))

    await row.strike(scene)
    struck_s = stage.clock.now()
    if not row.opens_late:
        open_all(stage)
    await row.last(scene)
    if row.is_away:
        await _expect_refusal(stage)
    elif row.serves_meanwhile:
        await _expect_service(stage)
    await row.repair(scene)
    open_all(stage)
    await stage.until(call.task.done, ENDS_S)
    await stage.until(lambda: not stage.books() and stage.tasks() == idle, row.clean_within_s)
    await stage.until(stage.is_whole)
    await _expect_service(stage)
    return _outcome(scene, attempt, ended[0] - struck_s)


async def _expect_refusal(stage: FaultStage) -> None:
    call = stage.call(PROMPT_AFTER, max_tokens=5, request_id="meanwhile")
    await stage.until(call.task.done, 1.0)
    assert call.failure() == "refused 503 + Retry-After"


async def _expect_service(stage: FaultStage) -> None:
    """Of two requests, so that two decode workers have their turn."""
    calls = [stage.call([n, *PROMPT_AFTER], max_tokens=5, request_id="next") for n in range(2)]
    await stage.until(lambda: all(call.task.done() for call in calls), ENDS_S)
    for n, call in enumerate(calls):
        assert call.failure() is None, call.events
        assert call.tokens == expected([n, *PROMPT_AFTER], 5)


def _outcome(scene: Scene, attempt: int, lasted_s: float) -> str:
    if scene.call.has_hung_up:
        return "cancelled"
    right, failure = expected(PROMPT, MAX_TOKENS), scene.call.failure()
    tokens = scene.call.tokens
    if failure is not None:
        assert tokens == right[: len(tokens)], "RQ-1: wrong tokens before the error"
        return failure
    assert tokens == right, "RQ-1: wrong tokens"
    return "recovered" if scene.attempt > attempt or lasted_s > WAITS_S else "unaffected"
