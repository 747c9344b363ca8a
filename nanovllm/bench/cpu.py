"""The CPU time of a server's processes, per token of a run. Linux: it is read from /proc.

Knows what launch calls the processes, not what they do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

KINDS = {"Server": "nanovllm-api", "Engine": "nanovllm-engine"}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process(Struct, frozen=True):
    name: str
    parent: int
    cpu_s: float  # of all its threads, user and system


def cpu_s(supervisor: int) -> dict[str, float]:
    """So far, by kind: its children and what descends from them. Empty without a /proc."""
    found = _processes()
    used: dict[str, float] = {}
    for process in found.values():
        child = _child(process, found, supervisor)
        for kind, name in KINDS.items():
            if child is not None and child.name.startswith(name):
                used[kind] = used.get(kind, 0.0) + process.cpu_s
    return used


def facts(before: Mapping[str, float], after: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Lines of the table."""
    return {
        f"{kind} CPU us per token": 1e6 * (seconds - before.get(kind, 0.0)) / tokens
        for kind, seconds in after.items()
        if tokens
    }


def _child(process: Process, found: Mapping[int, Process], supervisor: int) -> Process | None:
    """The supervisor's child that the process is or descends from."""
    while process.parent != supervisor:
        if process.parent not in found:
            return None
        process = found[process.parent]
    return process


def _processes() -> dict[int, Process]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue  # it has ended
        head, _, tail = text.rpartition(") ")
        fields = tail.split()  # from the third field of proc(5) on
        ticks = int(fields[11]) + int(fields[12])
        found[int(path.parent.name)] = Process(
            head.partition("(")[2], int(fields[1]), ticks / TICKS_PER_S
        )
    return found
