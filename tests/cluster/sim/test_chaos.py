"""The chaos scenario: seeds run clean, a seed is one run to the last byte of its log, failures are cut down."""

import asyncio
import io
import logging
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.sim.chaos import play
from cluster.sim.coverage import COLUMNS, ROWS
from cluster.sim.schedule import VOCAB_SIZE, Asked, Fault, Schedule, draw
from cluster.sim.shrink import fewest, shrink
from kvtransfer.puller import Puller, PullResult
from router.service import RouterService
from tests.e2e.faults.table import PAGE, read_table

SEEDS = Path(__file__).parent.parent.parent / "chaos" / "seeds"


@pytest.mark.parametrize("seed", [1, 5, 14, 28, 31, 57, 58])
def test_answers_are_right_and_nothing_is_held_when_everything_goes_wrong(seed: int) -> None:
    """RQ-1, RQ-2, TX-1, TX-2, TX-3, KV-1, KV-4, CL-1."""
    assert not play(draw(seed)).problem


def test_stored_runs_that_failed_once_are_clean() -> None:
    for path in sorted(SEEDS.glob("*.json")):
        verdict = play(msgspec.json.decode(path.read_bytes(), type=Schedule))
        assert not verdict.problem, f"{path.name}: {verdict.problem}"


def test_same_seed_is_the_same_run() -> None:
    logs = [io.StringIO(), io.StringIO()]
    verdicts = [play(draw(57), log) for log in logs]
    assert logs[0].getvalue() == logs[1].getvalue()
    assert verdicts[0].digest == verdicts[1].digest != play(draw(4)).digest
    assert "FAULT" in logs[0].getvalue() and "Submit" in logs[0].getvalue()


@pytest.mark.process
def test_same_seed_is_the_same_run_in_another_process(tmp_path: Path) -> None:
    """Whatever the process's hash seed, its id and its address space are."""
    logs = []
    for number in range(2):
        log = tmp_path / f"{number}.log"
        command = "from cluster.cli import main; main()"
        arguments = ["simulate", "--scenario", "chaos", "--seed", "57", "--seeds", "3", "--log", str(log), "--json"]
        environment = {**os.environ, "PYTHONHASHSEED": str(number)}
        done = subprocess.run(
            [sys.executable, "-c", command, *arguments], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        logs.append((done.stdout, log.read_text()))
    assert logs[0] == logs[1]
    assert len(logs[0][1].splitlines()) > 200


@pytest.fixture
def trusting_readers(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Planted: whatever arrives counts as verified."""
    finish = Puller._finish

    def trust(self: Puller, read: Any, ended: Any) -> PullResult:
        result = finish(self, read, ended)
        if not result.num_mismatches:
            return result
        verified = sorted([*result.verified, *result.bad])
        return dataclass_replace(result, verified=verified, bad=[], reason="", failure=None)

    monkeypatch.setattr(Puller, "_finish", trust)
    return monkeypatch


@pytest.mark.usefixtures("trusting_readers")
def test_wrong_answer_is_found_with_its_seed_and_last_events() -> None:
    done = CliRunner().invoke(main, ["simulate", "--scenario", "chaos", "--seed", "1", "--seeds", "60"])
    assert done.exit_code == 1
    assert "again: pdcluster simulate --scenario chaos --seed" in done.output
    assert "expected" in done.output.splitlines()[-3] and "FAULT" in done.output


def test_failing_run_is_cut_down_and_can_be_repeated(trusting_readers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored = tmp_path / "run.json"
    arguments = ["simulate", "--scenario", "chaos", "--seed", "1", "--seeds", "60", "--shrink", "--save", str(stored)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1, done.output
    small = msgspec.json.decode(stored.read_bytes(), type=Schedule)
    original = draw(small.seed)
    assert len(small.asked) <= min(3, len(original.asked))
    assert [fault.kind for fault in small.faults] in (["corrupt"], ["spoil"])
    again = CliRunner().invoke(main, ["simulate", "--schedule", str(stored)])
    assert again.exit_code == 1 and f"seed {small.seed} failed" in again.output
    trusting_readers.undo()
    assert CliRunner().invoke(main, ["simulate", "--schedule", str(stored)]).exit_code == 0


def test_fewest_items_are_found_when_some_are_needed_together() -> None:
    needed = {3, 17, 18}
    assert set(fewest(list(range(40)), lambda items: needed.issubset(items))) == needed


def test_shrinking_keeps_what_it_takes() -> None:
    schedule = next(one for one in map(draw, range(1, 100)) if len(one.asked) > 6 and len(one.faults) > 2)
    first, fault = schedule.asked[5], schedule.faults[1]

    def is_failing(candidate: Schedule) -> bool:
        prompts = [asked.prompt for asked in candidate.asked]
        return first.prompt in prompts and fault in candidate.faults

    small = shrink(schedule, is_failing)
    assert small.faults == (fault,)
    assert [asked.prompt for asked in small.asked] == [first.prompt]
    assert small.asked[0].num_children == 1 and small.asked[0].leaves_after_s is None


def test_stored_run_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text('{"seed": "x"}')
    done = CliRunner().invoke(main, ["simulate", "--schedule", str(path)])
    assert done.exit_code == 1 and "odd.json is no stored run" in done.output


def test_coverage_has_the_cells_of_the_documented_matrix() -> None:
    assert {(row, column) for row in ROWS for column in COLUMNS} == set(read_table(PAGE.read_text()))


def test_cell_is_counted_when_a_fault_strikes_there() -> None:
    """One request that decodes for seconds, and its only decode worker is killed meanwhile."""
    schedule = draw(1)
    shape = msgspec.structs.replace(
        schedule.shape, num_prefill=1, num_decode=1, num_routers=1, step_s=0.1, request_timeout_s=120.0, windows=(None,)
    )
    asked = Asked(
        at_s=0.0, router=0, prompt=tuple(range(20)), max_tokens=30, temperature=0.0, seed=0, stop_token=VOCAB_SIZE
    )
    faults = (Fault(at_s=2.5, kind="kill", target="decode-0"), Fault(at_s=2.6, kind="corrupt", target="decode-0"))
    verdict = play(Schedule(seed=1, shape=shape, asked=(asked,), faults=faults))
    assert not verdict.problem
    assert verdict.endings == Counter(error=1, done=1)
    struck = {cell for cell in verdict.cells if not cell[0].endswith("pool-full")}
    assert struck == {("decode-killed-last", "decode")}


def test_others_may_log_again_after_a_simulation(caplog: pytest.LogCaptureFixture) -> None:
    assert CliRunner().invoke(main, ["simulate", "--scenario", "chaos", "--seed", "5"]).exit_code == 0
    logging.getLogger("pdcluster").warning("here")
    assert "here" in caplog.text


def test_router_that_breaks_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an invariant of a router that fails once, when nobody else looks."""
    failures = iter([False] * 40 + [True])
    check = RouterService.check

    def once(self: RouterService) -> None:
        check(self)
        if asyncio.current_task() is self._ticker:
            assert not next(failures, False), "RQ-1: broken for a moment"

    monkeypatch.setattr(RouterService, "check", once)
    assert "RQ-1: broken for a moment" in play(draw(5)).problem
