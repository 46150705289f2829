"""What `pdcluster status --check` shows: the members' own audits, put together and judged.

A broken invariant is a problem, and so is a member that did not answer, and what is still held when no router has had a
request for longer than any lease: a leak. Counts come from the books of those who hold, never from what others think of
them. Asks through a function, waits on a `Timer`. Knows nothing about how audits are collected.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cluster.cli_up import Timer
from core.messages import Audited, AuditReport

PROCESS_FACTS = ("links", "undelivered", "resident_mib", "threads", "file_descriptors")
"""Entries of the books that say something about the process, not about what is held for requests."""
SETTLE_POLL_S = 1.0
"""Pause between two audits while what ended requests held may still be given back."""


def check_cluster(ask: Callable[[], Mapping[str, Any]], timer: Timer) -> dict[str, Any]:
    """Audit a cluster; again and again for `settle_s` while something is held that nobody has asked for.

    ask: see `cluster.controller.Controller.audit`. Returns what `judge` does, with leaks among the problems.
    """
    started_s = timer.now()
    while True:
        audit = ask()
        judged = judge(audit)
        if not judged["held"] or judged["problems"]:
            return judged
        waited_s = timer.now() - started_s
        if waited_s >= audit["settle_s"]:
            leaks = [f"{held}, and no request has been in flight for {waited_s:.0f} s" for held in judged["held"]]
            return {**judged, "problems": leaks}
        timer.wait(SETTLE_POLL_S)


def judge(audit: Mapping[str, Any]) -> dict[str, Any]:
    """One audit, as `cluster.controller.Controller.audit` gave it, in JSON values only:

    members    by id: epoch, state, books
    held       in words: what is held although no router has a request; [] while one has
    problems   in words: broken invariants and who did not answer
    """
    problems: list[str] = []
    members: dict[str, Audited] = {}
    silent: set[str] = set()
    for router, values in sorted(audit["reports"].items()):
        if values is not None:
            report = msgspec.convert(values, AuditReport)
            for one in report.members:
                _add(members, one)
            silent |= set(report.silent)
            problems += [f"{worker}: did not answer {router}" for worker in report.silent]
    unasked = sorted(set(audit["members"]) - set(members) - silent)
    problems += [f"{member} ({audit['members'][member]}): did not answer" for member in unasked]
    for member, one in sorted(members.items()):
        problems += [f"{member} (epoch {one.epoch}): {problem}" for problem in one.problems]
    described = {
        member: {"epoch": int(one.epoch), "state": audit["members"].get(member, "unknown"), "books": one.books}
        for member, one in sorted(members.items())
    }
    return {"members": described, "held": _held(members), "problems": problems}


def _add(members: dict[str, Audited], one: Audited) -> None:
    """The newest life of each member; every router asks, and what any of them was told counts."""
    known = members.get(str(one.member))
    if known is None or one.epoch > known.epoch:
        members[str(one.member)] = one
    elif one.epoch == known.epoch:
        problems = dict.fromkeys([*known.problems, *one.problems])
        members[str(one.member)] = msgspec.structs.replace(one, problems=tuple(problems))


def _held(members: Mapping[str, Audited]) -> list[str]:
    if any(one.books.get("in_flight") for one in members.values()):
        return []
    return [
        f"{member} (epoch {one.epoch}) holds {name} {count}"
        for member, one in sorted(members.items())
        for name, count in one.books.items()
        if count and name not in PROCESS_FACTS
    ]


def render_audit(judged: Mapping[str, Any]) -> str:
    """The same for people: a table for each kind of member, then the verdict."""
    kinds: dict[tuple[str, ...], list[list[str]]] = {}
    for member, one in judged["members"].items():
        row = [member, str(one["epoch"]), one["state"], *(str(count) for count in one["books"].values())]
        kinds.setdefault(tuple(one["books"]), []).append(row)
    lines: list[str] = []
    for names, rows in kinds.items():
        header = ["MEMBER", "EPOCH", "STATE", *(name.replace("_", " ").upper() for name in names)]
        lines += [*_table([header, *rows]), ""]
    lines += [f"PROBLEM {problem}" for problem in judged["problems"]]
    if not judged["problems"]:
        lines.append("all invariants hold")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
