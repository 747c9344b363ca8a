"""`nanovllm check-kernels`: every kernel, every case, against its reference; on a GPU also timed.

Without a GPU the small cases run in Triton's interpreter, and what is written in CuTe DSL is
compiled for Hopper, but not run. With `--tp N` kernels that work across GPUs run instead, on N of
them. Knows no kernel's details.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace
from nanovllm_kernels import COMPILED, KERNELS
from nanovllm_kernels.compile_cache import use_folder

from nanovllm.cli.commands import json_option, write_record
from nanovllm.config import ConfigError, cache_dir
from nanovllm.registry import resolve

if TYPE_CHECKING:
    import torch
    from nanovllm_kernels.timing import Ceilings

INTERPRETER_SLACK = 2.0  # it truncates where a GPU rounds


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one case gave. Shares are of this card's own copy or matmul speed, or of the link's."""

    kernel: str
    case: str
    worst: float | None = None  # error as a share of what is allowed; None: not a number
    skipped: str = ""  # why it was not checked
    problem: str = ""
    us: float | None = None
    nccl_us: float | None = None  # between ranks: how long NCCL takes
    tb_per_s: float | None = None
    tflops: float | None = None
    share: float | None = None
    is_cold: bool | None = None

    @property
    def passed(self) -> bool:
        return self.worst is not None and self.worst <= 1 and not self.problem


@click.command("check-kernels")
@click.option("--kernel", "names", multiple=True, type=click.Choice([*{**KERNELS, **COMPILED}]))
@json_option
@click.option("--quick", is_flag=True, help="small cases only, and no timing")
@click.option("--tp", default=1, type=click.IntRange(1), help="what works across N GPUs, no more")
def check_kernels(names: tuple[str, ...], path: Path | None, quick: bool, tp: int) -> None:
    """Compare every kernel with its reference. Exit code 1 if one is off."""
    import torch

    began, limits = datetime.now(UTC), None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if tp > 1:
        found = across_gpus(tp, names, quick)
    else:
        interpret_without_gpu(device)
        if device.type == "cuda" and not quick:
            from nanovllm_kernels.timing import ceilings

            limits = ceilings(device)
            click.echo(f"{torch.cuda.get_device_name(device)}: {limits}")
        use_folder(cache_dir())
        kinds = names or {**COMPILED, **KERNELS}
        found = chain.from_iterable(check_one(name, device, limits, quick) for name in kinds)
    results = []
    for result in found:
        results.append(result)
        click.echo(line(result))
    failed = sum(not result.passed and not result.skipped for result in results)
    skipped = sum(bool(result.skipped) for result in results)
    click.echo(
        f"{len(results) - failed - skipped} of {len(results)} cases pass on {device.type}"
        + (f", {skipped} not checked" if skipped else "")
    )
    write_record(
        path,
        began,
        kind="kernels",
        recipe={"model": "none"},
        changed={},
        workload={"name": "check-kernels", "cases": msgspec.to_builtins(results)},
        metrics={"failed": float(failed), "not_checked": float(skipped)} | times(results, limits),
    )
    sys.exit(1 if failed else 0)


def interpret_without_gpu(device: torch.device) -> None:
    """Where there is none, does the same in a new process, and ends this one."""
    import triton

    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        # Triton decides when it is imported whether it interprets.
        click.echo("no CUDA device: small cases in Triton's interpreter, nothing is timed")
        again = ["env", "TRITON_INTERPRET=1", "CUTE_DSL_ARCH=sm_90a", sys.executable, "-m"]
        sys.exit(subprocess.run([*again, "nanovllm", *sys.argv[1:]], check=False).returncode)


def across_gpus(tp: int, names: tuple[str, ...], quick: bool) -> Iterator[Result]:
    """Raises ConfigError if there are not so many, or `names` are given, of kernels for one."""
    import torch
    from nanovllm_kernels.peer_cases import check_ranks

    from nanovllm.parallel.peers import connect_peers

    if (present := torch.cuda.device_count()) < tp:
        raise ConfigError(f"--tp is {tp}; this machine has {present} GPUs")
    if names:
        raise ConfigError(f"--kernel {names[0]} runs on one GPU; with --tp it has no effect")
    return (Result(**found) for found in check_ranks(tp, connect_peers, quick))


def check_one(
    name: str, device: torch.device, limits: Ceilings | None, quick: bool
) -> Iterator[Result]:
    """It may be compiled, or run against its reference, or both."""
    try:
        if name in COMPILED:
            yield compile_one(name)
        if name in KERNELS:
            kernel = resolve(KERNELS, name)
            cases = [c for c in kernel.cases if c.small or (device.type == "cuda" and not quick)]
            if not cases and name not in COMPILED:
                yield Result(kernel=name, case="", skipped="not checked: no case of it is small")
            for case in cases:
                yield check_case(kernel, case, device, limits)
    except ModuleNotFoundError as error:
        yield Result(kernel=name, case="", skipped=f"not checked: {error.name} is not installed")


def compile_one(name: str) -> Result:
    began, (_, arguments) = time.monotonic(), COMPILED[name]
    try:
        compiles = resolve({name: path for name, (path, _) in COMPILED.items()}, name)
        getattr(compiles, "compiles", compiles)(*arguments)  # anew, not from the disk
    except ModuleNotFoundError:
        raise
    except Exception as error:
        return Result(kernel=name, case="compiles", problem=f"{type(error).__name__}: {error}")
    return Result(kernel=name, case=f"compiles, in {time.monotonic() - began:.1f} s", worst=0.0)


def check_case(kernel: Any, case: Any, device: torch.device, limits: Ceilings | None) -> Result:  # noqa: ANN401
    from nanovllm_kernels.case import check
    from nanovllm_kernels.timing import time_case

    slack = 1.0 if device.type == "cuda" else INTERPRETER_SLACK
    base = Result(kernel=kernel.name, case=case.name)
    try:
        worst = check(kernel, case, device, slack)
        base = replace(base, worst=worst if worst < float("inf") else None)
        if limits is None or not case.is_timed:
            return base
        return replace(base, **asdict(time_case(kernel, case, device, limits)))
    except Exception as error:
        # One kernel that does not compile must not hide what the others do.
        return replace(base, problem=f"{type(error).__name__}: {error}")


def line(result: Result) -> str:
    worst = "not a number" if result.worst is None else f"{result.worst:.3f}"
    if result.skipped:
        return f"?    {result.kernel:19} {result.skipped}"
    text = f"{'ok  ' if result.passed else 'FAIL'} {result.kernel:19} {result.case:68} {worst:>6}"
    if result.us is not None:
        rates = ((result.tb_per_s, "TB/s"), (result.tflops, "TFLOP/s"))
        shown = " ".join(f"{rate:.2f} {unit}" for rate, unit in rates if rate is not None)
        text += f" {result.us:9.2f} us  {shown} ({result.share:.0%})"
        text += f" NCCL {result.nccl_us:.2f} us" if result.nccl_us else ""
        text += " warm" if result.is_cold is False else ""
    return f"{text} {result.problem}".rstrip()


def times(results: Sequence[Result], limits: Ceilings | None) -> dict[str, float]:
    found = {f"{one.kernel}: {one.case}: us": one.us for one in results if one.us is not None}
    return found | (limits.rates if limits else {})
