"""The page about faults names every time constant of the code that serves requests, and none that does not exist. RQ-2.

What only sets how often something looks (names with POLL) and private names are left out.
"""

import ast
import re
from pathlib import Path

import pytest

from core.config import ClusterConfig
from tests.e2e.faults.table import PAGE

ROOT = PAGE.parent.parent
SERVING = (
    "core",
    "router",
    "prefill",
    "decode",
    "kvtransfer",
    "cluster/controller.py",
    "cluster/reconcile.py",
    "cluster/router_contact.py",
    "cluster/router_host.py",
    "cluster/silence.py",
    "cluster/worker_host.py",
)


def _constants(source: str) -> set[str]:
    """Public module constants that are seconds."""
    targets = [
        target
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if re.fullmatch(r"[A-Z][A-Z_]*_S", name) and "POLL" not in name}


def _files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("place", SERVING)
def test_page_names_every_wait_of_the_code(place: str) -> None:
    page = PAGE.read_text()
    for path in _files(place):
        missing = [name for name in sorted(_constants(path.read_text())) if f"`{name}`" not in page]
        assert not missing, f"docs/faults.md does not say who waits for {missing} of {path.relative_to(ROOT)}"


def test_page_names_no_constant_and_no_key_that_is_not_there() -> None:
    known = {name for place in SERVING for path in _files(place) for name in _constants(path.read_text())}
    assert set(re.findall(r"`([A-Z][A-Z_]*_S)`", PAGE.read_text())) <= known
    for section, key in re.findall(r"`(router|transfer|prefill|decode)\.(\w+_s)`", PAGE.read_text()):
        assert key in type(getattr(ClusterConfig.model_construct(), section)).model_fields
