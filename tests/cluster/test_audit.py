"""Audits of a whole cluster: from the members' own books over router and controller to what people read."""

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.audit import SETTLE_POLL_S, check_cluster, judge, render_audit
from cluster.router_contact import AUDIT_POLL_S, AUDIT_WAIT_S
from core.ids import Epoch, RouterId, WorkerId
from core.messages import HEARTBEAT_S, Audited, AuditReport
from router.audit import AUDIT_TIMEOUT_S
from router.service import CHECK_S, TICK_S
from tests.cluster.test_local_runtime import ROUTER, Stage

SETTLE_S = 5.0


def member(name: str, *problems: str, epoch: int = 3, **books: int) -> Audited:
    id_ = RouterId(name) if name.startswith("router") else WorkerId(name)
    return Audited(number=1, member=id_, epoch=Epoch(epoch), problems=problems, books=books)


def audit(*reports: tuple[Audited, ...], silent: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the controller gives; each report is of the router that it names first."""
    sent = {
        str(members[0].member): msgspec.to_builtins(
            AuditReport(number=1, members=members, silent=tuple(WorkerId(name) for name in silent))
        )
        for members in reports
    }
    wanted = {"router-0": "ready", "decode-0": "ready"}
    return {"reports": sent, "members": wanted, "settle_s": SETTLE_S}


REST = (member("router-0", in_flight=0), member("decode-0", blocks_used=0, threads=9, links=1))


class CountedTimer:
    """Seconds pass when somebody waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds


def test_all_holds_when_nothing_is_held() -> None:
    judged = judge(audit(REST))
    assert (judged["problems"], judged["held"]) == ([], [])
    assert render_audit(judged).endswith("\nall invariants hold")


def test_broken_invariant_and_silence_are_problems() -> None:
    found = audit((member("router-0", in_flight=1), member("decode-0", "KV-1: x", "TX-1: y")), silent=("prefill-0",))
    judged = judge(found)
    assert judged["problems"] == [
        "prefill-0: did not answer router-0",
        "decode-0 (epoch 3): KV-1: x",
        "decode-0 (epoch 3): TX-1: y",
    ]
    assert "PROBLEM decode-0 (epoch 3): KV-1: x" in render_audit(judged)


def test_member_that_nobody_could_ask_is_a_problem() -> None:
    found = audit((member("router-0", in_flight=0),))
    found["members"]["decode-0"] = "restarting"
    assert judge(found)["problems"] == ["decode-0 (restarting): did not answer"]
    found["reports"] = {"router-0": None}
    assert judge(found)["problems"] == ["decode-0 (restarting): did not answer", "router-0 (ready): did not answer"]


def test_problem_counts_when_only_one_of_two_routers_was_told_of_it() -> None:
    first = (member("router-0", in_flight=0), member("decode-0", "KV-1: x"), member("prefill-0", "TX-2", epoch=2))
    second = (member("router-1", in_flight=0), member("decode-0"), member("prefill-0", epoch=3))
    judged = judge(audit(first, second))
    assert judged["problems"] == ["decode-0 (epoch 3): KV-1: x"]
    assert judged["members"]["prefill-0"]["epoch"] == 3


def test_nothing_counts_as_held_while_a_router_has_a_request() -> None:
    held = member("decode-0", blocks_used=2)
    assert judge(audit((member("router-0", in_flight=0), held)))["held"] == ["decode-0 (epoch 3) holds blocks_used 2"]
    assert judge(audit((member("router-0", in_flight=1), held)))["held"] == []


def test_what_is_given_back_in_time_is_no_leak() -> None:
    held = audit((member("router-0", in_flight=0), member("decode-0", blocks_used=2)))
    answers = iter([held, held, audit(REST)])
    timer = CountedTimer()
    assert check_cluster(lambda: next(answers), timer)["problems"] == []
    assert timer.seconds == 2 * SETTLE_POLL_S


def test_what_is_held_past_every_lease_is_a_leak() -> None:
    held = audit((member("router-0", in_flight=0), member("decode-0", blocks_used=2)))
    timer = CountedTimer()
    problems = check_cluster(lambda: held, timer)["problems"]
    assert problems == ["decode-0 (epoch 3) holds blocks_used 2, and no request has been in flight for 5 s"]
    assert timer.seconds == SETTLE_S


def test_members_of_a_kind_share_a_table() -> None:
    text = render_audit(judge(audit((*REST, member("decode-1", blocks_used=12, threads=8, links=1)))))
    assert text.splitlines() == [
        "MEMBER    EPOCH  STATE    BLOCKS USED  THREADS  LINKS",
        "decode-0  3      ready    0            9        1",
        "decode-1  3      unknown  12           8        1",
        "",
        "MEMBER    EPOCH  STATE  IN FLIGHT",
        "router-0  3      ready  0",
        "",
        "all invariants hold",
    ]


# ---- over real members -----------------------------------------------------------------------------------------------


def problems_of(found: Mapping[str, Any]) -> list[str]:
    problems: list[str] = judge(found)["problems"]
    return problems


def test_controller_hears_every_member_and_finds_them_at_rest(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def scene() -> None:
        await stage.until_ready()
        await stage.ask(list(range(20)))
        await stage.clock.sleep(1.0)
        for found in await asyncio.gather(*(stage.controller.audit() for _ in range(5))):
            judged = judge(found)
            assert (judged["problems"], judged["held"]) == ([], [])
            assert set(judged["members"]) == {"router-0", "prefill-0", "prefill-1", "decode-0", "decode-1"}
            assert judged["members"]["prefill-0"]["books"]["leases"] == 0
            assert judged["members"]["router-0"]["books"]["links"] == 4

    stage.play(scene)


def test_audit_tells_what_is_held_while_a_request_runs(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def scene() -> None:
        await stage.until_ready()
        asking = asyncio.ensure_future(stage.ask(list(range(20)), max_tokens=150))
        await stage.until(lambda: any(w.books()["running"] for w in stage.cluster.workers.values()), "running")
        judged = judge(await stage.controller.audit())
        assert (judged["problems"], judged["held"]) == ([], [])
        assert judged["members"]["router-0"]["books"]["in_flight"] == 1
        assert sum(one["books"].get("blocks_used", 0) for one in judged["members"].values()) > 0
        await asking

    stage.play(scene)


def test_leaked_block_and_forgotten_ticket_are_found_in_a_running_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)

    async def scene() -> None:
        await stage.until_ready()
        # The members' own checks would end them; here the audit is to find it.
        worker = stage.cluster.workers[WorkerId("prefill-1")]
        monkeypatch.setattr(worker, "check", lambda: None)
        stage.router._check_s = math.inf
        await stage.clock.sleep(CHECK_S + TICK_S)
        pool = worker._pool  # type: ignore[attr-defined]
        leaked = pool.allocate(1)
        ticket = stage.router.admission.reserve(num_children=2, num_prompt_tokens=3)
        problems = problems_of(await stage.controller.audit())
        assert problems == [
            f"prefill-1 (epoch 1): KV-1: block {leaked[0]} has 1 references and is held by nobody",
            "router-0 (epoch 1): RQ-1: 1 tickets for 0 requests",
        ]
        pool.release(leaked)
        ticket.release()
        assert problems_of(await stage.controller.audit()) == []

    stage.play(scene)


def test_worker_is_replaced_when_its_books_are_wrong(tmp_path: Path) -> None:
    """KV-1: it must not serve on."""
    stage = Stage(tmp_path)

    async def scene() -> None:
        await stage.until_ready()
        stage.cluster.workers[WorkerId("decode-1")]._pool.allocate(1)  # type: ignore[attr-defined]
        await stage.until(lambda: "KV-1: block" in stage.controller.status()["reason"], "reported")
        await stage.until_ready()
        assert stage.cluster.workers[WorkerId("decode-1")].epoch == 2
        await stage.ask(list(range(20)))
        assert problems_of(await stage.controller.audit()) == []

    with pytest.raises(AssertionError, match="KV-1: block"):
        stage.play(scene)


def test_router_gives_up_when_its_books_are_wrong(tmp_path: Path) -> None:
    """RQ-1: the process ends by `on_failure`, and is started again."""
    stage = Stage(tmp_path)
    failures: list[BaseException] = []

    async def scene() -> None:
        await stage.until_ready()
        stage.router.on_failure = failures.append
        stage.router.admission.reserve(num_children=2, num_prompt_tokens=3)
        await stage.until(lambda: bool(failures), "noticed")

    with pytest.raises(AssertionError, match="1 tickets for 0 requests"):
        stage.play(scene)
    assert "RQ-1" in str(failures)


def test_audit_ends_in_time_when_a_worker_does_not_answer(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def scene() -> None:
        await stage.until_ready()
        stage.cluster.workers[WorkerId("decode-0")].take_outbound = list  # type: ignore[method-assign]
        started_s = stage.clock.now()
        assert problems_of(await stage.controller.audit()) == ["decode-0: did not answer router-0"]
        assert stage.clock.now() - started_s <= AUDIT_TIMEOUT_S + 3 * HEARTBEAT_S < AUDIT_WAIT_S + AUDIT_POLL_S

    stage.play(scene)


def test_late_answer_and_late_report_leave_nothing_behind(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def scene() -> None:
        await stage.until_ready()
        worker = stage.cluster.workers[WorkerId("decode-0")]
        take, worker.take_outbound = worker.take_outbound, list  # type: ignore[method-assign]
        await stage.controller.audit()
        worker.take_outbound = take  # type: ignore[method-assign]
        await stage.clock.sleep(1.0)
        assert problems_of(await stage.controller.audit()) == []
        contact, _task = stage.controller._contacts[ROUTER]
        assert not contact._reports and not stage.router._audits._asked

    stage.play(scene)
