"""Arguments and compilation of the products of routed experts for many rows, without a GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from nanovllm_kernels.experts import grouped_linear
from nanovllm_kernels.experts.cases import MoECase, in_float
from nanovllm_kernels.experts.gated_experts import SHAPES
from nanovllm_kernels.experts.grouped_linear import GROUPED, down_tile
from nanovllm_kernels.experts.reference import expert_down
from nanovllm_kernels.experts.route_reference import ExpertRows

from tests.kernels.compiled import printed
from tests.kernels.test_triton_compiles import COMPILE

CPU = torch.device("cpu")
SIGNATURE = """
import torch
from nanovllm_kernels.experts.grouped_linear import compile_down
x, y = (torch.zeros(8, 16, dtype=torch.bfloat16) for _ in range(2))
weight, numbers = torch.zeros(3, 16, 16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
try:
    compile_down("bfloat16", (192, 128, 2, True))(x, weight, y, numbers, 66)
except ValueError as error:
    print(error)
"""
# The arguments are those of a launch: a tensor map of the weight, and aligned pointers and sizes.
GATE_UP = """
import triton
from nanovllm_kernels.experts.gated_experts import DEPTH, FEATURES, SHAPES, WARPS, gate_up_kernel
types = dict(weight=f"tensordesc<bf16[1,{FEATURES},2,{DEPTH}]>", x_TD="*bf16", y_XF="*bf16")
types |= dict.fromkeys("pair_of_X starts_E1 tile_expert_X tile_start_X".split(), "*i32")
for shape in SHAPES.values():
    sizes = dict(F=768, D=2048, ROWS=shape.rows, MORE=shape.more, STAGES=shape.stages)
    aligned = {*types, "x_stride"} - {"weight"}
    ptx = compiled(gate_up_kernel, types, WARPS, aligned, FEATURES=FEATURES, DEPTH=DEPTH, **sizes)
    print("m64n256" in ptx, ptx.count("cp.async.bulk.tensor.4d") > 2, "st.local" in ptx)
"""


def rows_of(starts_E1: torch.Tensor, pair_of_X: torch.Tensor) -> ExpertRows:
    """Return ExpertRows with only the fields that the compiled products read."""
    nothing = torch.empty(0)
    return ExpertRows(pair_of_X, nothing, starts_E1, nothing, nothing, nothing, tile=0)


def test_every_argument_is_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, in place of the compiled kernel, gets its arguments in the right order."""
    asked: list[object] = []

    def compile_down(name: str, sizes: tuple):
        asked.append((name, sizes))

        def run(y, weight, out, starts, num_clusters) -> None:
            assert num_clusters == 132 // sizes[2]
            out.copy_(in_float(expert_down)(y, weight, None, rows_of(starts, y), 0))

        return run

    monkeypatch.setattr(grouped_linear, "compile_down", compile_down)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for routed in (MoECase(20, 3, 7, 16, 24, first=1, num=4), MoECase(300, 1, 2, 8, 16)):
        args = routed.down(192, CPU)
        num_rows = int(args[3].starts_E1[-1])
        actual, expected = GROUPED.down(*args), in_float(expert_down)(*args)
        assert actual.dtype == torch.bfloat16 and actual.shape == expected.shape
        torch.testing.assert_close(
            actual[:num_rows].float(), expected[:num_rows], rtol=1e-2, atol=1e-3
        )
    assert asked == [("bfloat16", down_tile(15)), ("bfloat16", (192, 128, 2, True))]


def test_the_compiled_kernel_asks_for_these_arguments() -> None:
    said = "\n".join(printed(SIGNATURE))
    down = (
        "(y_XF: Tensor([n0, n1], bfloat16), down_EDF: Tensor([n2, n3, n1], bfloat16), "
        "y_XD: Tensor([n4, n5], bfloat16), starts_E1: Tensor([n6], int32), num_clusters: int32)"
    )
    assert down in said, said
    assert said.count("expected device_type=cuda") == 1


def test_gate_and_up_are_multiplied_by_large_instructions_in_registers() -> None:
    """The larger tile uses m64n256 instructions; both tiles use TMA and spill no registers.

    Tiles of 64 rows divide their 256 weight rows among two warp groups, so they use smaller ones.
    """
    compiled = "compiled gate_up_kernel True"
    expected = [compiled, "False True False", compiled, "True True False"]
    assert printed(COMPILE + GATE_UP) == expected


def test_it_is_for_many_rows_of_widths_that_can_be_copied() -> None:
    weight = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    assert [GROUPED.fits(num, weight(16, 64, 32)) for num in (192, 193)] == [False, True]
    assert [GROUPED.tile(num, 16) for num in (65, 1023, 1024)] == [64, 64, 192]
    assert {tile: shape.rows + shape.more for tile, shape in SHAPES.items()} == {64: 64, 192: 192}
    rows = [down_tile(num)[0] for num in (12, 63, 64, 111, 112, 255, 256, 10**6)]
    assert rows == [64, 64, 128, 128, 192, 192, 128, 128]
    assert not GROUPED.fits(193, weight(16, 64, 36))
    assert not GROUPED.fits(193, weight(16, 72, 32))
    assert not GROUPED.fits(193, torch.empty(16, 64, 32, device="meta"))
    assert [GROUPED.fits(num, weight(16, 64, 32)) for num in (2**26 - 1, 2**26)] == [True, False]
