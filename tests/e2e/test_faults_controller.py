"""The rows of the fault matrix in which the controller is killed, or stopped and continued. CL-2.

Nothing that serves a request waits for it: whatever a request is doing, it goes on as if nothing had happened, and when
the controller is back, it finds everything as it left it and replaces nobody.
"""

from pathlib import Path

import pytest

from cluster.reconcile import SILENT_S
from tests.e2e.faults.cells import play_request
from tests.e2e.faults.columns import COLUMNS
from tests.e2e.faults.controlled import ControlledStage
from tests.e2e.faults.rows import STOPPED_S, Row, Scene
from tests.e2e.faults.stage import play
from tests.e2e.faults.table import CONTROLLER_ROWS, PAGE, read_table

TABLE = read_table(PAGE.read_text())
assert STOPPED_S > SILENT_S


async def _kill(scene: Scene) -> None:
    assert isinstance(scene.stage, ControlledStage)
    await scene.stage.kill_controller()


async def _stop(scene: Scene) -> None:
    assert isinstance(scene.stage, ControlledStage)
    scene.stage.controller_freezer.freeze()


async def _last(scene: Scene) -> None:
    await scene.pass_by(STOPPED_S)


async def _restart(scene: Scene) -> None:
    stage = scene.stage
    assert isinstance(stage, ControlledStage)
    stage.start_controller()
    await stage.until(stage.is_controlled)


async def _continue(scene: Scene) -> None:
    stage = scene.stage
    assert isinstance(stage, ControlledStage)
    stage.controller_freezer.thaw()
    await scene.pass_by(2.0)
    assert stage.is_controlled(), stage.controller.status()["reason"]


ROWS = {
    "controller-killed": Row(strike=_kill, last=_last, repair=_restart, serves_meanwhile=True),
    "controller-stopped": Row(strike=_stop, last=_last, repair=_continue, serves_meanwhile=True),
}
assert set(ROWS) == CONTROLLER_ROWS


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", ROWS)
def test_request_and_members_go_on_when_the_controller_is_away(row: str, column: str, tmp_path: Path) -> None:
    stage = ControlledStage(tmp_path, num_pairs=2)

    async def scene() -> str:
        await stage.open()
        try:
            members = dict(stage.cluster.workers), dict(stage.runtime.routers)
            outcome = await play_request(stage, ROWS[row], column)
            assert (stage.cluster.workers, stage.runtime.routers) == members, "somebody was replaced"
            return outcome
        finally:
            await stage.close()

    assert play(stage, scene) == TABLE[row, column]
