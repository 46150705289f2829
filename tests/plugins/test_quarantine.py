"""Goal: nothing but a complete, current entry of the quarantine file keeps a failing test from failing the session.

Method: small sessions of pytest inside a temporary project, with the same plugins and one planted fault each.
"""

import datetime
import json
from pathlib import Path

import pytest

from tests.plugins.quarantine import PASSES_MAX, QUARANTINE_DAYS_MAX, QuarantineError, is_defined, parse_entries

TODAY = datetime.date(2026, 3, 10)

FLAKY = """
def test_flaky():
    assert 1 + 1 == 3, "known trouble"

def test_other():
    assert True
"""


def entry(today: datetime.date, **changes: str | None) -> str:
    """The text of one entry, valid on `today` but for the changes; None leaves a field out."""
    values: dict[str, str | None] = {
        "test": '"tests/test_it.py::test_flaky"',
        "platform": '"any"',
        "signature": '"known trouble"',
        "reason": '"it races"',
        "link": '"issue 1"',
        "owner": '"engine"',
        "added": str(today),
        "restore": '"the race is gone"',
        "expires": str(today + datetime.timedelta(days=QUARANTINE_DAYS_MAX)),
    }
    lines = [f"{name} = {value}" for name, value in (values | changes).items() if value is not None]
    return "\n".join(["[[quarantine]]", *lines])


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """An empty project that uses the plugins."""
    pytester.makeini("[pytest]\nmarkers =\n    slow: long\n    process: sockets\nxfail_strict = true\n")
    pytester.makeconftest('pytest_plugins = ["tests.plugins.tiers", "tests.plugins.quarantine"]')
    (pytester.path / "tests").mkdir()
    return pytester


def run(project: pytest.Pytester, source: str, quarantine: str = "", *args: str) -> pytest.RunResult:
    """One session over tests/test_it.py."""
    (project.path / "tests/test_it.py").write_text(source)
    (project.path / "tests/quarantine.toml").write_text(quarantine)
    return project.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", *args)


def today_entry(**changes: str | None) -> str:
    return entry(datetime.date.today(), **changes)


def test_file_is_valid_when_entry_is_complete() -> None:
    (parsed,) = parse_entries(entry(TODAY), TODAY)
    assert parsed.covers("tests/test_it.py::test_flaky[a]") and not parsed.covers("tests/test_it.py::test_flaky_too")


@pytest.mark.parametrize(
    "field", ["test", "platform", "signature", "reason", "link", "owner", "added", "restore", "expires"]
)
def test_file_is_refused_when_field_is_missing(field: str) -> None:
    with pytest.raises(QuarantineError, match=f"field '{field}' is missing"):
        parse_entries(entry(TODAY, **{field: None}), TODAY)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"added": "2026-02-01", "expires": "2026-03-09"}, "expired on 2026-03-09"),
        ({"expires": "2026-04-10"}, "expires 31 days after"),
        ({"added": "2026-03-11"}, "in the future"),
        ({"expires": '"soon"'}, "field 'expires' must be a date"),
        ({"owner": '""'}, "field 'owner' is missing"),
        ({"severity": '"low"'}, "unknown field 'severity'"),
        ({"signature": '"("'}, "no regular expression"),
    ],
)
def test_file_is_refused_when_entry_is_wrong(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(QuarantineError, match=problem):
        parse_entries(entry(TODAY, **changes), TODAY)


def test_file_is_refused_when_test_is_listed_twice() -> None:
    with pytest.raises(QuarantineError, match="listed twice"):
        parse_entries(entry(TODAY) + "\n" + entry(TODAY), TODAY)


def test_is_defined_when_test_is_method_or_function(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("class TestA:\n    def test_x(self): ...\ndef test_y(): ...\n")
    assert is_defined(tmp_path, "test_a.py::TestA::test_x") and is_defined(tmp_path, "test_a.py::test_y[1-2]")
    assert not is_defined(tmp_path, "test_a.py::test_x") and not is_defined(tmp_path, "test_b.py::test_y")


def test_session_passes_when_quarantined_test_fails_as_expected(project: pytest.Pytester) -> None:
    result = run(project, FLAKY, today_entry())
    result.assert_outcomes(passed=1, xfailed=1)
    assert result.ret == 0


def test_session_fails_when_failing_test_is_not_listed(project: pytest.Pytester) -> None:
    assert run(project, FLAKY).ret == 1


def test_session_fails_when_failure_has_another_signature(project: pytest.Pytester) -> None:
    result = run(project, FLAKY, today_entry(signature='"another trouble"'))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*quarantined, but not with this failure*"])


def test_session_fails_when_platform_is_another(project: pytest.Pytester) -> None:
    run(project, FLAKY, today_entry(platform='"plan9"')).assert_outcomes(passed=1, failed=1)


def test_session_does_not_start_when_entry_has_expired(project: pytest.Pytester) -> None:
    long_ago = datetime.date.today() - datetime.timedelta(days=90)
    result = run(project, FLAKY, entry(long_ago))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*expired on*"])


def test_session_fails_when_quarantined_test_does_not_exist(project: pytest.Pytester) -> None:
    result = run(project, "def test_other(): ...", today_entry())
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*there is no such test*"])


def test_session_fails_when_test_has_passed_often_enough(project: pytest.Pytester) -> None:
    source = "def test_flaky(): ..."
    for number in range(1, PASSES_MAX):
        assert run(project, source, today_entry()).ret == 0
        history = json.loads((project.path / "tests/quarantine_history.json").read_text())
        assert history == {"tests/test_it.py::test_flaky": number}
    result = run(project, source, today_entry())
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*has passed {PASSES_MAX} times in a row*"])


def test_count_starts_again_when_test_fails_between(project: pytest.Pytester) -> None:
    run(project, "def test_flaky(): ...", today_entry())
    run(project, FLAKY, today_entry())
    history = json.loads((project.path / "tests/quarantine_history.json").read_text())
    assert history == {"tests/test_it.py::test_flaky": 0}


def test_history_goes_when_last_entry_goes(project: pytest.Pytester) -> None:
    run(project, "def test_flaky(): ...", today_entry())
    run(project, "def test_flaky(): ...")
    assert not (project.path / "tests/quarantine_history.json").exists()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import pytest\n@pytest.mark.{}(reason='later')\ndef test_it(): assert False", "test_it: skipped"),
        ("import pytest\ndef test_it(): pytest.{}('later')", "test_it: skipped"),
        ("import pytest\npytest.{}('later', allow_module_level=True)", "skipped when collected"),
        (
            "import unittest\nclass TestIt(unittest.TestCase):\n    def test_it(self): self.{}Test('')",
            "test_it: skipped",
        ),
    ],
)
def test_session_fails_when_test_skips(project: pytest.Pytester, source: str, complaint: str) -> None:
    result = run(project, source.format("skip"))
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*{complaint}*"])


