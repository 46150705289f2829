"""Pytest plugin: the one way to live with a failing test, for a time, in the open.

`tests/quarantine.toml` lists tests that are expected to fail, each with the reason, the link to the work that repairs
it, an owner, the condition for its return and an expiry. A listed test still runs: a failure that matches its
signature is an expected one, a pass is counted in `tests/quarantine_history.json`, which is committed with the change
that ran the tests. The session fails on a missing or unknown field, an expired or overlong entry, a test that does
not exist, a test that has passed PASSES_MAX times in a row, and on anything else that would keep a test from
counting: a skip, an expected failure outside the file, a deselection. A need for hardware is no reason for
quarantine; that is a marker (see `tests.plugins.tiers`). Knows nothing about what the tests test.
"""

import ast
import datetime
import json
import os
import platform
import re
import sys
import tomllib
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from tests.plugins.tiers import LEFT_OUT

QUARANTINE_DAYS_MAX = 30
PASSES_MAX = 5
FILE = Path("tests/quarantine.toml")
HISTORY = Path("tests/quarantine_history.json")


class QuarantineError(ValueError):
    """The quarantine file is wrong. The message lists every problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One test in quarantine. All fields are required."""

    test: str
    """Node id as pytest prints it; without a parameter it covers all of them."""
    platform: str
    """`any`, or what `platform_names` gives on the machines where it fails, such as `linux` or `linux-aarch64`."""
    signature: str
    """Regular expression found in the text of the expected failure; another failure is a failure."""
    reason: str
    """Why it fails, as far as known."""
    link: str
    """The issue in which it is being repaired."""
    owner: str
    """Who brings it back."""
    added: datetime.date
    restore: str
    """The condition under which the entry goes."""
    expires: datetime.date
    """Last day of the entry, at most QUARANTINE_DAYS_MAX days after `added`."""

    def covers(self, nodeid: str) -> bool:
        """Is this the test, or one of its parameters?"""
        return nodeid == self.test or nodeid.startswith(f"{self.test}[")


def platform_names() -> frozenset[str]:
    """What an entry's `platform` may say to apply on this machine."""
    return frozenset({"any", sys.platform, f"{sys.platform}-{platform.machine()}"})


