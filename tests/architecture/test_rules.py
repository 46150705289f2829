"""Goal: the repository obeys every rule of `rules` and `text_rules`, and each rule can fail.

Method: each rule looks at this repository, then at a small one made for the purpose, sound but for one planted
violation.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architecture import rules, text_rules
from tests.architecture.source import Source, repository

Rule = Callable[[Source], Iterator[str]]

RULES: dict[str, Rule] = {
    name: rule
    for module in (rules, text_rules)
    for name, rule in vars(module).items()
    if callable(rule) and getattr(rule, "__annotations__", {}) == {"source": Source, "return": Iterator[str]}
}

SOUND = {
    "pyproject.toml": """
[project]
dependencies = ["numpy>=2,<3"]
[project.optional-dependencies]
dev = ["pytest>=9,<10"]
[tool.setuptools]
packages = ["core", "router"]
[[tool.importlinter.contracts]]
layers = ["router", "core"]
""",
    "core/__init__.py": "",
    "core/errors.py": '"""Errors."""\nimport enum\nclass CoreError(Exception): ...\n',
    "core/pool.py": '"""A pool."""\nimport numpy as np\nfrom core.errors import CoreError\nassert True, "KV-1"\n',
    "core/metrics.py": '"""Metrics."""\nPULLS = "pdcluster_pulls_total"\n',
    "router/__init__.py": "",
    "router/app.py": '"""An app."""\nfrom core.errors import CoreError\n',
    "scripts/test": "#!/usr/bin/env bash\npytest tests/core\n",
    "scripts/check": "#!/usr/bin/env bash\nruff check .\n",
    ".ci/run": "scripts/check\nscripts/test --shards=2 --tier=rest\n",
    "tests/core/test_pool.py": "def test_pool_is_whole_when_new():\n    'KV-1'\n",
    "docs/invariants.md": "| KV-1 | whole | `core/pool.py`, `tests/core/test_pool.py` |\n| EV-1 | dense | later |\n",
    "core/config.py": '"""Keys."""\nclass Pool:\n    size: int\nclass ClusterConfig:\n    name: str\n    pool: Pool\n',
    "docs/configuration.md": "| `name` | text |\n| `pool.size` | number |\n",
    "docs/metrics.md": "| `pdcluster_pulls_total` | pulls |\n",
    "docs/runbook.md": "See docs/invariants.md.\n",
}
"""A repository that breaks no rule: text by path."""

LONG_FUNCTION = "def long():\n" + "    x = 1\n" * rules.FUNCTION_LINES_MAX

PLANTS: dict[str, list[tuple[str, str]]] = {
    "file_is_short": [("core/pool.py", "x = 1\n" * rules.FILE_LINES_MAX)],
    "function_is_short": [("core/pool.py", LONG_FUNCTION), ("tests/core/test_pool.py", LONG_FUNCTION)],
    "name_is_a_noun_of_its_own": [("core/utils.py", '"""Things."""\n'), ("router/misc/x.py", '"""Things."""\n')],
    "package_file_is_empty": [("core/__init__.py", "import core.pool\n"), ("tests/core/__init__.py", "")],
    "module_has_docstring": [("core/link.py", "x = 1\n")],
    "package_is_listed": [
        ("core/kv/__init__.py", ""),
        ("core/kv/pool.py", '"""A pool."""\n'),
    ],
    "dependency_is_declared_and_used": [
        ("core/pool.py", "import requests\n"),
        ("core/pool.py", "def late():\n    import ray\n"),
        ("core/pool.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"),
    ],
    "errors_stand_alone": [("core/errors.py", "import pydantic\n"), ("core/errors.py", "import core.pool\n")],
    "modules_form_no_cycle": [
        ("core/errors.py", "import core.pool\n"),
        ("core/errors.py", "def late():\n    from core import pool\n"),
        ("core/errors.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from core.pool import np\n"),
    ],
    "public_name_has_one_home": [
        ("router/app.py", "class CoreError(Exception): ...\n"),
        ("router/app.py", "PULLS = 1\n"),
    ],
    "name_is_imported_from_its_home": [
        ("router/app.py", "from core.pool import CoreError\n"),
        ("tests/core/test_pool.py", "from core.pool import CoreError\n"),
    ],
    "bytes_are_never_code": [
        ("core/pool.py", "import pickle\n"),
        ("core/pool.py", "def read():\n    from cloudpickle import loads\n"),
        ("core/pool.py", "import torch\ntorch.load('x')\n"),
    ],
    "failure_is_not_swallowed": [
        ("core/pool.py", "try:\n    x = 1\nexcept Exception:\n    x = 2\n"),
        ("core/pool.py", "try:\n    x = 1\nexcept (OSError, BaseException) as error:\n    x = 2\n"),
        ("core/pool.py", "try:\n    x = 1\nexcept:\n    x = 2\n"),
        ("core/pool.py", "try:\n    x = 1\nexcept KeyError:\n    pass\n"),
        ("core/pool.py", "import contextlib\nwith contextlib.suppress(Exception):\n    x = 1\n"),
    ],
    "randomness_has_a_seed": [
        ("core/pool.py", "import random\nrng = random.Random()\n"),
        ("tests/core/test_pool.py", "import numpy as np\nrng = np.random.default_rng()\n"),
    ],
    "tests_do_not_sleep": [
        ("tests/core/test_pool.py", "import time\ntime.sleep(1)\n"),
        ("tests/core/test_pool.py", "from time import sleep\n"),
    ],
    "tests_mirror_packages": [("tests/test_all.py", ""), ("tests/rooter/test_app.py", "")],
    "script_hides_no_test": [
        ("scripts/test", "pytest --deselect tests/core/test_pool.py\n"),
        (".ci/run", "scripts/test -k 'not pool'\n"),
        ("scripts/check", "pytest -q -m 'not torch'\n"),
        ("scripts/check", "pytest -q || true\n"),
        ("scripts/check", "pytest --ignore=tests/core\n"),
        ("pyproject.toml", '[tool.pytest.ini_options]\naddopts = ["--deselect=tests/core/test_pool.py"]\n'),
        ("pyproject.toml", '[tool.pytest.ini_options]\naddopts = ["-k", "not pool"]\n'),
    ],
    "ci_runs_what_people_run": [(".ci/run", "scripts/test --tier=slow\n"), (".ci/run", "pip install torch\n")],
    "tests_are_never_skipped": [
        ("tests/core/test_pool.py", "import pytest\n@pytest.mark.skip\ndef test_x(): ...\n"),
        ("tests/core/test_pool.py", "import pytest\npytest.importorskip('ray')\n"),
        ("tests/core/test_pool.py", "import pytest\ndef test_x():\n    pytest.skip('later')\n"),
        ("tests/core/test_pool.py", "import pytest\npytestmark = pytest.mark.xfail\n"),
        ("tests/core/test_pool.py", "from pytest import skip\n"),
        ("tests/core/test_pool.py", "import unittest\n@unittest.skipIf(True, '')\ndef test_x(): ...\n"),
        ("tests/conftest.py", "collect_ignore = ['core']\n"),
    ],
    "path_exists": [
        (".ci/run", "scripts/tests\n"),
        ("README.md", "See [the map](docs/architecture.md).\n"),
        ("pyproject.toml", '[tool.pytest.ini_options]\ntestpaths = ["tests/cores"]\n'),
    ],
    "invariant_is_everywhere": [
        ("core/pool.py", "assert True, 'KV-9'\n"),
        ("docs/invariants.md", "| KV-2 | a hashed block is full | `core/pool.py` |\n"),
    ],
    "invariant_place_is_real": [
        ("docs/invariants.md", "| RQ-1 | one end | `core/errors.py` |\n"),
        ("docs/invariants.md", "| RQ-1 | one end | `core/gone.py` |\n"),
    ],
    "metric_is_documented": [
        ("core/metrics.py", 'AGAIN = "pdcluster_pulls_total"\n'),
        ("core/metrics.py", 'READS = "pdcluster_reads_total"\n'),
        ("docs/metrics.md", "| `pdcluster_gone_total` | pulls |\n"),
    ],
    "config_key_is_documented": [
        ("core/config.py", "    port: int\n"),
        ("docs/configuration.md", "| `pool.gone` | number |\n"),
    ],
    "text_names_no_machine": [
        ("docs/runbook.md", "cd /" + "root/pdcluster\n"),
        ("core/pool.py", f"X = '/{'work'}/x'\n"),
    ],
}
"""By rule: (path, text to append) of violations that the rule must see, one at a time."""


def plant(root: Path, path: str, text: str) -> None:
    """Append text to a file, which is made if need be."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    with (root / path).open("a", encoding="utf-8") as file:
        file.write(text)


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rules, "LONG_FUNCTIONS", frozenset())
    monkeypatch.setattr(rules, "OUTERMOST_LOOPS", frozenset())
    for path, text in SOUND.items():
        plant(tmp_path, path, text)
    return tmp_path


