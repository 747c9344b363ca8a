"""Results of the fp8 products of few rows in CuTe DSL, by simulation of their PTX on the CPU.

Each case has two tiles or a ragged scale, rows that do not fill the operand, and several slices or
more blocks of inputs than its ring has stages. All sizes are checked on a GPU (check-kernels).
"""

from __future__ import annotations

import re
import struct
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from nanovllm_kernels.case import Case, Kernel, check
from nanovllm_kernels.products import few_fp8_cases, few_fp8_cute, quantise_cases
from nanovllm_kernels.products.few_fp8_cute import THREADS, TILE, Kind, Product, Shape, arguments
from nanovllm_kernels.products.library_linear import add_inputs
from nanovllm_kernels.products.linear_cases import linear_inputs, norm_inputs
from torch import Tensor

from tests.kernels.compiled import compiled_with
from tests.kernels.played_memory import Memory
from tests.kernels.products.test_block_fp8_ptx import WAITS, as_bytes, changed, passed
from tests.kernels.ptx import Box, Launch, Program, play

CPU = torch.device("cpu")
KEEP = """
    text = compiled.__ptx__
    Path("_".join(map(str, kind))).write_text(text if isinstance(text, str) else text.decode())
"""
GATE_UP, NORMED = few_fp8_cases.FEW_FP8_NORM_GATE_UP, few_fp8_cases.FEW_FP8_NORM_LINEAR
ADDED, PLAIN = few_fp8_cases.FEW_FP8_LINEAR_ADD, few_fp8_cases.FEW_FP8_LINEAR
INPUTS = {GATE_UP: norm_inputs, NORMED: norm_inputs, ADDED: add_inputs, PLAIN: linear_inputs}
SEEDS = range(4)  # each with another order of execution


class Played(NamedTuple):
    """A kernel, its division, and the sizes of a product."""

    kernel: Kernel
    kind: Kind
    shape: Shape
    size: tuple[int, int, int]  # rows of x, rows of W, inputs

    @property
    def compiled(self) -> tuple[int, ...]:
        return arguments(self.shape, self.kind)


CASES = {
    "own norm and gate": Played(
        GATE_UP, Kind(True, True), Shape(8, 4, 37, 2, own=True), (2, 128, 1024)
    ),
    "own norm and gate of eight slices": Played(
        GATE_UP, Kind(True, True), Shape(8, 8, 74, 2, own=True), (1, 64, 2048)
    ),
    "own norm": Played(NORMED, Kind(True), Shape(8, 1, 37, 9, own=True), (1, 64, 1152)),
    "own rows": Played(ADDED, Kind(added=True), Shape(8, 2, 37, 9, own=True), (3, 192, 2304)),
    "quantised norm and gate": Played(
        GATE_UP, Kind(True, True), Shape(16, 1, 44, 9, own=False), (11, 128, 1152)
    ),
    "quantised and added": Played(
        ADDED, Kind(added=True), Shape(16, 8, 74, 2, own=False), (16, 64, 2048)
    ),
    "quantised": Played(PLAIN, Kind(), Shape(8, 4, 37, 5, own=False), (5, 192, 2560)),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], str]:
    """Return the PTX of each compiled kernel."""
    folder: Path = tmp_path_factory.mktemp("ptx")
    kinds = [played.compiled for played in CASES.values()]
    compiled_with("--keep-ptx", kinds, KEEP, folder, "few_fp8_cute.compile_product")
    return {kind: (folder / "_".join(map(str, kind))).read_text() for kind in kinds}


def play_product(
    text: str,
    seed: int,
    played: Played,
    x_TD: Tensor,
    x_scale_BT: Tensor | None,
    weight_ND: Tensor,
    w_scale: Tensor,
    y_TN: Tensor,
    residual_TN: Tensor | None,
    norm_weight_D: Tensor | None,
    eps: float,
) -> None:
    """Run in place of a compiled kernel, and check that each byte of the result is written once."""
    shape, memory = played.shape, Memory(1 << 21)
    box_rows = Product(shape, Kind(*played.compiled[len(shape) :])).box
    x_TD = x_TD.contiguous()
    weight_box = [Box(as_bytes(weight_ND), box_rows), bytes(8)]
    parameters = list(weight_box) if shape.own else [Box(as_bytes(x_TD), shape.rows), bytes(8)]
    parameters = parameters[: 2 * (not shape.own)] + weight_box
    result = memory.place(as_bytes(y_TN), may_change=True)
    for tensor in (x_TD, x_scale_BT, w_scale, y_TN, residual_TN, norm_weight_D):
        if tensor is not None:
            is_result = tensor is y_TN or tensor is residual_TN
            place = result if is_result else memory.place(as_bytes(tensor.contiguous()))
            parameters.append(passed(place.start, tensor.contiguous()))
    parameters += [struct.pack("<f", eps), bytes(1), struct.pack("<i", len(x_TD))]
    num_clusters, threads = len(weight_ND) // TILE, THREADS + 32
    launch = Launch(Program(text), shape.splits, num_clusters, threads, parameters, memory)
    play(launch, seed)
    assert (memory.times_written[result] == 1).all(), "bytes are not written once"
    as_bytes(y_TN)[:] = memory.content[result].reshape(as_bytes(y_TN).shape)


def error_of(played: Played, text: str, seed: int, patch: pytest.MonkeyPatch) -> float:
    """Return the worst error as a fraction of the error that the case allows."""

    def compile_product(*of: int) -> partial:
        assert of == played.compiled
        return partial(play_product, text, seed, played)

    patch.setattr(few_fp8_cute, "compile_product", compile_product)
    patch.setattr(few_fp8_cute, "shape_of", lambda *size: played.shape)
    patch.setattr(few_fp8_cute, "few_quantise", quantise_cases.few_reference)
    inputs = partial(few_fp8_cases.in_fp8, INPUTS[played.kernel], *played.size)
    return check(played.kernel, Case("played", inputs), CPU)


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_computes_what_the_reference_does(
    name: str, texts: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = CASES[name]
    for seed in SEEDS:
        assert error_of(played, texts[played.compiled], seed, monkeypatch) < 0.9


TRY_WAIT = r"mbarrier\.try_wait.*\n"
WRONG = {  # case, change and expected message
    "one arrival less": ("own rows", partial(changed, r"mbarrier\.arrive\.shared.*\n", ""), WAITS),
    **{
        f"phases of {threads} do not turn": (
            "own norm",
            partial(changed, r"xor\.b32 \t(%r\d+), \1, .*\n", "", nth=nth),
            "more threads|an error of",
        )
        for nth, threads in enumerate(("the loader", "the others"))
    },
    "no wait for the other slices": (
        "quantised and added",
        partial(changed, TRY_WAIT, "", nth=-1),
        "an error of",
    ),
    "no wait for weights": (
        "own norm",
        partial(changed, TRY_WAIT, "", nth=1),
        "an error of|more threads",
    ),
    "a neighbour too far": (
        "own norm and gate",
        partial(changed, ", 1, 31, -1;", ", 2, 31, -1;"),
        "an error of",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(wrong: str, texts: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one seed finds each fault. Races between threads depend on the seed."""
    name, change, said = WRONG[wrong]
    played, found = CASES[name], []
    text = change(texts[played.compiled])
    for seed in SEEDS:
        try:
            error = error_of(played, text, seed, monkeypatch)
            found.append("" if error < 4 else f"an error of {error}")
        except AssertionError as failed:
            found.append(str(failed))
        if re.search(said, found[-1]):
            return
    pytest.fail(f"not found: {found}")
