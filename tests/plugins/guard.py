"""Pytest plugin: what a fast test may not do raises at once, with a message that says what to do instead.

Around every test without a need (see `tests.plugins.tiers`) Ray, torch, sockets, real waits and the process-wide
random generators are closed. In the fast tier they are closed for the whole session, imports during collection
included. Tests that took longer than FAST_TEST_S_MAX are listed at the end; a slow machine fails nobody. Knows
nothing about what is tested.
"""

import asyncio
import importlib.abc
import importlib.machinery
import random
import socket
import sys
import time
import types
from collections.abc import Callable, Generator, Sequence

import numpy as np
import pytest

from tests.plugins.tiers import needs_of

FAST_TEST_S_MAX = 1.0
FORBIDDEN_MODULES = frozenset({"torch", "ray", "transformers"})
RANDOM_STATE_NAMES = frozenset({"Random", "SystemRandom", "seed", "getstate", "setstate"})
NUMPY_RANDOM_NAMES = ("choice", "normal", "permutation", "rand", "randint", "randn", "random", "shuffle", "uniform")


class FastTestViolationError(AssertionError):
    """A fast test did something that only a marked test may do."""


def _refuse(what: str, instead: str) -> Callable[..., object]:
    def refuse(*_args: object, **_kwargs: object) -> object:
        raise FastTestViolationError(f"a fast test may not {what}: {instead}")

    return refuse


class ForbiddenImports(importlib.abc.MetaPathFinder):
    """Refuses the first import of a heavy module. One that is loaded already stays usable."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in FORBIDDEN_MODULES:
            raise FastTestViolationError(f"a fast test may not import {name}: mark it, or import the pure half only")
        return None


def _sleep_in_library(seconds: float) -> None:
    """`subprocess` polls for the end of a child; nobody else sleeps."""
    if sys._getframe(1).f_globals.get("__name__") != "subprocess":
        raise FastTestViolationError("a fast test may not sleep: wait on a ManualClock")
    _time_sleep(seconds)


async def _sleep_zero(delay: float, result: object = None) -> object:
    if delay > 0:
        raise FastTestViolationError(f"a fast test may not wait {delay} s: wait on a ManualClock")
    return await _asyncio_sleep(delay, result)


def _random_in_import(name: str) -> Callable[..., object]:
    """A library may draw while it is imported (rich numbers its styles so); which test imports it first is chance."""
    draw: Callable[..., object] = getattr(random, name)
    refuse = _refuse(f"use random.{name}", "use a random.Random with a seed")

    def draw_or_refuse(*args: object, **kwargs: object) -> object:
        code = sys._getframe(1).f_code
        is_import = code.co_name == "<module>" and "site-packages" in code.co_filename
        return draw(*args, **kwargs) if is_import else refuse()

    return draw_or_refuse


_time_sleep = time.sleep
_asyncio_sleep = asyncio.sleep


def close_doors(patch: pytest.MonkeyPatch) -> None:
    """Everything a fast test may not do raises FastTestViolationError until `patch` is undone."""
    patch.setattr(sys, "meta_path", [ForbiddenImports(), *sys.meta_path])
    if (ray := sys.modules.get("ray")) is not None:
        patch.setattr(ray, "init", _refuse("start Ray", "mark it with ray"))
    for name in ("bind", "connect", "connect_ex", "sendto"):
        patch.setattr(socket.socket, name, _refuse(f"{name} a socket", "use MemoryNetwork, or mark it with process"))
    patch.setattr(time, "sleep", _sleep_in_library)
    patch.setattr(asyncio, "sleep", _sleep_zero)
    for name in set(random.__all__) - RANDOM_STATE_NAMES:
        patch.setattr(random, name, _random_in_import(name))
    for name in NUMPY_RANDOM_NAMES:
        patch.setattr(np.random, name, _refuse(f"use numpy.random.{name}", "use numpy.random.default_rng(seed)"))


class Guard:
    """Closes the doors around each fast test and remembers what took long."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._fast: set[str] = set()
        self._duration_s: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        with pytest.MonkeyPatch.context() as patch:
            if self._tier == "fast":
                patch.setattr(sys, "meta_path", [ForbiddenImports(), *sys.meta_path])
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with pytest.MonkeyPatch.context() as patch:
            if not needs_of(item):
                self._fast.add(item.nodeid)
                close_doors(patch)
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self._fast:
            self._duration_s[report.nodeid] = self._duration_s.get(report.nodeid, 0.0) + report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        long = sorted((s, name) for name, s in self._duration_s.items() if s > FAST_TEST_S_MAX)
        if long:
            terminalreporter.section(f"fast tests over {FAST_TEST_S_MAX:g} s")
            for duration_s, name in reversed(long):
                terminalreporter.line(f"{duration_s:6.2f} s  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Guard(config.getoption("--tier")), "fast-test-guard")
