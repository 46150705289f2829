"""Pytest plugin: which tests run, chosen by what they need.

A test without a marker is fast: Python only. The markers torch, ray, process, slow and gpu name a need (see
pyproject.toml). `--tier` picks a set by these markers and nothing else does. A whole module of another tier is not
even imported, so that the fast tier stays free of torch. `--shard=I/N` runs one of N parts of what was picked; all
tests that start Ray are in the last one, so that no two of them ever run at once. Knows nothing about quarantine or
about what a fast test may do.
"""

import argparse
import ast
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

NEEDS = frozenset({"torch", "ray", "process", "slow", "gpu"})

TIERS: dict[str, Callable[[frozenset[str]], bool]] = {
    "fast": lambda needs: not needs,
    "test": lambda needs: not needs & {"slow", "gpu"},
    "rest": lambda needs: bool(needs) and not needs & {"slow", "gpu"},
    "slow": lambda needs: "slow" in needs and "gpu" not in needs,
    "gpu": lambda needs: "gpu" in needs,
}
"""By name: does a test with these needs belong to the tier? `test` is what scripts/test runs; `rest`, what of it
`scripts/check` does not run.
"""

MODULE_EXCLUDES: dict[str, frozenset[str]] = {
    "fast": NEEDS,
    "test": frozenset({"slow", "gpu"}),
    "rest": frozenset({"slow", "gpu"}),
    "slow": frozenset({"gpu"}),
    "gpu": frozenset(),
}
"""By tier: a module marked as a whole with one of these needs is not collected."""


LEFT_OUT = pytest.StashKey[frozenset[str]]()
"""Of a session: the tests of other tiers and other shards."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=sorted(TIERS), default="test", help="which tests run, by what they need")
    parser.addoption("--shard", type=_shard, default=(1, 1), metavar="I/N", help="one of N parts of these tests")


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"'{text}' is not I/N with 1 <= I <= N")
    return int(index), int(count)


def needs_of(item: pytest.Item) -> frozenset[str]:
    """The needs that a test is marked with."""
    return NEEDS & {marker.name for marker in item.iter_markers()}


def module_needs(source: str) -> frozenset[str]:
    """The needs in a module's `pytestmark`, read without importing it."""
    return frozenset(
        node.attr
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in statement.targets)
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Attribute) and node.attr in NEEDS
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    excluded = MODULE_EXCLUDES[config.getoption("--tier")]
    return True if excluded & module_needs(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    belongs = TIERS[config.getoption("--tier")]
    chosen = _part([item for item in items if belongs(needs_of(item))], *config.getoption("--shard"))
    if len(chosen) < len(items):
        kept = set(chosen)
        others = [item for item in items if item not in kept]
        config.stash[LEFT_OUT] = frozenset(item.nodeid for item in others)
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def _part(items: list[pytest.Item], index: int, count: int) -> list[pytest.Item]:
    """Shard `index` of `count` (from 1)."""
    if count == 1:
        return items
    starts_ray = ["ray" in needs_of(item) for item in items]
    num_other = count - any(starts_ray)
    shards = [
        count if ray else 1 + zlib.crc32(item.nodeid.encode()) % num_other
        for item, ray in zip(items, starts_ray, strict=True)
    ]
    return [item for item, shard in zip(items, shards, strict=True) if shard == index]
