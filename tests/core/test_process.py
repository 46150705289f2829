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
