"""Compilation and arguments of the CuTe DSL products of block-scaled fp8 numbers, without a GPU.

Their results are checked on a GPU only (check-kernels).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nanovllm_kernels.case import check
from nanovllm_kernels.fp8_reference import Quantised, Scaled
from nanovllm_kernels.products import block_fp8_cases, block_fp8_cute, quantise_cases
from nanovllm_kernels.products.block_fp8_cute import (
    EXPERT_TILES,
    GATED_EXPERT_TILES,
    GATED_TILES,
    TILES,
    Operands,
    Tile,
    block_fp8_experts,
    block_fp8_gated,
    block_fp8_gated_experts,
    block_fp8_linear,
    experts_tile_rows,
    obstacle,
    tile_of,
)
from nanovllm_kernels.ring_cute import in_order

from tests.kernels.compiled import compiled_with, printed

CPU = torch.device("cpu")
RESOURCES = """
    import subprocess
    from triton import knobs
    Path("binary").write_bytes(compiled.__cubin__)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", "binary"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(*[word for word in found.split() if word.startswith(("REG:", "STACK:", "LOCAL:"))])
"""
SIGNATURE = """
import torch
from nanovllm_kernels.products.block_fp8_cute import Operands, compile_tile
fp8, scales, y = (torch.zeros(16, 16, dtype=dtype) for dtype in (
    torch.float8_e4m3fn, torch.float32, torch.bfloat16))
for kind, given in (
    ((64, 64, 1, 128, False, False, False), Operands(scales, scales, y)),
    ((64, 256, 1, 128, False, False, True), Operands(scales, scales, fp8, y_scale=scales)),
):
    try:
        compile_tile(*kind)(fp8, fp8, given, 1)
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize(
    "kinds",
    [
        [(*tile, 128, False, False, False) for tile in TILES],
        [(256, 128, 2, 32, True, False, False), (64, 128, 1, 32, True, False, False)],
        [(*tile, 128, False, True, False) for tile in EXPERT_TILES.values()],
        [(*tile, n, False, False, True) for tile in GATED_TILES for n in (128, 32)],
        [(*tile, 128, False, True, True) for tile in GATED_EXPERT_TILES.values()],
    ],
    ids=["dense", "added, with many scales", "experts", "gated", "gated experts"],
)
def test_nothing_is_kept_in_local_memory(kinds: list[tuple[int, ...]], tmp_path: Path) -> None:
    """No kernel spills registers to local memory or has a stack.

    A block of three groups of four warps starts with at most 168 registers per thread.
    """
    lines = compiled_with("--keep-cubin", kinds, RESOURCES, tmp_path)
    assert len(lines) == len(kinds)
    for line in lines:
        registers, *memory = line.split()
        assert memory == ["STACK:0", "LOCAL:0"], line
        assert int(registers.removeprefix("REG:")) <= 255


