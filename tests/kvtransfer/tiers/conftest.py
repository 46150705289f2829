"""Fixtures of the tests of a disk tier's files: both implementations."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.tiers.files import Files, OsFiles
from kvtransfer.tiers.files_memory import MemoryFiles


@pytest.fixture(params=["memory", "os"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    made: Files = MemoryFiles() if request.param == "memory" else OsFiles(tmp_path / "tier")
    yield made
    made.close()
