"""The CPU time of a server's processes, per token of a run. Linux: it is read from /proc.

Knows what launch calls the processes, not what they do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

KINDS = {"Server": "nanovllm-api", "Engine": "nanovllm-engine"}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(supervisor: int | None) -> dict[str, float]:
    """User and system time so far, by kind: of its children and theirs. Empty without a /proc."""
    found: dict[int, tuple[int, str, int]] = {}  # parent, name and ticks, by process id
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(") ")
        except OSError:
            continue  # it has ended
        state = tail.split()  # from the third field of proc(5) on
        name = head.partition("(")[2]
        found[int(path.parent.name)] = int(state[1]), name, int(state[11]) + int(state[12])
    used: dict[str, float] = {}
    for parent, name, ticks in found.values():
        while parent != supervisor and parent in found:
            parent, name, _ = found[parent]
        for kind, prefix in KINDS.items():
            if parent == supervisor and name.startswith(prefix):
                used[kind] = used.get(kind, 0.0) + ticks / TICKS_PER_S
    return used


def facts(before: Mapping[str, float], after: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Lines of the table."""
    return {
        f"{kind} CPU us per token": 1e6 * (seconds - before.get(kind, 0.0)) / tokens
        for kind, seconds in after.items()
        if tokens
    }