def test_the_compiled_kernel_asks_for_these_arguments(tmp_path: Path) -> None:
    found = "\n".join(printed(SIGNATURE, tmp_path))
    assert "x: Tensor([n0, n1], float8_e4m3fn), weight: Tensor([n2, n1], float8_e4m3fn)" in found
    assert "Tensor([n7, n8], bfloat16), None, None, None, None, None], num_clusters: int32" in found
    of_gated = (
        "Tensor([n7, n8], float8_e4m3fn), None, None, None, None, Tensor([n9, n10], float32)]"
    )
    assert of_gated in found
    assert found.count("expected device_type=cuda") == 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Return the compiled kinds with their numbers of clusters. The reference replaces kernels."""
    found = []

    def compile_tile(*kind: object):
        def run(x, weight, given: Operands, num_clusters: int) -> None:
            found.append((*kind, num_clusters))
            sides = x, given.x_scale, weight, given.w_scale
            rows = SimpleNamespace(starts_E1=given.starts)
            if kind[6]:
                of, more = block_fp8_cases.gated_reference, (None, kind[3])
                if given.starts is not None:
                    of, more = block_fp8_cases.gated_experts_reference, (rows,)
                values_XF, scale_BX = of(*sides, *more)
                given.y[: len(values_XF)] = values_XF
                given.y_scale[:, : len(values_XF)] = scale_BX
            elif given.starts is None:
                added = given.y if kind[4] else None
                given.y.copy_(block_fp8_cases.reference(*sides, added, kind[3]))
            else:
                block_fp8_cases.experts_reference(*sides, rows, given.y)

        return run

    monkeypatch.setattr(block_fp8_cute, "compile_tile", compile_tile)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return found


@pytest.mark.parametrize("added", [False, True])
def test_a_product_is_of_what_the_numbers_stand_for(added: bool, asked: list) -> None:
    args = block_fp8_cases.inputs(
        5, 72, 144, torch.device("cpu"), added=added, block_rows=32, tile=Tile(64, 32)
    )
    x8_TD, x_scale_BT, w8_ND, w_scale, residual_TN, *_ = args
    before = 0.0 if residual_TN is None else residual_TN.float()
    y_TN = block_fp8_linear(*args)
    assert asked == [(64, 32, 1, 32, added, False, False, 132)]
    assert y_TN.dtype == torch.bfloat16
    assert (y_TN is residual_TN) is added
    expected_TN = torch.zeros(5, 72)
    for d in range(144):
        of_rows = w_scale[torch.arange(72) // 32, d // 128]
        x_T = x8_TD[:, d].float() * x_scale_BT[d // 128, :5]
        expected_TN += x_T[:, None] * (w8_ND[:, d].float() * of_rows)
    assert torch.allclose(y_TN.float(), expected_TN + before, rtol=0.01, atol=0.01)


def test_each_expert_multiplies_its_rows_and_no_other(asked: list) -> None:
    args = block_fp8_cases.experts_inputs((0, 3, 0, 70), 2, 136, 144, 64, torch.device("cpu"))
    x8_XD, x_scale_BX, w8_END, w_scale, rows, y_XN = args
    assert rows.starts_E1.tolist() == [0, 0, 3, 3, 73]
    assert rows.tile_expert_X[:3].tolist() == [1, 3, 3]
    assert rows.tile_start_X[:3].tolist() == [0, 3, 67]
    assert rows.num_tiles_1.tolist() == [3]
    assert block_fp8_experts(*args) is y_XN
    assert asked == [(64, 128, 1, 128, False, True, False, 10)]  # up to 5 tiles, two columns
    assert (y_XN[73:] == block_fp8_cases.UNWRITTEN).all()
    row_X = x8_XD[70].float() * x_scale_BX[:, 70].repeat_interleave(128)[:144]
    scale_ND = w_scale[3].repeat_interleave(128, 0).repeat_interleave(128, 1)[:136, :144]
    expected_N = (w8_END[3].float() * scale_ND) @ row_X
    assert torch.allclose(y_XN[70].float(), expected_N, rtol=0.01, atol=0.01)


def test_a_gated_product_is_quantised(asked: list) -> None:
    """A gated product returns e4m3 numbers and a scale of largest / 448 for each block.

    The last block of 160 features has 32. The second row is all zeros and has scale 1.
    """
    args = block_fp8_cases.inputs(5, 320, 144, CPU, block_rows=32, zeros=True)
    x8_TD, x_scale_BT, w8_ND, w_scale, *_ = args
    weight = Scaled(w8_ND, w_scale, 32)
    y_TF = block_fp8_gated(Quantised(x8_TD, x_scale_BT), weight, Tile(64, 256))
    assert asked == [(64, 256, 1, 32, False, False, True, 132)]
    assert (y_TF.values_XD.dtype, y_TF.scale_BX.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert y_TF.scale_BX.shape == (2, 5) and y_TF.scale_BX[:, 1].tolist() == [1.0, 1.0]
    row_D = x8_TD[3].float() * x_scale_BT[:, 3].repeat_interleave(128)[:144]
    scale_ND = w_scale.repeat_interleave(32, 0).repeat_interleave(128, 1)[:, :144]
    gate_F, up_F = ((w8_ND.float() * scale_ND) @ row_D).chunk(2)
    expected_F = gate_F / (1 + (-gate_F).exp()) * up_F
    for part in (slice(0, 128), slice(128, 160)):
        largest = float(expected_F[part].abs().max())
        assert float(y_TF.scale_BX[part.start // 128, 3]) == pytest.approx(largest / 448, rel=1e-4)
        error = (y_TF.dequantised()[3, part] - expected_F[part]).abs()
        assert float((error / (expected_F[part].abs() / 15 + largest * 2.0**-17)).max()) < 1


def test_each_expert_gates_its_rows(asked: list) -> None:
    args = block_fp8_cases.experts_inputs((0, 3, 0, 270), 2, 256, 144, 256, CPU)
    x8_XD, x_scale_BX, w8_END, w_scale, *_ = args
    y_XF = block_fp8_gated_experts(Quantised(*args[:2]), Scaled(*args[2:4]), args[4])
    assert asked == [(128, 256, 2, 128, False, True, True, 10)]
    row_X = x8_XD[270].float() * x_scale_BX[:, 270].repeat_interleave(128)[:144]
    scale_ND = w_scale[3].repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :144]
    gate_F, up_F = ((w8_END[3].float() * scale_ND) @ row_X).chunk(2)
    expected_F = torch.nn.functional.silu(gate_F) * up_F
    error = (y_XF.dequantised()[270] - expected_F).norm() / expected_F.norm()
    assert float(error) < 0.05


def test_cases_of_gates_pass_with_room_and_show_what_is_wrong() -> None:
    """The cases pass an intermediate rounding to 16 bits, and fail if gate and up are swapped."""

    def apart(x8, x_scale, w8, w_scale, residual, block_rows, tile) -> Quantised:
        product = block_fp8_cases.reference(x8, x_scale, w8, w_scale, None, block_rows)
        return quantise_cases.silu_mul_reference(product)

    def changed(x8, x_scale, w8, *more) -> Quantised:
        return apart(x8, x_scale, w8.view(torch.uint8).roll(len(w8) // 2, 0).view(w8.dtype), *more)

    kernel = block_fp8_cases.BLOCK_FP8_GATED
    for case in kernel.cases[:3]:
        assert 0.1 < check(replace(kernel, run=apart), case, CPU) < 0.9
        assert check(replace(kernel, run=changed), case, CPU) > 4
    kernel = replace(block_fp8_cases.EXPERTS_GATED, run=block_fp8_cases.gated_experts_reference)
    found = [check(kernel, case, CPU) for case in kernel.cases if not case.is_timed]
    assert found == [0.0] * 12


def test_words_of_four_threads_come_in_order() -> None:
    """Words of four threads are reordered so that each thread has 16 consecutive numbers.

    Thread i has the numbers 2i and 2i + 1 of each eight. Its word j is from eights 2j and 2j + 1.
    """
    given = np.arange(64, dtype=np.uint8).reshape(4, 2, 4, 2)  # of thread j, by eight, i and number
    for j in range(4):
        words = given[j].transpose(1, 0, 2).copy().reshape(4, 4).view(np.uint32).ravel()
        words = words.astype(np.int64)  # the word of each thread i
        in_order(words)
        found = (words & 0xFFFFFFFF).astype(np.uint32).view(np.uint8)
        assert found.tolist() == list(range(16 * j, 16 * j + 16))


def test_no_rows_no_launch(asked: list) -> None:
    args = block_fp8_cases.inputs(0, 16, 128, CPU)
    assert block_fp8_linear(*args).shape == (0, 16)
    y_TF = block_fp8_gated(Quantised(*args[:2]), Scaled(*args[2:4]))
    assert y_TF.values_XD.shape == (0, 8)
    assert asked == []


def test_tiles_that_gate_fill_the_card() -> None:
    assert [tile_of(rows, 24576, 132, gated=True) for rows in (64, 128, 8192)] == [
        Tile(64, 256),
        Tile(128, 256),
        Tile(128, 256, 2),
    ]


def test_tiles_fill_the_card() -> None:
    """Tiles for (rows, features of the weight) are chosen to fill 132 multiprocessors."""
    assert [
        tile_of(*size, 132)
        for size in (
            (8192, 6144),
            (8192, 24576),
            (8192, 4096),
            (1024, 4096),
            (64, 4096),
            (64, 6144),
        )
    ] == [
        *[Tile(256, 128, 2)] * 3,
        Tile(256, 128, 2),
        Tile(64, 32),
        Tile(64, 64),
    ]
    assert [experts_tile_rows(rows, 128) for rows in (8, 4095, 4096, 32767, 32768)] == [
        *(64, 64, 128, 128, 256)
    ]


def test_what_is_refused() -> None:
    assert obstacle(6144, 4096) is None
    assert obstacle(200, 144, 32) is None
    assert obstacle(200, 136) == "inputs must be a multiple of 16, and outputs of 8"
    assert obstacle(204, 144) == "inputs must be a multiple of 16, and outputs of 8"
    assert obstacle(6144, 4096, 16) == "a multiple of 32 rows must share a scale"


def test_a_case_is_for_every_tile() -> None:
    """Each tile has a case, with rows that do not fill it and numbers of both signs."""
    tiles = {case.inputs.keywords["tile"] for case in block_fp8_cases.BLOCK_FP8_LINEAR.cases[:21]}
    assert tiles == set(TILES)
