"""The products of routed experts for many rows, as far as they go without a GPU."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from nanovllm_kernels import grouped_linear
from nanovllm_kernels.expert_cases import Routed, in_float
from nanovllm_kernels.experts_reference import expert_down, expert_gate_up
from nanovllm_kernels.grouped_linear import DOWN_TILES, GATE_UP_TILE, GROUPED
from nanovllm_kernels.route_reference import ExpertRows

from nanovllm.runner.precompile import HOPPER

CPU = torch.device("cpu")
SIGNATURE = """
import torch
from nanovllm_kernels.grouped_linear import compile_down, compile_gate_up
x, y = (torch.zeros(8, 16, dtype=torch.bfloat16) for _ in range(2))
weight, numbers = torch.zeros(3, 16, 16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
for run, pairs in (
    (compile_gate_up("bfloat16", (64, 128, 1, True), 2), (torch.zeros(8, dtype=torch.int32),)),
    (compile_down("bfloat16", (64, 128, 1, True)), ()),
):
    try:
        run(x, weight, y, numbers, *pairs, 66)
    except ValueError as error:
        print(error)
"""


def rows_of(starts_E1: torch.Tensor, pair_of_X: torch.Tensor) -> ExpertRows:
    """What the compiled products are told of the rows, and nothing else."""
    nothing = torch.empty(0)
    return ExpertRows(pair_of_X, nothing, starts_E1, nothing, nothing, nothing, tile=0)


@pytest.mark.parametrize("tile", [64, 128])
def test_every_argument_is_in_its_place(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels know places only: here the definitions stand in them."""
    asked: list[object] = []

    def compile_gate_up(name: str, sizes: tuple, num_chosen: int):
        asked.append((name, sizes, num_chosen))

        def run(x, weight, y, starts, pairs, num_clusters) -> None:
            assert num_clusters == 132 // sizes[2]
            rows = rows_of(starts, pairs)
            y.copy_(in_float(expert_gate_up)(x, weight, None, rows, num_chosen))

        return run

    def compile_down(name: str, sizes: tuple):
        asked.append((name, sizes))

        def run(y, weight, out, starts, num_clusters) -> None:
            assert num_clusters == 132 // sizes[2]
            out.copy_(in_float(expert_down)(y, weight, None, rows_of(starts, y), 0))

        return run

    def by_triton(x, weight, scale, rows, num_chosen) -> torch.Tensor:
        asked.append(("triton",))
        return in_float(expert_gate_up)(x, weight, scale, rows, num_chosen).bfloat16()

    monkeypatch.setattr(grouped_linear.experts, "expert_gate_up", by_triton)
    monkeypatch.setattr(grouped_linear, "compile_gate_up", compile_gate_up)
    monkeypatch.setattr(grouped_linear, "compile_down", compile_down)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    routed = Routed(20, 3, 7, 16, 24, first=1, num=4)
    for kind, product, of in (
        (GROUPED.gate_up, expert_gate_up, Routed.gate_up),
        (GROUPED.down, expert_down, Routed.down),
    ):
        args = of(routed, tile, CPU)
        num_rows = int(args[3].starts_E1[-1])
        assert 0 < num_rows < 60
        actual, expected = kind(*args), in_float(product)(*args)
        assert actual.dtype == torch.bfloat16 and actual.shape == expected.shape
        torch.testing.assert_close(
            actual[:num_rows].float(), expected[:num_rows], rtol=1e-2, atol=1e-3
        )
    first = ("triton",) if tile == 128 else ("bfloat16", GATE_UP_TILE, 3)
    assert asked == [first, ("bfloat16", DOWN_TILES[tile])]


def test_the_compiled_kernels_ask_for_these_arguments() -> None:
    command = [*HOPPER, sys.executable, "-c", SIGNATURE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    gate_up = (
        "(x_TD: Tensor([n0, n1], bfloat16), gate_up_EXD: Tensor([n2, n3, n1], bfloat16), "
        "y_XF: Tensor([n4, n5], bfloat16), starts_E1: Tensor([n6], int32), "
        "pair_of_X: Tensor([n7], int32), num_clusters: int32)"
    )
    down = (
        "(y_XF: Tensor([n0, n1], bfloat16), down_EDF: Tensor([n2, n3, n1], bfloat16), "
        "y_XD: Tensor([n4, n5], bfloat16), starts_E1: Tensor([n6], int32), num_clusters: int32)"
    )
    assert gate_up in done.stdout and down in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("expected device_type=cuda") == 2


def test_it_is_for_many_rows_of_widths_that_can_be_copied() -> None:
    weight = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    assert [GROUPED.fits(num, weight(16, 64, 32)) for num in (192, 193)] == [False, True]
    assert [GROUPED.tile(num, 16) for num in (65, 1023, 1024)] == [64, 64, 128]
    assert not GROUPED.fits(193, weight(16, 64, 36))
    assert not GROUPED.fits(193, weight(16, 72, 32))
    assert not GROUPED.fits(193, torch.empty(16, 64, 32, device="meta"))
