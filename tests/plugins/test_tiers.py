"""Which tests a tier runs, in small sessions of pytest with one test of each need."""

import pytest

from tests.plugins.tiers import module_needs

MARKERS = ("torch", "ray", "process", "slow", "gpu")


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """One module with a test of each need and one without, and a module that needs torch as a whole."""
    pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"    {name}\n" for name in MARKERS))
    pytester.makeconftest('pytest_plugins = ["tests.plugins.tiers"]')
    tests = "".join(f"@pytest.mark.{name}\ndef test_{name}(): ...\n" for name in MARKERS)
    whole = "import pytest, a_module_that_is_missing\npytestmark = [pytest.mark.torch, pytest.mark.slow]\n"
    pytester.makepyfile(test_each=f"import pytest\ndef test_fast(): ...\n{tests}", test_whole=whole)
    return pytester


@pytest.mark.parametrize(
    ("tier", "passed"),
    [
        ("fast", ["fast"]),
        ("test", ["fast", "torch", "ray", "process"]),
        ("rest", ["torch", "ray", "process"]),
    ],
)
def test_tier_runs_what_has_the_needs_when_chosen(project: pytest.Pytester, tier: str, passed: list[str]) -> None:
    result = project.runpytest_inprocess("-p", "no:randomly", "-v", f"--tier={tier}")
    result.assert_outcomes(passed=len(passed), deselected=1 + len(MARKERS) - len(passed))
    result.stdout.fnmatch_lines([f"*test_{name} PASSED*" for name in passed])


@pytest.mark.parametrize("tier", ["fast", "rest"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_run_each_test_once_and_ray_apart(project: pytest.Pytester, tier: str, count: int) -> None:
    project.makepyfile(test_many="".join(f"def test_{n}(): ...\n" for n in range(40)))
    ran: list[list[str]] = []
    for index in range(1, count + 1):
        result = project.runpytest_inprocess("-p", "no:randomly", "-v", f"--tier={tier}", f"--shard={index}/{count}")
        ran.append([line.split()[0] for line in result.outlines if " PASSED" in line])
    whole = project.runpytest_inprocess("-p", "no:randomly", "-v", f"--tier={tier}")
    expected = [line.split()[0] for line in whole.outlines if " PASSED" in line]
    assert sorted(name for shard in ran for name in shard) == sorted(expected)
    if tier == "fast":
        assert all(ran)
    elif count > 1:
        assert ran[-1] == ["test_each.py::test_ray"] and not any("ray" in name for shard in ran[:-1] for name in shard)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "x/2", "1/0"])
def test_shard_is_refused_when_there_is_no_such_part(project: pytest.Pytester, text: str) -> None:
    result = project.runpytest_inprocess(f"--shard={text}")
    result.stderr.fnmatch_lines([f"*'{text}' is not I/N with 1 <= I <= N*"])


def test_tier_imports_module_when_it_may_belong(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("-p", "no:randomly", "--tier=slow")
    assert "a_module_that_is_missing" in result.stdout.str()


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("pytestmark = pytest.mark.torch", {"torch"}),
        ("pytestmark = [pytest.mark.ray, pytest.mark.slow]", {"ray", "slow"}),
        ("other = pytest.mark.torch", set()),
        ("@pytest.mark.torch\ndef test_it(): ...", set()),
    ],
)
def test_needs_are_read_when_module_is_marked(source: str, needs: set[str]) -> None:
    assert module_needs(source) == needs
