"""The chaos scenario over many seeds: a hundred for every change, two thousand when asked for."""

import re
import subprocess
import sys

import pytest

NUM_SEEDS, NUM_SEEDS_SLOW = 100, 2000
SIMULATE = "from cluster.cli import main; main()"


def _simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: nothing that tests have imported or patched is there."""
    command = [sys.executable, "-c", SIMULATE, "simulate", "--scenario", "chaos", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=7200)


@pytest.mark.process
def test_a_hundred_seeds_run_clean() -> None:
    done = _simulate("--seed", "1", "--seeds", str(NUM_SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NUM_SEEDS} runs" in done.stdout


@pytest.mark.slow
def test_two_thousand_seeds_run_clean_and_reach_every_cell_of_the_fault_matrix() -> None:
    done = _simulate("--seed", "1", "--seeds", str(NUM_SEEDS_SLOW), "--coverage", "--keep-going")
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    reached = re.search(r"(\d+) of (\d+) cells reached", done.stdout)
    assert reached is not None and reached[1] == reached[2], done.stdout
