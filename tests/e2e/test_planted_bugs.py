"""Bugs that are planted one by one: a scenario that passes without the bug must fail with it, or it proves nothing.

The scenarios are cells of the fault matrix (`tests/e2e/faults`) and three of their own: tokens of an attempt that was
given up, a worker whose step has died behind a doorway that lives, and the deadline that the next attempt is told.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

import router.flow
from cluster.worker_host import STEP_STALL_S, Doorway
from core.messages import HEARTBEAT_TIMEOUT_S, Submit
from decode.intake import Intake
from decode.reception import Reception
from kvtransfer.puller import Puller
from prefill.worker import PrefillWorker
from router.actions import Send
from router.flow import RequestFlow
from tests.e2e.faults.cells import MAX_TOKENS, PROMPT, play_cell
from tests.e2e.faults.columns import COLUMNS, open_all
from tests.e2e.faults.rows import ROWS
from tests.e2e.faults.stage import FaultStage, expected, play

Patch = pytest.MonkeyPatch


# ---- scenarios -------------------------------------------------------------------------------------------------------


def _cell(row: str, column: str, outcome: str) -> Callable[[], None]:
    def scenario() -> None:
        assert play_cell(ROWS[row], column) == outcome

    return scenario


def _older_tokens_arrive_late() -> None:
    """The last token of attempt 0 arrives when attempt 1 has begun on the same workers. TX-2."""
    stage = FaultStage(num_pairs=1)

    async def scene() -> None:
        await stage.open()
        COLUMNS["finish"].close(stage)
        call = await stage.enter(PROMPT, 1)
        assert stage.run is not None
        flow = stage.run.flow
        await stage.until(lambda: COLUMNS["finish"].is_there(stage))
        stage.gates.num_steps["decode"] = 0
        flow._phase_deadline = stage.service.clock.now()
        await stage.until(lambda: flow.attempt == 1 and flow.pair is not None)
        open_all(stage)
        await stage.until(call.task.done)
        assert call.failure() is None and call.tokens == expected(PROMPT, 1), "TX-2: an older attempt changed something"
        await stage.close()

    play(stage, scene)


def _step_dies_behind_a_doorway_that_lives() -> None:
    """The worker counts as lost soon after STEP_STALL_S, and what it had goes to another."""
    stage = FaultStage(num_pairs=2)

    async def scene() -> None:
        await stage.open()
        COLUMNS["first-step"].close(stage)
        call = await stage.enter(PROMPT, MAX_TOKENS)
        await stage.until(lambda: COLUMNS["first-step"].is_there(stage))
        victim = stage.pair().decode
        stage.cluster.end_step(victim.worker)
        open_all(stage)
        stage.tick_s = 0.05
        in_time_s = STEP_STALL_S + HEARTBEAT_TIMEOUT_S + 2.0
        await stage.until(lambda: victim not in stage.service.pool.topology().decode, in_time_s)
        stage.tick_s = 0.01
        await stage.until(call.task.done)
        assert call.failure() is None and call.tokens == expected(PROMPT, MAX_TOKENS)
        await stage.close()

    play(stage, scene)


def _next_attempt_is_told_what_is_left() -> None:
    """RQ-2: the workers of a later attempt do not wait longer than the router does."""
    stage = FaultStage(num_pairs=2)

    async def scene() -> None:
        await stage.open()
        COLUMNS["selection"].close(stage)
        call = await stage.enter(PROMPT, MAX_TOKENS)
        await stage.until(lambda: COLUMNS["selection"].is_there(stage))
        await stage.clock.sleep(1.0)
        stage.gates.selects = True
        await stage.until(lambda: sum(worker.books()["requests"] for worker in stage.cluster.workers.values()) > 0)
        late = stage.late_deadlines()
        assert not late, f"RQ-2: somebody waits longer than the router: {late}"
        open_all(stage)
        await stage.until(call.task.done)
        assert call.failure() is None and call.tokens == expected(PROMPT, MAX_TOKENS)
        await stage.close()

    play(stage, scene)


# ---- bugs ------------------------------------------------------------------------------------------------------------


def _keep_leases(patch: Patch) -> None:
    """A cancelled prompt is not computed any more, its lease stays until it expires."""

    def forgetful(self: PrefillWorker, request_id: Any, attempt: Any) -> None:
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.attempt == attempt:
            self._end(handoff)

    patch.setattr(PrefillWorker, "_cancel", forgetful)


def _keep_credit(patch: Patch) -> None:
    """A refused request keeps what was promised to it."""
    refuse = Intake._refuse

    def leaky(self: Intake, reception: Reception, kind: Any, reason: str) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_drop", lambda _reception: None)
            refuse(self, reception, kind, reason)

    patch.setattr(Intake, "_refuse", leaky)


class _Any:
    """A digest that equals every other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _ignore_digests(patch: Patch) -> None:
    """Whatever was read counts as verified."""
    finish = Puller._finish

    def blind(self: Puller, read: Any, ended: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_digester", _BlindDigester(self._digester.block_bytes))
            return finish(self, read, ended)

    patch.setattr(Puller, "_finish", blind)


@dataclass(frozen=True)
class _BlindDigester:
    block_bytes: int

    def digest(self, block_ids: list[int]) -> list[Any]:
        return [_Any()] * len(block_ids)

    def clear(self, block_ids: list[int]) -> None:
        raise AssertionError("it finds nothing wrong")


def _ignore_attempts(patch: Patch) -> None:
    """The router takes every message for one of the current attempt."""
    handle = RequestFlow.handle

    def confused(self: RequestFlow, source: Any, message: Any, now: float) -> Any:
        return handle(self, source, msgspec.structs.replace(message, attempt=self.attempt), now)

    patch.setattr(RequestFlow, "handle", confused)


def _answer_for_the_dead(patch: Patch) -> None:
    """The loop sends the last status for ever, whatever became of the step."""

    def proxy(self: Doorway) -> None:
        for name in list(self._links):
            self._send(name, [self._status])

    patch.setattr(Doorway, "heartbeat", proxy)


def _keep_the_whole_deadline(patch: Patch) -> None:
    """Each attempt is told the time that the first one had."""

    def unchanged(request: Any, **_changes: Any) -> Any:
        return request

    patch.setattr(router.flow, "replace", unchanged)


def _tell_the_time_of_day(patch: Patch) -> None:
    """Workers are told when the request ends by the router's clock, not how long it may take."""
    assign = RequestFlow.assign

    def absolute(self: RequestFlow, pair: Any, now: float) -> Any:
        (send,) = assign(self, pair, now)
        assert isinstance(send, Send) and isinstance(send.message, Submit)
        request = msgspec.structs.replace(send.message.request, deadline_s=self._deadline)
        return [Send(worker=send.worker, message=msgspec.structs.replace(send.message, request=request))]

    patch.setattr(RequestFlow, "assign", absolute)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A bug, and the scenario that must notice it."""

    plant: Callable[[Patch], None]
    scenario: Callable[[], None]
    notice: str
    """What the failure says."""


PLANTED = {
    "lease-never-released-on-hang-up": Planted(
        plant=_keep_leases, scenario=_cell("client-hang-up", "chunks", "cancelled"), notice="it does not come to this"
    ),
    "credit-leaked-on-refusal": Planted(
        plant=_keep_credit, scenario=_cell("prefill-pool-full", "queued", "recovered"), notice="past its deadline"
    ),
    "digest-ignored": Planted(
        plant=_ignore_digests, scenario=_cell("digest-mismatch", "pull", "recovered"), notice="wrong tokens"
    ),
    "attempt-not-checked": Planted(plant=_ignore_attempts, scenario=_older_tokens_arrive_late, notice="TX-2"),
    "heartbeat-of-a-dead-worker": Planted(
        plant=_answer_for_the_dead, scenario=_step_dies_behind_a_doorway_that_lives, notice="it does not come to this"
    ),
    "deadline-not-rebased": Planted(
        plant=_keep_the_whole_deadline,
        scenario=_next_attempt_is_told_what_is_left,
        notice="waits longer",
    ),
    "deadline-of-another-clock": Planted(
        plant=_tell_the_time_of_day, scenario=_cell("client-hang-up", "credit", "cancelled"), notice="waits longer"
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_scenario_passes_when_nothing_is_planted(name: str) -> None:
    PLANTED[name].scenario()


@pytest.mark.parametrize("name", PLANTED)
def test_bug_is_caught_when_it_is_planted(name: str, monkeypatch: Patch) -> None:
    PLANTED[name].plant(monkeypatch)
    with pytest.raises(AssertionError, match=PLANTED[name].notice):
        PLANTED[name].scenario()
