"""Each planted bug is found by the chaos scenario, in a copy of the product."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("cluster", "core", "decode", "engine", "kvtransfer", "prefill", "router")
AREAS = {"lease", "plan", "session", "credit", "pool", "link", "admission", "reconcile"}
NUM_SEEDS = 300
SIMULATE = "import {module}; print({module}.__file__); from cluster.cli import main; main()"


def _copy(directory: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))


def _simulate(directory: Path, file: str, num_seeds: int) -> subprocess.CompletedProcess[str]:
    module = file.removesuffix(".py").replace("/", ".")
    command = [sys.executable, "-c", SIMULATE.format(module=module), "simulate", "--scenario", "chaos"]
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    return subprocess.run(
        [*command, "--seed", "1", "--seeds", str(num_seeds)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def test_every_mutant_can_be_planted() -> None:
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant.name
        assert mutant.old != mutant.new
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert len(MUTANTS) >= 20 and {mutant.area for mutant in MUTANTS} == AREAS


@pytest.mark.process
def test_copy_without_a_mutant_runs_clean(tmp_path: Path) -> None:
    """Nothing is found because of the copy."""
    _copy(tmp_path)
    done = _simulate(tmp_path, MUTANTS[0].file, 5)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(tmp_path))


def _with_marks() -> list[Any]:
    """One of each area for every change, those found within the first seeds; all when asked for."""
    seen: set[str] = set()
    parameters: list[Any] = []
    for mutant in sorted(MUTANTS, key=lambda one: one.found_by):
        mark = pytest.mark.slow if mutant.area in seen else pytest.mark.process
        seen.add(mutant.area)
        parameters.append(pytest.param(mutant, marks=mark, id=mutant.name))
    return parameters


@pytest.mark.parametrize("mutant", _with_marks())
def test_mutant_is_found(mutant: Mutant, tmp_path: Path) -> None:
    _copy(tmp_path)
    file = tmp_path / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))
    done = _simulate(tmp_path, mutant.file, NUM_SEEDS)
    assert done.stdout.startswith(str(file)), "another copy was imported"
    found = re.search(r"^seed (\d+) failed after .*$", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    print(mutant.name, found[0])
