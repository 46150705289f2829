"""What the operating system says of this process, for audits and heartbeats: cheap numbers in which a leak shows.

Linux only, empty elsewhere. Knows nothing about the cluster.
"""

import os
import resource
from pathlib import Path

import msgspec

_STATUS = Path("/proc/self/status")
_DESCRIPTORS = Path("/proc/self/fd")
_STATM = Path("/proc/self/statm")


def process_facts() -> dict[str, int]:
    """`resident_mib`, `threads` and `file_descriptors` of this process."""
    if not _STATUS.exists():
        return {}
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return {
        "resident_mib": int(fields["VmRSS"].split()[0]) >> 10,
        "threads": int(fields["Threads"]),
        "file_descriptors": len(os.listdir(_DESCRIPTORS)) - 1,
    }


class ProcessUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole process, all threads."""

    cpu_s: float
    """User and system time since its start, seconds."""
    resident_bytes: int
    num_open_fds: int


def read_usage() -> ProcessUsage | None:
    """As of now, in some ten microseconds; None where the system has no /proc."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    if not _STATM.exists():
        return None
    num_pages = int(_STATM.read_bytes().split()[1])
    return ProcessUsage(
        cpu_s=spent.ru_utime + spent.ru_stime,
        resident_bytes=num_pages * resource.getpagesize(),
        num_open_fds=len(os.listdir(_DESCRIPTORS)) - 1,  # without the one that listed them
    )