def parse_entries(text: str, today: datetime.date) -> list[Entry]:
    """The entries of a quarantine file, all of them valid today. Raises QuarantineError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise QuarantineError(f"not TOML: {error}") from error
    tables = document.pop("quarantine", [])
    problems = [f"unknown key '{key}'" for key in document]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise QuarantineError("entries are written as [[quarantine]] tables")
    for number, table in enumerate(tables, start=1):
        problems += [f"entry {number} ({table.get('test', 'no test')}): {text}" for text in _problems(table, today)]
    names = [table.get("test") for table in tables]
    problems += sorted({f"{name}: listed twice" for name in names if names.count(name) > 1})
    if problems:
        raise QuarantineError("\n".join(problems))
    return [Entry(**table) for table in tables]


def _problems(table: dict[str, object], today: datetime.date) -> list[str]:
    expected = {field.name: field.type for field in fields(Entry)}
    problems = [f"unknown field '{name}'" for name in table if name not in expected]
    for name, kind in expected.items():
        value = table.get(name)
        if value is None or value == "":
            problems.append(f"field '{name}' is missing")
        elif type(value) is not kind:
            problems.append(f"field '{name}' must be a {'date' if kind is datetime.date else 'string'}")
    if problems:
        return problems
    added, expires = table["added"], table["expires"]
    assert isinstance(added, datetime.date) and isinstance(expires, datetime.date)
    if added > today:
        problems.append(f"added on {added}, which is in the future")
    if expires < today:
        problems.append(f"expired on {expires}: repair the test, or delete it")
    if expires - added > datetime.timedelta(days=QUARANTINE_DAYS_MAX):
        problems.append(f"expires {(expires - added).days} days after it was added, at most {QUARANTINE_DAYS_MAX}")
    try:
        re.compile(str(table["signature"]))
    except re.error as error:
        problems.append(f"signature is no regular expression: {error}")
    return problems


def is_defined(root: Path, test: str) -> bool:
    """Does the file of a node id define that test? Parameters are not looked at."""
    path, *names = test.partition("[")[0].split("::")
    if not names or not (root / path).is_file():
        return False
    body: Sequence[ast.stmt] = ast.parse((root / path).read_text(encoding="utf-8")).body
    for name in names:
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        match = [node for node in found if node.name == name]
        if not match:
            return False
        body = match[-1].body
    return True


class Quarantine:
    """Applies the entries to one session and collects what makes it fail."""

    def __init__(self, root: Path, entries: Sequence[Entry]) -> None:
        self._root = root
        self._entries = entries
        self._violations: list[str] = []
        self._passed: dict[str, bool] = {}
        """By test of an entry: has each of its runs in this session passed?"""
        self._quarantined: dict[str, Entry] = {}
        """By node id: the entry that applies here."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = {item.nodeid for item in items}
        files = {name.partition("::")[0] for name in names}
        for entry in self._entries:
            collected = any(entry.covers(name) for name in names)
            parameter_is_gone = "[" in entry.test and entry.test.partition("::")[0] in files and not collected
            if parameter_is_gone or not (collected or is_defined(self._root, entry.test)):
                self._violations.append(f"{entry.test}: quarantined, but there is no such test")
            if entry.platform not in platform_names():
                continue
            for item in items:
                if entry.covers(item.nodeid):
                    self._quarantined[item.nodeid] = entry
                    item.add_marker(pytest.mark.xfail(reason=f"quarantined: {entry.reason}", strict=False))

    def pytest_deselected(self, items: Collection[pytest.Item]) -> None:
        for item in items:
            if not self._is_tier_choice(item):
                self._violations.append(f"{item.nodeid}: deselected")

    @staticmethod
    def _is_tier_choice(item: pytest.Item) -> bool:
        """A test may be left out because of what it needs, and by a person who asks for some tests by name."""
        options = item.config.option
        if options.deselect:
            return False
        if item.nodeid in item.config.stash.get(LEFT_OUT, frozenset()):
            return True
        return bool(options.keyword or options.markexpr) and "CI" not in os.environ

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        entry = self._quarantined.get(item.nodeid)
        expected = report.skipped and hasattr(report, "wasxfail")
        if entry is not None and expected and call.excinfo is not None:
            text = f"{call.excinfo.typename}: {call.excinfo.value}\n{report.longreprtext}"
            if not re.search(entry.signature, text):
                report.outcome = "failed"
                report.longrepr = f"quarantined, but not with this failure ({entry.signature!r} not found)\n{text}"
                del report.wasxfail
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._violations.append(f"{report.nodeid}: skipped when collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self._quarantined.get(report.nodeid)
        if entry is not None:
            if report.when == "call" or not report.passed:
                self._passed[entry.test] = self._passed.get(entry.test, True) and report.passed
        elif hasattr(report, "wasxfail"):
            self._violations.append(f"{report.nodeid}: expected to fail, but not listed in {FILE}")
        elif report.skipped:
            self._violations.append(f"{report.nodeid}: skipped")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.config.option.collectonly:
            self._count_passes()
        if self._violations and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _count_passes(self) -> None:
        path = self._root / HISTORY
        before: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        after = {entry.test: before[entry.test] for entry in self._entries if entry.test in before}
        for test, has_passed in self._passed.items():
            after[test] = after.get(test, 0) + 1 if has_passed else 0
        for test, num_passes in after.items():
            if num_passes >= PASSES_MAX:
                self._violations.append(f"{test}: has passed {num_passes} times in a row, take it out of quarantine")
        if after and after != before:
            path.write_text(json.dumps(after, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        elif not after:
            path.unlink(missing_ok=True)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._violations:
            terminalreporter.section("tests that do not count", red=True)
            for text in self._violations:
                terminalreporter.line(text)


def pytest_configure(config: pytest.Config) -> None:
    path = config.rootpath / FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        entries = parse_entries(text, datetime.date.today())
    except QuarantineError as error:
        raise pytest.UsageError(f"{FILE}: {error}") from error
    config.pluginmanager.register(Quarantine(config.rootpath, entries), "quarantine")