def test_session_fails_when_test_is_expected_to_fail_without_entry(project: pytest.Pytester) -> None:
    result = run(project, "import pytest\n@pytest.mark.xfail(reason='later')\ndef test_it(): assert False")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*test_it: expected to fail*"])


@pytest.mark.parametrize("mark", ["", "import pytest\npytestmark = pytest.mark.process\n"])
def test_session_fails_when_test_is_deselected_by_option(project: pytest.Pytester, mark: str) -> None:
    option = "--" + "deselect"
    result = run(project, mark + FLAKY, "", f"{option}=tests/test_it.py::test_flaky")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*test_flaky: deselected*"])


@pytest.mark.parametrize(("in_ci", "status"), [(True, 1), (False, 0)])
def test_choice_by_name_is_for_people_when_run_by_hand(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, in_ci: bool, status: int
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if in_ci:
        monkeypatch.setenv("CI", "true")
    assert run(project, FLAKY, "", "-k", "other").ret == status


def test_session_passes_when_test_belongs_to_another_tier(project: pytest.Pytester) -> None:
    source = "import pytest\n@pytest.mark.slow\ndef test_slow(): assert False\ndef test_other(): ..."
    run(project, source).assert_outcomes(passed=1, deselected=1)


def test_session_passes_when_the_tests_without_a_need_are_left_to_the_other_gate(project: pytest.Pytester) -> None:
    source = "import pytest\n@pytest.mark.torch\ndef test_torch(): ...\ndef test_fast(): assert False"
    result = run(project, source, "", "--tier=rest")
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    "arguments", [(), ("--tier=rest",), ("--tier=fast", "--shard=1/1"), ("--tier=test", "--shard=1/2")]
)
def test_session_fails_when_somebody_else_leaves_a_test_out(
    project: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    """Whatever tier and shard run: only what these two leave out is excused."""
    (project.path / "conftest.py").write_text(
        (project.path / "conftest.py").read_text()
        + "\ndef pytest_collection_modifyitems(config, items):\n"
        + "    gone = [item for item in items if item.name.startswith('test_gone')]\n"
        + "    items[:] = [item for item in items if item not in gone]\n"
        + "    config.hook.pytest_deselected(items=gone)\n"
    )
    many = "\n".join(f"def test_gone_{n}(): ...\ndef test_kept_{n}(): ..." for n in range(4))
    source = f"import pytest\npytestmark = pytest.mark.torch\n{many}" if "--tier=rest" in arguments else many
    result = run(project, source, "", *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*test_gone_0: deselected*"])
