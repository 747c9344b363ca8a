"""A profile of some steps of the engine, made while a command of nanovllm runs.

    python results/profiled.py FILE FIRST COUNT bench --offline RECIPE --workload bs1 ...

FILE gets the kernels (on a CPU the operations) of COUNT steps from step FIRST of the engine on. It
has time and launches per step by name, the idle time of the GPU, and the middle kernels in order.
FIRST may be several numbers separated by commas. The time of a kernel that is launched
early includes its wait for the previous one. Ignore the rates that the command prints: reading a
profile takes seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.profiler import profile

    from nanovllm.plan import StepPlan
    from nanovllm.runner.results import Handle
    from nanovllm.runner.runner import Runner

VARIABLE = "NANOVLLM_PROFILED"  # for the process of the engine, which imports this file, too
MOST_NAMES, IN_ORDER, NAME = 30, 40, 100


class Profiled:
    """A replacement of Runner.launch that counts its calls and profiles some of them."""

    def __init__(
        self, plain: Callable[[Runner, StepPlan], Handle], file: str, firsts: str, count: int
    ) -> None:
        self.plain, self.file, self.count = plain, Path(file), count
        self.firsts = [int(first) for first in firsts.split(",")]
        self.seen = 0
        self.profile: profile | None = None
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("")

    def launch(self, runner: Runner, plan: StepPlan) -> Handle:
        import torch
        from torch.profiler import ProfilerActivity, profile

        kind = "CUDA" if torch.cuda.is_available() else "CPU"
        is_first, is_last = self.seen in self.firsts, self.seen - self.count in self.firsts
        if (is_first or is_last) and kind == "CUDA":
            torch.cuda.synchronize()
        if is_last:
            assert self.profile is not None
            self.profile.__exit__(None, None, None)
            kernels = [one for one in self.profile.events() if one.device_type.name == kind]
            spans = [(one.time_range.start, one.time_range.end, one.name) for one in kernels]
            with self.file.open("a") as file:
                file.write(f"from step {self.seen - self.count} on:\n")
                file.write("\n".join(lines_of(sorted(spans), self.count)) + "\n")
        if is_first:
            self.profile = profile(activities=[getattr(ProfilerActivity, kind)])
            self.profile.__enter__()
        self.seen += 1
        return self.plain(runner, plan)


def lines_of(spans: list[tuple[float, float, str]], steps: int) -> Iterator[str]:
    """Yield the lines of a profile. Times are in microseconds."""
    begin, end, idle = spans[0][0], spans[0][0], 0.0
    by_name: dict[str, list[float]] = {}
    for start, stop, name in spans:
        idle, end = idle + max(0.0, start - end), max(end, stop)
        by_name.setdefault(name, []).append(stop - start)
    each = (end - begin) / steps
    launches, idle = len(spans) / steps, idle / steps
    yield f"{steps} steps of {each:.1f} us, {launches:.1f} launches, {idle:.1f} us idle"
    longest = sorted(by_name.items(), key=lambda one: -sum(one[1]))
    for name, times in longest[:MOST_NAMES]:
        share, mean = sum(times) / steps, sum(times) / len(times)
        yield f"{share:9.2f} us {len(times) / steps:7.1f} x {mean:8.2f} us  {name[:NAME]}"
    middle = spans[len(spans) // 2 :][:IN_ORDER]
    yield "in order: start, duration"
    for start, stop, name in middle:
        yield f"{start - middle[0][0]:9.2f} {stop - start:8.2f}  {name[:NAME]}"


if __name__ == "__mp_main__" and VARIABLE in os.environ:
    from nanovllm.runner.runner import Runner

    file, firsts, count = os.environ[VARIABLE].split("\n")
    profiled = Profiled(Runner.launch, file, firsts, int(count))

    def launch(self: Runner, plan: StepPlan) -> Handle:
        return profiled.launch(self, plan)

    Runner.launch = launch  # type: ignore[method-assign]

if __name__ == "__main__":
    from nanovllm.cli import main

    os.environ[VARIABLE] = "\n".join(sys.argv[1:4])
    sys.argv = ["nanovllm", *sys.argv[4:]]
    main()
