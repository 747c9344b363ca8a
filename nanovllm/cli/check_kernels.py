"""`nanovllm check-kernels`: compare all kernels with their references, and time them on a GPU.

Without a GPU the small cases run in Triton's interpreter, on all cores. Kernels in CuTe DSL are
then compiled for Hopper, but not run. With `--tp N` only kernels across N GPUs run.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
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
from tqdm import tqdm

from nanovllm.cli.command import Command, option
from nanovllm.cli.commands import json_option, lacks_gpu, write_record
from nanovllm.config import ConfigError, cache_dir
from nanovllm.registry import resolve

if TYPE_CHECKING:
    import torch
    from nanovllm_kernels.timing import Ceilings

INTERPRETER_SLACK = 2.0  # factor of tolerances, since the interpreter truncates instead of rounding
MOST_PROCESSES = 8


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one case. Shares refer to this GPU's measured copy, matmul or link speed."""

    kernel: str
    case: str
    worst: float | None = None  # maximum error / tolerance; None: NaN or infinite
    skipped: str = ""  # reason why it was not checked
    problem: str = ""
    us: float | None = None
    nccl_us: float | None = None  # time of NCCL, for kernels between ranks
    tb_per_s: float | None = None
    tflops: float | None = None
    share: float | None = None
    is_cold: bool | None = None

    @property
    def passed(self) -> bool:
        return self.worst is not None and self.worst <= 1 and not self.problem


@click.command(
    "check-kernels", cls=Command, others={},
    example="nanovllm check-kernels --quick --kernel paged_decode",
)  # fmt: skip
@option(
    "--kernel",
    "names",
    multiple=True,
    type=click.Choice([*{**KERNELS, **COMPILED}]),
    metavar="NAME",
    group="Cases",
    help="Check this kernel only. May be repeated; a wrong name lists all.",
)
@option(
    "--quick",
    is_flag=True,
    group="Cases",
    help="Check small cases only, and time nothing. Without a GPU, two cases of each kernel.",
)
@option(
    "--tp",
    default=1,
    type=click.IntRange(1),
    metavar="N",
    group="Cases",
    help="Check the kernels that work across N GPUs, and no others.",
)
@option(
    "--invariant",
    is_flag=True,
    group="Cases",
    help="Check the kernels of kernels.invariant instead: a row has the same bits with any others.",
)
@json_option
def check_kernels(
    names: tuple[str, ...], path: Path | None, quick: bool, tp: int, invariant: bool
) -> None:
    """Compare every kernel with its plain-torch reference, and time it on a GPU.

    Without a GPU, small cases run in Triton's interpreter. Exit code 1: a result is off.
    """
    began, limits = datetime.now(UTC), None
    if tp == 1 and lacks_gpu("auto") is not None:
        interpret()  # before the import of torch, which takes seconds
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if invariant and (tp > 1 or names or quick):
        raise ConfigError("--invariant checks its own cases on one GPU; give it alone")
    if tp > 1:
        across = across_gpus(tp, names, quick)
    else:
        if device.type == "cpu":
            from nanovllm_kernels.interpreter import patch_once

            interpret()
            patch_once()
        if device.type == "cuda" and not quick and not invariant:
            from nanovllm_kernels.timing import ceilings

            limits = ceilings(device)
            click.echo(f"{torch.cuda.get_device_name(device)}: {limits}")
        use_folder(cache_dir())
        kinds = names or [*{**COMPILED, **KERNELS}]
        if invariant:
            across = rows_apart(device)
        elif device.type == "cpu" and not names:
            across = on_all_cores(kinds, quick)
        else:
            across = chain.from_iterable(check_one(name, device, limits, quick) for name in kinds)
    results = []
    for result in across:
        results.append(result)
        tqdm.write(line(result))  # above the progress bar, if there is one
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
        workload={
            "name": "check-kernels --invariant" if invariant else "check-kernels",
            "cases": msgspec.to_builtins(results),
        },
        metrics={"failed": float(failed), "not_checked": float(skipped)} | times(results, limits),
    )
    sys.exit(1 if failed else 0)


