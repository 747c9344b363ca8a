"""Process metrics of Prometheus' client libraries, for the current process. Linux only."""

from __future__ import annotations

import os
import resource
import time
from functools import cache
from pathlib import Path

STAT = Path("/proc/self/stat")
DESCRIPTORS = Path("/proc/self/fd")


def process_facts() -> dict[str, float]:
    """Return values by metric name, without those that the system does not provide."""
    spent = os.times()
    facts = {
        "process_cpu_seconds_total": spent.user + spent.system,
        "process_max_fds": float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }
    if STAT.is_file():
        # The process's name, in parentheses, may contain anything; the rest are numbers.
        numbers = STAT.read_text().rpartition(")")[2].split()
        facts |= {
            "process_virtual_memory_bytes": float(numbers[20]),
            "process_resident_memory_bytes": float(int(numbers[21]) * os.sysconf("SC_PAGE_SIZE")),
            "process_open_fds": float(len(os.listdir(DESCRIPTORS)) - 1),  # except the listing's
            "process_start_time_seconds": booted_at() + int(numbers[19]) / os.sysconf("SC_CLK_TCK"),
        }
    return facts


@cache
def booted_at() -> float:
    """Return the boot time of this machine, in seconds since 1970.

    It is computed once. Clocks drift, so a later result would differ and look like a restart of the
    process.
    """
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
