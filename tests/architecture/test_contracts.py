"""Goal: each import contract of pyproject.toml holds here, and is broken by an import that breaks it.

Method: import-linter, as `scripts/check` runs it, over a copy of the packages; then over the same copy with one
forbidden import planted for each contract, where each contract must name the import that was planted for it.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.architecture.source import REPOSITORY, repository, table

LINT_TIMEOUT_S = 120
TYPING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "

PLANTS: dict[str, list[tuple[str, str, str]]] = {
    "A package imports only from the rows below its own": [
        ("core.planted_row", "import engine.step", "core.planted_row -> engine.step"),
        ("engine.planted_sibling", "import kvtransfer.plan", "engine.planted_sibling -> kvtransfer.plan"),
        ("prefill.planted_sibling", "import decode.worker", "prefill.planted_sibling -> decode.worker"),
        ("router.planted_typing", f"{TYPING}import cluster.state", "router.planted_typing -> cluster.state"),
        ("kvtransfer.planted_lazy", "def late() -> None:\n    import router.app", "planted_lazy -> router.app"),
    ],
    "HTTP schemas build on the base types, these on the errors": [
        ("router.protocol.base", "import router.app", "router.protocol.base -> router.app"),
    ],
    "Ray only in the Ray runtime": [
        ("cluster.planted_ray", "from ray.util import placement_group", "cluster.planted_ray -> ray"),
    ],
    "No HTTP stack below the router, nor in a worker process": [
        ("cluster.planted_http", "import fastapi", "cluster.planted_http -> fastapi"),
        ("cluster.worker_process", "import cluster.planted_http", "cluster.worker_process -> cluster.planted_http"),
    ],
    "Pydantic only where people write: the YAML and the HTTP schemas": [
        ("core.planted_schema", "import pydantic", "core.planted_schema -> pydantic"),
    ],
    "Torch only where tensors are": [("decode.planted_tensor", "import torch", "decode.planted_tensor -> torch")],
    "What decides needs no torch, not even indirectly": [
        ("engine.planted_tensor", "import torch", "engine.planted_tensor -> torch"),
        ("engine.planted_between", "import engine.planted_tensor", "planted_between -> engine.planted_tensor"),
        ("engine.scheduler", "import engine.planted_between", "engine.scheduler -> engine.planted_between"),
    ],
    "gRPC only in the link": [("cluster.planted_grpc", "import grpc.aio", "cluster.planted_grpc -> grpc")],
    "NIXL only in its transport": [
        ("kvtransfer.planted_nixl", "import nixl_cu12", "kvtransfer.planted_nixl -> nixl_cu12"),
    ],
}
"""By contract: (module, import to append, what the report must then say about the contract)."""


def lint(root: Path) -> str:
    """The report of import-linter on a tree."""
    command = Path(sysconfig.get_path("scripts")) / "lint-imports"
    result = subprocess.run(
        [sys.executable, command, "--no-cache", "pyproject.toml"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=LINT_TIMEOUT_S,
        check=False,
    )
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout + result.stderr)


def copy_packages(target: Path) -> Path:
    """The packages and pyproject.toml, without anything else."""
    for name in repository().roots:
        shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", target)
    return target


def contract_names() -> list[str]:
    contracts = table(repository().project, "tool", "importlinter")["contracts"]
    assert isinstance(contracts, list)
    return [contract["name"] for contract in contracts]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report on the copy with all plants."""
    root = copy_packages(tmp_path_factory.mktemp("planted"))
    for module, line, _ in (plant for plants in PLANTS.values() for plant in plants):
        with (root / (module.replace(".", "/") + ".py")).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    return lint(root)


def section(report: str, contract: str) -> str:
    """What the report says below a broken contract's name."""
    for part in re.split(r"\n(?=[^\n]+\n-{4,}\n)", report.partition("Broken contracts")[2]):
        if part.strip().startswith(contract):
            return part
    return ""


def test_contracts_hold_when_tree_is_ours(tmp_path: Path) -> None:
    report = lint(copy_packages(tmp_path))
    assert f"Contracts: {len(contract_names())} kept, 0 broken." in report, report


@pytest.mark.parametrize("contract", PLANTS)
def test_contract_breaks_when_import_is_planted(contract: str, planted: str) -> None:
    assert f"\n{contract} BROKEN" in planted, planted
    found = section(planted, contract)
    assert [text for _, _, text in PLANTS[contract] if text not in found] == [], found


def test_every_contract_is_planted_when_contracts_are_added() -> None:
    assert set(PLANTS) == set(contract_names())
