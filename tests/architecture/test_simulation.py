"""The simulator runs production code, and none of it asks the machine for time, threads or randomness.

Proven by running it: while a chaos run plays, everything of that kind raises where our own code calls it.
"""

import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.sim import chaos, world
from cluster.sim.schedule import draw

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("cluster", "core", "decode", "engine", "kvtransfer", "prefill", "router")
OWN = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)


class MachineTouchedError(BaseException):
    """Own code asked the machine. No part may take it for an operating error and go on."""


def _refused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code
        if caller.co_filename.startswith(OWN):
            raise MachineTouchedError(f"{caller.co_filename}:{caller.co_qualname} calls {name}")
        return original(*args, **kwargs)

    return ask


CLOSED: list[tuple[Any, str]] = [
    *((time, name) for name in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "sleep")),
    *((random, name) for name in ("random", "randrange", "choice", "uniform", "getrandbits", "SystemRandom")),
    (os, "urandom"),
    (os, "getpid"),
    (uuid, "uuid4"),
    (secrets, "token_hex"),
    (threading.Thread, "start"),
]


@pytest.fixture
def closed_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in CLOSED:
        monkeypatch.setattr(owner, name, _refused(name, getattr(owner, name)))


@pytest.mark.usefixtures("closed_machine")
@pytest.mark.parametrize("seed", [5, 57])
def test_machine_is_not_asked_for_time_threads_or_chance_when_a_cluster_is_simulated(seed: int) -> None:
    assert not chaos.play(draw(seed)).problem


@pytest.mark.usefixtures("closed_machine")
def test_asking_the_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a worker's clock is the machine's."""
    from core.clock import SystemClock

    monkeypatch.setattr(world, "LoopClock", lambda _loop: SystemClock())
    with pytest.raises(MachineTouchedError, match=r"SystemClock\.now calls monotonic"):
        chaos.play(draw(5))


def test_simulated_members_are_the_production_classes() -> None:
    """By identity, on a world that runs: nobody stands in for a router, a worker or a controller."""
    import asyncio

    from cluster.controller import Controller
    from cluster.sim.loop import run_virtual
    from decode.worker import DecodeWorker
    from prefill.worker import PrefillWorker
    from router.service import RouterService

    async def members() -> set[type]:
        schedule = draw(9)
        assert schedule.shape.num_prefill and schedule.shape.num_decode
        here = world.World(chaos.config_of(schedule.shape), chaos.setting_of(schedule))
        await here.start()
        try:
            while here.missing():
                await here.clock.sleep(0.5)
            return {type(one) for one in (*here.cluster.workers.values(), *here.routers(), here.controller)}
        finally:
            await here.close()
            assert asyncio.get_running_loop().time() < 60.0

    assert run_virtual(members) == {PrefillWorker, DecodeWorker, RouterService, Controller}
