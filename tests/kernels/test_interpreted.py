"""Every kernel equals its reference without a GPU, and the comparison itself is right.

Kernels run in Triton's interpreter, in processes of their own. TRITON_INTERPRET must be set before
triton is imported, and other tests may have imported it already.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from click.testing import CliRunner
from nanovllm_kernels import COMPILED, KERNELS
from nanovllm_kernels.case import Case, Kernel, check

from nanovllm.attention.flash import FlashPaged
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.attention.triton import TritonPaged
from nanovllm.cli.check_kernels import check_case, check_kernels, few, line
from nanovllm.registry import resolve
from tests.attention.paged_batches import error_share, layout_of, make_batch
from tests.interpreted import forks, in_interpreter, in_parent, passes

CPU = torch.device("cpu")
PARTS = 4  # groups of kernels, for several processes
INTERPRETER_ROUNDS = 2.0  # it truncates to bfloat16, with twice the error of rounding
CHUNKS = ((130, 7, 64, 200, 33), (130, 1, 63, 5, 32))
MIXED = ((33, 7, 200, 1, 130, 1, 64, 150), (1, 1, 1, 1, 130, 1, 63, 5))  # decode rows, then chunks
DECODE = ((1, 130, 7, 64, 200, 1), (1,) * 6)
KINDS = pytest.mark.parametrize("rows", [CHUNKS, MIXED, DECODE], ids=["chunks", "mixed", "decode"])


@in_parent
@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_passes_the_small_cases_that_a_quick_check_leaves_out(part: int) -> None:
    names = [*KERNELS][part::PARTS]
    done = forks().run(f"{__name__}:check_others", *names)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    *lines, last = done.stdout.splitlines()
    assert len(lines) == sum(len(others(resolve(KERNELS, name))) for name in names) > 50
    assert last == f"{len(lines)} of {len(lines)} cases pass"


def others(kernel: Kernel) -> list[Case]:
    """Return the small cases that a quick check leaves out."""
    small = [case for case in kernel.cases if case.small]
    return [case for case in small if case not in few(small)]


def check_others(*names: str) -> int:
    """Run the other cases and print their results. Return 1 if one is off."""
    results = []
    for name in names:
        kernel = resolve(KERNELS, name)
        results += [check_case(kernel, case, CPU, None) for case in others(kernel)]
    passed = sum(result.passed for result in results)
    sys.stdout.writelines(f"{line(result)}\n" for result in results)
    sys.stdout.write(f"{passed} of {len(results)} cases pass\n")
    return int(passed < len(results))


@in_parent
def test_without_a_gpu_the_command_starts_again_in_the_interpreter() -> None:
    command = ["env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "nanovllm", "check-kernels"]
    done = subprocess.run([*command, "--kernel", "combine"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.startswith("no CUDA device: small cases in Triton's interpreter")
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"([1-9]\d*) of \1 cases pass on cpu", last), last


@in_parent
def test_quickly_all_kernels_are_checked_on_all_cores_with_a_bar(tmp_path: Path) -> None:
    command = ["env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "nanovllm", "check-kernels"]
    command += ["--quick", "--json", str(tmp_path / "kernels.json")]
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    num_kernels = len({**KERNELS, **COMPILED})
    assert f"{num_kernels}/{num_kernels} [" in done.stderr  # the progress bar's last state
    checked = {line.split()[1] for line in done.stdout.splitlines()[1:-1]}
    assert checked == {*KERNELS, *COMPILED}
    cases = json.loads((tmp_path / "kernels.json").read_text())["workload"]["cases"]
    assert {case["kernel"] for case in cases} == checked
    assert all(case["worst"] <= 1 for case in cases)
    assert done.stdout.splitlines()[-1] == f"{len(cases)} of {len(cases)} cases pass on cpu"
    # The limit is on CPU time, which is a minute of wall clock on two idle cores.
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 120


@in_parent
@pytest.mark.parametrize(
    ("count", "chosen"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 2]), (18, [0, 17])]
)
def test_few_cases_are_the_first_and_the_last(count: int, chosen: list[int]) -> None:
    assert few(range(count)) == chosen


@in_parent
def test_backends_in_the_interpreter() -> None:
    passes(__file__, 19)


@in_interpreter
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 80), (2, 2, 128)])
@KINDS
def test_triton_backend(heads, rows) -> None:
    q_THA, cache, batch = make_batch(*rows, heads, 16, torch.bfloat16, CPU)
    o_THA = TritonPaged(cache).bind(batch)(cache, q_THA)
    assert error_share(o_THA, q_THA, cache, batch) <= INTERPRETER_ROUNDS


@in_interpreter
@KINDS
def test_triton_backend_equals_the_definition_in_float32(rows) -> None:
    q_THA, cache, batch = make_batch(*rows, (4, 2, 64), 16, torch.float32, CPU)
    expected_THA = TorchPaged(cache).bind(batch)(cache, q_THA)
    o_THA = TritonPaged(cache).bind(batch)(cache, q_THA)
    torch.testing.assert_close(o_THA, expected_THA, rtol=1e-5, atol=1e-5)


@in_interpreter
@pytest.mark.parametrize(
    ("lengths", "new"),
    [
        ((33, 7, 200, 130, 1, 0, 0), (4, 1, 3, 1, 1, 0, 0)),  # the last rows are padding
        ((33, 7, 200, 130, 130, 64), (4, 1, 3, 2, 130, 63)),
    ],
    ids=["decode", "mixed"],
)
def test_rows_with_drafts_equal_the_definition_in_float32(lengths, new) -> None:
    shape = (4, 2, 64), 16, torch.float32, CPU
    q_THA, cache, batch = make_batch(lengths, new, *shape, width=4)
    assert batch.num_decodes == len([count for count in new if count <= 4])
    expected_THA = TorchPaged(cache).bind(batch)(cache, q_THA)
    o_THA = TritonPaged(cache).bind(batch)(cache, q_THA)
    torch.testing.assert_close(o_THA, expected_THA, rtol=1e-5, atol=1e-5)


@in_interpreter
@KINDS
def test_results_go_where_they_are_wanted_and_padding_changes_nothing(rows) -> None:
    q_THA, cache, batch = make_batch(*rows, (4, 2, 64), 16, torch.float32, CPU)
    attend = TritonPaged(cache).bind(batch)
    expected_THA, num_tokens = attend(cache, q_THA), len(q_THA)
    if batch.num_decodes < len(
        batch.lengths_R
    ):  # a step of decode rows is never padded with tokens
        q_THA = torch.cat((q_THA, torch.full_like(q_THA[:7], 1e3)))
    out_THA = torch.empty_like(q_THA)
    assert attend(cache, q_THA, out_THA) is out_THA
    torch.testing.assert_close(out_THA[:num_tokens], expected_THA, rtol=0, atol=0)


@in_interpreter
@pytest.mark.parametrize("backend", [TritonPaged, FlashPaged])
def test_decode_batches_share_a_kernel(backend) -> None:
    """One bound batch serves several layers: doubled values double the result exactly."""
    q_THA, cache, batch = make_batch(*DECODE, (4, 2, 64), 16, torch.bfloat16, CPU)
    q2_THA, cache2, _ = make_batch(*DECODE, (4, 2, 64), 16, torch.bfloat16, CPU)
    cache2.v_PSGA.mul_(2)
    attend = backend(cache).bind(batch)
    doubled_THA = attend(cache2, q2_THA)
    torch.testing.assert_close(doubled_THA, 2 * attend(cache, q_THA), rtol=0, atol=0)


@in_parent
@pytest.mark.parametrize("backend", [TritonPaged, FlashPaged])
def test_backends_say_why_they_cannot_serve_a_cpu(backend) -> None:
    reason = backend.supports(CPU, layout_of((16, 8, 128)), 128)
    assert reason is not None and "GPU" in reason


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def case_of(x: torch.Tensor) -> Case:
    return Case("x", lambda device: (x.clone(),))


@in_parent
@pytest.mark.parametrize(
    ("run", "share"),
    [
        (doubled, 0.0),
        (lambda x: doubled(x) * (1 + 2**-7), 0.5),  # one ulp of two allowed ones
        (lambda x: doubled(x) * (1 + 2**-5), 2.0),
        (lambda x: doubled(x) * torch.nan, float("inf")),
        (lambda x: torch.empty_like(x), float("inf")),
    ],
    ids=["equal", "close", "off", "nan", "unwritten"],
)
def test_check_measures_the_error(run, share) -> None:
    kernel = Kernel("doubled", run, doubled, (), ulps_16=2)
    x = torch.tensor([1.0, 4.0, 1024.0], dtype=torch.bfloat16)
    assert check(kernel, case_of(x), CPU) == pytest.approx(share, rel=1e-6)


@in_parent
def test_check_sees_arguments_written_in_place_and_integers() -> None:
    def add_one_in_place(x: torch.Tensor) -> None:
        x += 1

    def add_one(x: torch.Tensor) -> None:
        x.copy_(x + 1)

    def add_two(x: torch.Tensor) -> None:
        x += 2

    case = case_of(torch.arange(3))
    for run, share in ((add_one_in_place, 0.0), (add_two, float("inf"))):
        kernel = Kernel("add", run, add_one, (), outputs=lambda result, args: args)
        assert check(kernel, case, CPU) == share


def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of registers")


SMALL = Case("x", lambda device: (torch.ones(3),), small=True)
RIGHT = Kernel("right", doubled, doubled, (SMALL,))
OFF = Kernel("off", lambda x: x * 3, doubled, (SMALL,), ulps_32=4)
RAISES = Kernel("raises", raises, doubled, (SMALL,))


@in_parent
@pytest.mark.parametrize(
    ("attribute", "exit_code", "shown"),
    [
        ("RIGHT", 0, "1 of 1 cases pass"),
        ("OFF", 1, "0 of 1 cases pass"),
        ("RAISES", 1, "RuntimeError: out of registers"),
    ],
)
def test_the_command_fails_if_a_kernel_is_off(monkeypatch, attribute, exit_code, shown) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)  # plain torch needs no child
    monkeypatch.setitem(KERNELS, "rms_norm", f"{__name__}:{attribute}")
    done = CliRunner().invoke(check_kernels, ["--kernel", "rms_norm"])
    assert done.exit_code == exit_code
    assert shown in done.output


def lacks_a_package() -> None:
    raise ModuleNotFoundError(name="cutlass")


@in_parent
@pytest.mark.parametrize(
    ("compiles", "exit_code", "shown"),
    [
        (dict, 0, "1 of 1 cases pass on cpu\n"),
        (lacks_a_package, 0, "0 of 1 cases pass on cpu, 1 not checked\n"),
        (lambda: 1 / 0, 1, "ZeroDivisionError: division by zero\n0 of 1 cases pass on cpu\n"),
    ],
)
def test_what_cannot_be_compiled_is_said(monkeypatch, compiles, exit_code, shown) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr("nanovllm.cli.check_kernels.resolve", lambda *_: compiles)
    monkeypatch.setitem(COMPILED, "flash_forward", ("any:thing", ()))
    done = CliRunner().invoke(check_kernels, ["--kernel", "flash_forward"])
    assert (done.exit_code, shown in done.output) == (exit_code, True), done.output
    assert ("not checked: cutlass is not installed" in done.output) == (compiles is lacks_a_package)
