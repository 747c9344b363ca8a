"""`nanovllm check-kernels`: every kernel, every case, against its reference; on a GPU also timed.

Without a GPU the small cases run in Triton's interpreter. Knows no kernel.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct
from nanovllm_kernels import KERNELS

from nanovllm.bench import machine
from nanovllm.bench.outcome import now
from nanovllm.bench.record import Record
from nanovllm.registry import resolve

if TYPE_CHECKING:
    import torch
    from nanovllm_kernels.timing import Ceilings

INTERPRETER_SLACK = 2.0  # it truncates where a GPU rounds


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one case gave. Shares are of this card's own copy or matmul speed."""

    kernel: str
    case: str
    worst: float | None  # error as a share of what is allowed; None: not a number
    problem: str = ""
    us: float | None = None
    tb_per_s: float | None = None
    tflops: float | None = None
    share: float | None = None
    is_cold: bool | None = None

    @property
    def passed(self) -> bool:
        return self.worst is not None and self.worst <= 1 and not self.problem


@click.command("check-kernels")
@click.option("--kernel", "names", multiple=True, type=click.Choice(list(KERNELS)))
@click.option("--json", "path", type=click.Path(path_type=Path), help="write the record here")
@click.option("--quick", is_flag=True, help="small cases only, and no timing")
def check_kernels(names: tuple[str, ...], path: Path | None, quick: bool) -> None:
    """Compare every kernel with its reference. Exit code 1 if one is off."""
    import torch
    import triton

    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        sys.exit(run_interpreted(names, path))
    started, clock = now(), time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = None
    if device.type == "cuda" and not quick:
        from nanovllm_kernels.timing import ceilings

        limits = ceilings(device)
        click.echo(
            f"{torch.cuda.get_device_name(device)}: copies {limits.copy_bytes_per_s / 1e12:.2f} "
            f"TB/s, multiplies {limits.matmul_flops / 1e12:.0f} TFLOP/s"
        )
    results = []
    for result in check_all(names or tuple(KERNELS), device, limits, quick):
        results.append(result)
        click.echo(line(result))
    failed = [result for result in results if not result.passed]
    click.echo(f"{len(results) - len(failed)} of {len(results)} cases pass on {device.type}")
    if path is not None:
        record = record_of(results, limits, started, time.monotonic() - clock)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    sys.exit(1 if failed else 0)


def run_interpreted(names: Sequence[str], path: Path | None) -> int:
    """Triton decides when it is imported whether it interprets: hence a new process."""
    click.echo("no CUDA device: small cases in Triton's interpreter, nothing is timed")
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "nanovllm", "check-kernels"]
    for name in names:
        command += ["--kernel", name]
    if path is not None:
        command += ["--json", str(path)]
    return subprocess.run(command, check=False).returncode


def check_all(
    names: Iterable[str], device: torch.device, limits: Ceilings | None, quick: bool
) -> Iterator[Result]:
    for name in names:
        kernel = resolve(KERNELS, name)
        for case in kernel.cases:
            if case.small or (device.type == "cuda" and not quick):
                yield check_case(kernel, case, device, limits)


def check_case(kernel: Any, case: Any, device: torch.device, limits: Ceilings | None) -> Result:  # noqa: ANN401
    from nanovllm_kernels.case import check
    from nanovllm_kernels.timing import time_case

    slack = 1.0 if device.type == "cuda" else INTERPRETER_SLACK
    base = Result(kernel=kernel.name, case=case.name, worst=None)
    try:
        worst = check(kernel, case, device, slack)
        base = msgspec.structs.replace(base, worst=worst if worst < float("inf") else None)
        if limits is None or not case.is_timed:
            return base
        timing = time_case(kernel, case, device)
    except Exception as error:
        # One kernel that does not compile must not hide what the others do.
        return msgspec.structs.replace(base, problem=f"{type(error).__name__}: {error}")
    bytes_per_s, flops = (1e6 * n / timing.us for n in (case.num_bytes, case.num_flops))
    return msgspec.structs.replace(
        base,
        us=timing.us,
        tb_per_s=bytes_per_s / 1e12 if case.num_bytes else None,
        tflops=flops / 1e12 if case.num_flops else None,
        share=max(bytes_per_s / limits.copy_bytes_per_s, flops / limits.matmul_flops),
        is_cold=timing.is_cold,
    )


def line(result: Result) -> str:
    worst = "not a number" if result.worst is None else f"{result.worst:.3f}"
    text = f"{'ok  ' if result.passed else 'FAIL'} {result.kernel:14} {result.case:68} {worst:>6}"
    if result.us is not None:
        rates = ((result.tb_per_s, "TB/s"), (result.tflops, "TFLOP/s"))
        shown = " ".join(f"{rate:.2f} {unit}" for rate, unit in rates if rate is not None)
        text += f" {result.us:9.2f} us  {shown} ({result.share:.0%})"
        text += "" if result.is_cold else " warm"
    return f"{text} {result.problem}".rstrip()


def record_of(
    results: Sequence[Result], limits: Ceilings | None, started: str, duration_s: float
) -> Record:
    commit = machine.commit()
    metrics: dict[str, float] = {"failed": sum(not result.passed for result in results)}
    if limits is not None:
        metrics["copy_tb_per_s"] = limits.copy_bytes_per_s / 1e12
        metrics["matmul_tflops"] = limits.matmul_flops / 1e12
    for result in results:
        if result.us is not None:
            metrics[f"{result.kernel}: {result.case}: us"] = result.us
    return Record(
        kind="kernels",
        machine=machine.fingerprint(),
        commit=commit.hash,
        dirty=commit.is_dirty,
        started_at=started,
        duration_s=duration_s,
        argv=["nanovllm", *sys.argv[1:]],
        recipe={"model": "none"},
        changed={},
        workload={"name": "check-kernels", "cases": msgspec.to_builtins(list(results))},
        metrics=metrics,
        versions=machine.versions(),
    )
