"""What Prometheus' client libraries tell of a process, of the one that asks. Linux only."""

from __future__ import annotations

import os
import resource
import time
from functools import cache
from pathlib import Path

STAT = Path("/proc/self/stat")
DESCRIPTORS = Path("/proc/self/fd")


def process_facts() -> dict[str, float]:
    """Values by metric name; without those that this system does not tell."""
    spent = os.times()
    facts = {
        "process_cpu_seconds_total": spent.user + spent.system,
        "process_max_fds": float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }
    if STAT.is_file():
        # The process's name, in parentheses, may hold anything; the rest are numbers.
        numbers = STAT.read_text().rpartition(")")[2].split()
        facts |= {
            "process_virtual_memory_bytes": float(numbers[20]),
            "process_resident_memory_bytes": float(int(numbers[21]) * os.sysconf("SC_PAGE_SIZE")),
            "process_open_fds": float(len(os.listdir(DESCRIPTORS)) - 1),  # without the listing's
            "process_start_time_seconds": booted_at() + int(numbers[19]) / os.sysconf("SC_CLK_TCK"),
        }
    return facts


@cache
def booted_at() -> float:
    """When this machine started, as its clocks said when first asked: later they say it a little
    differently, which would look as if the process had started again."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
