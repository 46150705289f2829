"""Fixtures of the transfer tests: see `tests.kvtransfer.bench`."""

from collections.abc import Iterator

import pytest

from tests.kvtransfer.bench import Bench, MemoryBench, NixlBench


@pytest.fixture
def memory_bench() -> MemoryBench:
    return MemoryBench()


@pytest.fixture(params=["memory", pytest.param("nixl", marks=pytest.mark.process)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Both transports; the second in the process tier."""
    if request.param == "memory":
        yield MemoryBench()
        return
    nixl = NixlBench()
    yield nixl
    nixl.close()
