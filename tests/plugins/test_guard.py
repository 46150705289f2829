"""What a fast test may not do raises in a fast test: these tests try it."""

import asyncio
import importlib
import random
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.plugins.guard import FastTestViolationError


def test_wait_raises_when_test_is_fast() -> None:
    wait = time.sleep
    with pytest.raises(FastTestViolationError, match="may not sleep"):
        wait(0.001)


def test_asyncio_wait_raises_when_delay_is_real() -> None:
    asyncio.run(asyncio.sleep(0))
    with pytest.raises(FastTestViolationError, match=r"may not wait 0\.001 s"):
        asyncio.run(asyncio.sleep(0.001))


def test_socket_raises_when_test_is_fast() -> None:
    with socket.socket() as plain, pytest.raises(FastTestViolationError, match="bind a socket"):
        plain.bind(("127.0.0.1", 0))
    with socket.socket() as plain, pytest.raises(FastTestViolationError, match="connect a socket"):
        plain.connect(("127.0.0.1", 9))


def test_library_may_draw_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "drawing.py").write_text("import random\nNUMBER = random.getrandbits(3)\n")
    (tmp_path / "own_drawing.py").write_text("import random\nNUMBER = random.getrandbits(3)\n")
    monkeypatch.syspath_prepend(library)
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("drawing").NUMBER < 8
    with pytest.raises(FastTestViolationError, match=r"use random\.getrandbits"):
        importlib.import_module("own_drawing")


def test_global_randomness_raises_when_test_is_fast() -> None:
    with pytest.raises(FastTestViolationError, match=r"use random\.shuffle"):
        random.shuffle([1, 2])
    with pytest.raises(FastTestViolationError, match=r"use numpy\.random\.rand"):
        np.random.rand()
    assert random.Random(7).random() == random.Random(7).random()


@pytest.mark.parametrize("name", ["torch", "ray", "transformers"])
def test_import_raises_when_module_is_heavy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(FastTestViolationError, match=f"may not import {name}"):
        importlib.import_module(name)


def test_ray_does_not_start_when_it_is_loaded_already(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest('pytest_plugins = ["tests.plugins.tiers", "tests.plugins.guard"]')
    pytester.makepyfile(
        """
        import sys, types, pytest
        from tests.plugins.guard import FastTestViolationError

        def test_ray_is_closed():
            with pytest.raises(FastTestViolationError, match="start Ray"):
                sys.modules["ray"].init()
        """
    )
    ray = type(sys)("ray")
    monkeypatch.setattr(ray, "init", lambda: None, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    pytester.runpytest_inprocess("-p", "no:randomly").assert_outcomes(passed=1)


@pytest.mark.process
def test_socket_opens_when_test_is_marked() -> None:
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        assert plain.getsockname()[1] > 0
