"""What a process says of itself, and asks of the machine."""

import os
import threading

from core.process import COMPUTE_NICENESS, give_way


def test_only_the_thread_that_asks_for_it_and_those_it_starts_give_way() -> None:
    found: dict[str, int] = {}

    def note(name: str) -> None:
        found[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def compute() -> None:
        give_way()
        note("step")
        run(lambda: note("started by it"))

    def run(work: object) -> None:
        thread = threading.Thread(target=work)  # type: ignore[arg-type]
        thread.start()
        thread.join()

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    run(compute)
    note("main")
    wanted = max(before, COMPUTE_NICENESS)
    assert found == {"step": wanted, "started by it": wanted, "main": before}


def test_who_gives_way_more_already_goes_on_doing_so() -> None:
    """Nobody may raise its own priority: the machine would refuse, and the worker not start."""
    found: list[int] = []

    def compute() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPUTE_NICENESS + 5)
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [COMPUTE_NICENESS + 5]
