"""The CuTe DSL decode kernel without a GPU: it compiles for Hopper, and the warp that loads, run as
plain Python, brings every token of every row once, from its page, with the right notes.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import nanovllm_kernels
import numpy as np
import pytest
import torch

SOURCE = Path(nanovllm_kernels.__file__).parent / "paged_decode_cute.py"
COMPILE = """
from nanovllm_kernels.paged_decode_cute import PagedDecode, compile_decode
for shape in [(1, 64, 16), (2, 128, 128), (7, 64, 32), (16, 128, 64)]:
    print("compiled", *shape, callable(compile_decode(*shape)), PagedDecode(*shape).stages)
"""
BLOCK, PIECE = 64, 16


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    """In a process of its own: the architecture is read when the package is imported."""
    command = [
        "env",
        "CUTE_DSL_ARCH=sm_90a",
        "CUDA_VISIBLE_DEVICES=",
        "QUACK_CACHE_ENABLED=0",  # anew, not from the disk
        sys.executable,
        "-c",
        COMPILE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_it_compiles_for_every_form_of_group_width_and_page(compiled) -> None:
    assert [line.rsplit(" ", 1)[0] for line in compiled] == [
        "compiled 1 64 16 True",
        "compiled 2 128 128 True",
        "compiled 7 64 32 True",
        "compiled 16 128 64 True",
    ]


def test_the_ring_fills_shared_memory(compiled) -> None:
    """64 tokens are 32 KiB at width 128; the results of 16 heads take the room of two blocks."""
    assert [int(line.rsplit(" ", 1)[1]) for line in compiled] == [13, 6, 12, 4]


def test_its_cases_are_those_it_can_run() -> None:
    from nanovllm_kernels.paged_decode_cute import PAGED_DECODE_CUTE

    names = [case.name for case in PAGED_DECODE_CUTE.cases]
    assert len(names) == len(set(names)) and not any(case.small for case in PAGED_DECODE_CUTE.cases)
    assert sum(case.is_timed for case in PAGED_DECODE_CUTE.cases) == 10
    assert not [name for name in names if "256)" in name or " 80)" in name or "page=48" in name]


@pytest.mark.parametrize(
    ("page_tokens", "width", "dtype", "reason"),
    [
        (128, 128, torch.bfloat16, None),
        (16, 64, torch.bfloat16, None),
        (48, 128, torch.bfloat16, "pages must have 16, 32 or a multiple of 64 tokens"),
        (64, 256, torch.bfloat16, "it computes in bfloat16, with heads of width 64 or 128"),
        (64, 128, torch.float32, "it computes in bfloat16, with heads of width 64 or 128"),
    ],
)
def test_which_caches_it_is_for(
    page_tokens: int, width: int, dtype: torch.dtype, reason: str | None
) -> None:
    from nanovllm_kernels.paged_decode_cute import obstacle

    assert obstacle(page_tokens, width, dtype) == reason


def loader(**mocks: object) -> type:
    """The methods of the loading warp without the DSL's decorators, over plain numbers."""
    tree = ast.parse(SOURCE.read_text())
    device = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "PagedDecode")
    wanted = ("load", "pages_of", "copy_cells", "pieces_of")
    device.body = [n for n in device.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    for method in device.body:
        method.decorator_list = []
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    future = ast.parse("from __future__ import annotations").body
    scope = {"BLOCK": BLOCK, "PIECE": PIECE, "WARPS": 4, "HALF": 64, "READ_ONCE": 0, **mocks}
    scope |= {"Int32": int, "Int64": int}
    exec(compile(ast.Module([*future, *functions, device], []), str(SOURCE), "exec"), scope)
    return scope["PagedDecode"]


def shares(lengths: list[int], num_lanes: int) -> list[tuple[int, int, int]]:
    """Of each lane, as plan_kernel has it: its first row, its place there, its number of pieces."""
    line = np.cumsum([-(-length // PIECE) for length in lengths]).tolist()
    share, found = -(-line[-1] // num_lanes), []
    for lane in range(num_lanes):
        start = min(lane * share, line[-1])
        row = sum(end <= start for end in line)
        found.append((row, start - (line[row - 1] if row else 0), min(share, line[-1] - start)))
    return found


def loaded(lengths: list[int], page_tokens: int, num_lanes: int, lane: int) -> list[tuple]:
    """Of each block of a lane: its note, and {(token of the block, half): (page, token there)}."""
    copied: dict[int, dict] = defaultdict(dict)

    def copy(box: int, source: tuple, to: tuple, **_: object) -> None:
        (_, place, half, _, page), (_, nth, _, stage) = source, to
        for token in range(box):
            assert (nth * box + token, half) not in copied[stage]
            copied[stage][nth * box + token, half] = (page, place * box + token)

    def nothing(*_: object) -> None:
        pass

    device = loader(
        cutlass=SimpleNamespace(range_constexpr=range, min=np.minimum),
        cute=SimpleNamespace(size=len, copy=copy),
        arch=SimpleNamespace(
            block_idx=lambda: (0, lane, 0),
            lane_idx=lambda: np.arange(32),
            shuffle_sync=lambda values, thread: int(values[thread]),
            elect_one=nullcontext,
            griddepcontrol_wait=nothing,
            griddepcontrol_launch_dependents=nothing,
            mbarrier_arrive=nothing,
            mbarrier_arrive_and_expect_tx=nothing,
        ),
    )()
    device.width, device.page_tokens, device.unit = 128, page_tokens, min(BLOCK, page_tokens)
    device.pages_per_block = BLOCK // device.unit
    device.window = 32 // device.pages_per_block
    device.stages, device.q_bytes = 10**6, 0  # the ring does not come round
    device.copy_q = device.copy_first_q = nothing
    num_pages = -(-max(lengths) // page_tokens)
    table = 1000 * np.arange(len(lengths))[:, None] + np.arange(num_pages)
    lanes = np.array(shares(lengths, num_lanes))
    anything = type("Any", (), {"__getitem__": lambda self, at: at})()
    whole, pieces = ([(box, box, anything, anything)] for box in (device.unit, PIECE))
    notes: dict[tuple[int, int], int] = {}
    device.load(
        whole,
        pieces,
        SimpleNamespace(lanes=lanes, lengths=lengths, table=table, q=None),
        SimpleNamespace(full=0, notes=notes),
    )
    assert notes[0, len(copied)] == -1
    return [([int(notes[n, at]) for n in range(4)], copied[at]) for at in range(len(copied))]


@pytest.mark.parametrize(
    ("lengths", "page_tokens", "num_lanes"),
    [
        ([9000, 300], 128, 3),  # more pages than a warp's threads hold
        ([9000, 300], 16, 3),
        ([1, 130, 7, 64, 65, 1, 300, 17, 128] * 9, 32, 5),
        ([1, 130, 7, 64, 65, 1, 300, 17, 128], 64, 60),  # more lanes than pieces
        ([1024] * 4, 128, 16),
    ],
)
def test_every_token_is_loaded_once_from_its_page(lengths, page_tokens, num_lanes) -> None:
    seen = [np.zeros((length, 2), int) for length in lengths]
    lanes_of, marks, noted = defaultdict(list), defaultdict(list), {}
    for lane in range(num_lanes):
        for (row, end, flags, ends), copied in loaded(lengths, page_tokens, num_lanes, lane):
            begin = min(copied)[0]
            assert begin == flags // 4 * PIECE and max(copied)[0] // PIECE == (end - 1) // PIECE
            page, at = copied[begin, 0]
            start = page % 1000 * page_tokens + at - begin  # of the block in its row
            assert start % BLOCK == 0
            for (token, half), where in copied.items():
                page, at = divmod(start + token, page_tokens)
                assert where == (1000 * row + page, at)
                if token < end:
                    seen[row][start + token, half] += 1
            lanes_of[row].append(lane)
            marks[row, lane].append(flags & 3)
            assert noted.setdefault(row, ends) == ends
    assert all((count == 1).all() for count in seen)
    for row, lanes in lanes_of.items():
        assert (noted[row] & 0xFFFF, noted[row] >> 16) == (lanes[0], lanes[-1])
    for each in marks.values():
        assert [mark & 1 for mark in each] == [1] + [0] * (len(each) - 1)
        assert [mark & 2 for mark in each] == [0] * (len(each) - 1) + [2]
