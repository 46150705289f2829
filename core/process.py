"""What the operating system says of this process, for audits and heartbeats: cheap numbers in which a leak shows.

Linux only, empty elsewhere. Knows nothing about the cluster.
"""

import os
import resource
import sys
import threading
from pathlib import Path

import msgspec

COMPUTE_NICENESS = 10
"""Of threads that compute; 0 is everybody's, 19 the least important."""
_DESCRIPTORS = Path("/proc/self/fd")
_THREADS = Path("/proc/self/task")
_STATM = Path("/proc/self/statm")


class ProcessUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole process, all threads."""

    cpu_s: float
    """User and system time since its start, seconds."""
    resident_bytes: int
    num_open_fds: int


def read_usage() -> ProcessUsage | None:
    """As of now; None where the system has no /proc."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    if not _STATM.exists():
        return None
    num_pages = int(_STATM.read_bytes().split()[1])
    return ProcessUsage(
        cpu_s=spent.ru_utime + spent.ru_stime,
        resident_bytes=num_pages * resource.getpagesize(),
        num_open_fds=len(os.listdir(_DESCRIPTORS)) - 1,  # without the one that listed them
    )


def process_facts() -> dict[str, int]:
    """`resident_mib`, `threads` and `file_descriptors` of this process, for the books of an audit."""
    usage = read_usage()
    if usage is None:
        return {}
    return {
        "resident_mib": usage.resident_bytes >> 20,
        "threads": len(os.listdir(_THREADS)),
        "file_descriptors": usage.num_open_fds,
    }


def give_way() -> None:
    """This thread, and the threads that it starts, come after everybody else of this machine who has something to do.

    Computing takes what is left: a router, a client or a thread that answers heartbeats needs little time, but needs it
    at once. Linux counts priorities by thread; elsewhere nothing changes.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(own, COMPUTE_NICENESS))