def rows_apart(device: torch.device) -> Iterator[Result]:
    """Check that no bit of a row depends on other rows, for the kernels of kernels.invariant."""
    from nanovllm_kernels.products.invariant import without_workspace
    from nanovllm_kernels.rows_apart import checks

    if device.type == "cuda":
        without_workspace()
    for check in checks(device):
        base = Result(kernel=check.kernel, case=check.case)
        try:
            differing = check.differing()
        except Exception as error:
            yield replace(base, problem=f"{type(error).__name__}: {error}")
            continue
        text = ", ".join(f"{part.start}:{part.stop}" for part in differing)
        yield replace(base, worst=0.0, problem=f"other bits in rows {text}" if text else "")


def interpret() -> None:
    """Run the command again in a process with Triton's interpreter, and exit with its code."""
    import triton

    if not triton.knobs.runtime.interpret:
        # Triton reads the setting when it is imported.
        click.echo("no CUDA device: small cases in Triton's interpreter, nothing is timed")
        again = ["env", "TRITON_INTERPRET=1", "CUTE_DSL_ARCH=sm_90a", sys.executable, "-m"]
        sys.exit(subprocess.run([*again, "nanovllm", *sys.argv[1:]], check=False).returncode)


def on_all_cores(names: Sequence[str], quick: bool) -> Iterator[Result]:
    """Check kernels without a GPU, each in one of several processes, with a progress bar.

    The processes are forks, since each would import torch again for 2.5 s.
    """
    num_processes = max(1, min(os.cpu_count() or 1, MOST_PROCESSES))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        pending = [pool.submit(check_in_process, name, quick) for name in names]
        with tqdm(total=len(names), desc="checking", unit="kernel", mininterval=0.5) as bar:
            for done in as_completed(pending):
                yield from done.result()
                bar.update()


def check_in_process(name: str, quick: bool) -> list[Result]:
    import torch

    torch.set_num_threads(1)  # other cores run other processes
    use_folder(cache_dir())
    return [*check_one(name, torch.device("cpu"), None, quick)]


def few(cases: Sequence[Any]) -> list[Any]:
    """Return the first and the last of the cases."""
    return [*cases[:1], *cases[1:][-1:]]


def across_gpus(tp: int, names: tuple[str, ...], quick: bool) -> Iterator[Result]:
    """Check the kernels across `tp` GPUs.

    Raise ConfigError if there are fewer GPUs, or if `names` of one-GPU kernels are given.
    """
    import torch
    from nanovllm_kernels.exchange.cases import check_ranks

    from nanovllm.parallel.peers import connect_peers

    if (present := torch.cuda.device_count()) < tp:
        raise ConfigError(f"--tp is {tp}; this machine has {present} GPUs")
    if names:
        raise ConfigError(f"--kernel {names[0]} runs on one GPU; with --tp it has no effect")
    return (Result(**result) for result in check_ranks(tp, connect_peers, quick))


def check_one(
    name: str, device: torch.device, limits: Ceilings | None, quick: bool
) -> Iterator[Result]:
    """Compile a kernel, compare it with its reference, or both."""
    try:
        if name in COMPILED:
            yield compile_one(name)
        if name in KERNELS:
            kernel = resolve(KERNELS, name)
            cases = [c for c in kernel.cases if c.small or (device.type == "cuda" and not quick)]
            if quick and device.type == "cpu":
                cases = few(cases)
            if not cases and name not in COMPILED:
                yield Result(kernel=name, case="", skipped="not checked: it has no small case")
            for case in cases:
                yield check_case(kernel, case, device, limits)
    except ModuleNotFoundError as error:
        yield Result(kernel=name, case="", skipped=f"not checked: {error.name} is not installed")


def compile_one(name: str) -> Result:
    began, (_, arguments) = time.monotonic(), COMPILED[name]
    try:
        compiles = resolve({name: path for name, (path, _) in COMPILED.items()}, name)
        getattr(compiles, "compiles", compiles)(*arguments)  # bypasses the cache on disk
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
        # A kernel that does not compile must not hide the results of others.
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
    us_by_case = {f"{one.kernel}: {one.case}: us": one.us for one in results if one.us is not None}
    return us_by_case | (limits.rates if limits else {})
