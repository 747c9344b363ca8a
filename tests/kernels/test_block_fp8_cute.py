"""Products of block-scaled fp8 numbers in CuTe DSL, as far as they go without a GPU.

What they compute is checked on a GPU only (check-kernels).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nanovllm_kernels import block_fp8_cases, block_fp8_cute
from nanovllm_kernels.block_fp8_cute import (
    TILES,
    Given,
    Tile,
    block_fp8_experts,
    block_fp8_linear,
    experts_tile_rows,
    obstacle,
    tile_of,
)

from nanovllm.runner.precompile import HOPPER

RESOURCES = """
import subprocess, sys
from pathlib import Path
from cutlass import cute
from nanovllm_kernels import block_fp8_cute
from triton import knobs

compile_any = cute.compile
cute.compile = lambda *a, options, **b: compile_any(*a, options=options + " --keep-cubin", **b)
for kind in {kinds}:
    compiled = block_fp8_cute.compile_tile.compiles(*kind)
    Path("binary").write_bytes(compiled.__cubin__)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", "binary"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(*[word for word in found.split() if word.startswith(("REG:", "STACK:", "LOCAL:"))])
"""
SIGNATURE = """
import torch
from nanovllm_kernels.block_fp8_cute import Given, compile_tile
fp8, scales, y = (torch.zeros(16, 16, dtype=dtype) for dtype in (
    torch.float8_e4m3fn, torch.float32, torch.bfloat16))
try:
    compile_tile(64, 64, 1, 128, False, False)(fp8, fp8, Given(scales, scales, y, *[None] * 4), 1)
except ValueError as error:
    print(error)
"""


def printed(code: str, folder: Path) -> list[str]:
    """By a process of its own: the architecture is read when the package is imported."""
    command = [*HOPPER, sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "kinds",
    [
        [(*tile, 128, False, False) for tile in TILES],
        [(256, 128, 2, 32, True, False), (64, 128, 1, 32, True, False)],
        [(*tile, 128, False, True) for tile in block_fp8_cute.EXPERT_TILES.values()],
    ],
    ids=["dense", "added, with many scales", "experts"],
)
def test_nothing_is_kept_in_local_memory(kinds: list[tuple[int, ...]], tmp_path: Path) -> None:
    """A block of three groups of four warps starts with at most 168 registers a thread."""
    lines = printed(RESOURCES.format(kinds=kinds), tmp_path)
    assert len(lines) == len(kinds)
    for line in lines:
        registers, *memory = line.split()
        assert memory == ["STACK:0", "LOCAL:0"], line
        assert int(registers.removeprefix("REG:")) <= 255


def test_the_compiled_kernel_asks_for_these_arguments(tmp_path: Path) -> None:
    found = "\n".join(printed(SIGNATURE, tmp_path))
    assert "x: Tensor([n0, n1], float8_e4m3fn), weight: Tensor([n2, n1], float8_e4m3fn)" in found
    assert "Tensor([n7, n8], bfloat16), None, None, None, None], num_clusters: int32" in found
    assert "expected device_type=cuda" in found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What was compiled, and for how many clusters: the definition stands in for the kernels."""
    found = []

    def compile_tile(*kind: object):
        def run(x, weight, given: Given, num_clusters: int) -> None:
            found.append((*kind, num_clusters))
            sides = x, given.x_scale, weight, given.w_scale
            if given.starts is None:
                added = given.y if kind[4] else None
                given.y.copy_(block_fp8_cases.reference(*sides, added, kind[3]))
            else:
                rows = SimpleNamespace(starts_E1=given.starts)
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
    assert asked == [(64, 32, 1, 32, added, False, 132)]
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
    assert asked == [(64, 128, 1, 128, False, True, 10)]  # at most 5 tiles, of two columns
    assert (y_XN[73:] == block_fp8_cases.UNWRITTEN).all()
    row_X = x8_XD[70].float() * x_scale_BX[:, 70].repeat_interleave(128)[:144]
    scale_ND = w_scale[3].repeat_interleave(128, 0).repeat_interleave(128, 1)[:136, :144]
    expected_N = (w8_END[3].float() * scale_ND) @ row_X
    assert torch.allclose(y_XN[70].float(), expected_N, rtol=0.01, atol=0.01)


def test_no_rows_no_launch(asked: list) -> None:
    args = block_fp8_cases.inputs(0, 16, 128, torch.device("cpu"))
    assert block_fp8_linear(*args).shape == (0, 16)
    assert asked == []


def test_tiles_fill_the_card() -> None:
    """Rows and columns of the weight, on 132 multiprocessors."""
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
    """Each with rows that do not fill it, and numbers of every sign."""
    tiles = {case.inputs.keywords["tile"] for case in block_fp8_cases.BLOCK_FP8_LINEAR.cases[:21]}
    assert tiles == set(TILES)