@pytest.mark.parametrize("name", RULES)
def test_repository_obeys_when_rule_is_applied(name: str) -> None:
    assert list(RULES[name](repository())) == []


@pytest.mark.parametrize("name", RULES)
def test_rule_is_silent_when_tree_is_sound(name: str, sound: Path) -> None:
    assert list(RULES[name](Source(root=sound))) == []


@pytest.mark.parametrize(
    ("name", "path", "text"), [(name, path, text) for name, found in PLANTS.items() for path, text in found]
)
def test_rule_complains_when_violation_is_planted(name: str, path: str, text: str, sound: Path) -> None:
    plant(sound, path, text)
    assert list(RULES[name](Source(root=sound)))


def test_dependency_rule_complains_when_requirement_is_unused_or_unbounded(sound: Path) -> None:
    text = SOUND["pyproject.toml"].replace('"numpy>=2,<3"', '"numpy>=2", "pyyaml>=6,<7"')
    (sound / "pyproject.toml").write_text(text)
    found = list(rules.dependency_is_declared_and_used(Source(root=sound)))
    assert [line.rpartition(": ")[2] for line in found] == ["numpy>=2 has no upper bound", "nothing imports yaml"]


def test_package_rule_complains_when_folder_is_gone(sound: Path) -> None:
    text = SOUND["pyproject.toml"].replace('"router"]\n[[', '"router", "engine"]\n[[')
    (sound / "pyproject.toml").write_text(text)
    found = list(rules.package_is_listed(Source(root=sound)))
    assert any("engine has no module" in line for line in found)


def test_allow_list_shrinks_when_function_is_short_again(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "LONG_FUNCTIONS", frozenset({"core.pool.long"}))
    assert list(rules.long_function_is_long(Source(root=sound)))
    plant(sound, "core/pool.py", LONG_FUNCTION)
    assert not list(rules.long_function_is_long(Source(root=sound)))
    assert not list(rules.function_is_short(Source(root=sound)))


def test_outermost_loops_shrink_when_handler_is_gone(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "OUTERMOST_LOOPS", frozenset({"core.pool.run"}))
    assert list(rules.outermost_loop_is_needed(Source(root=sound)))
    plant(
        sound,
        "core/pool.py",
        "def run():\n    try:\n        x = 1\n    except Exception as error:\n        x = error\n",
    )
    assert not list(rules.outermost_loop_is_needed(Source(root=sound)))
    assert not list(rules.failure_is_not_swallowed(Source(root=sound)))


def test_every_rule_is_tested_when_rules_are_added() -> None:
    assert set(PLANTS) | {"long_function_is_long", "outermost_loop_is_needed"} == set(RULES)
