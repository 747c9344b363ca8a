"""The CuTe DSL decode kernel without a GPU.

It compiles for Hopper. Its loading warp, run as plain Python, loads every token of every row once,
from its page, with the right notes.
"""

from __future__ import annotations

import ast
import functools
import math
from collections import defaultdict
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import NamedTuple

import nanovllm_kernels
import numpy as np
import pytest
import torch

from tests.kernels.compiled import printed

SOURCE = Path(nanovllm_kernels.__file__).parent / "attention" / "paged_decode_cute.py"
COMPILE = """
from nanovllm_kernels.attention.paged_decode_cute import PagedDecode, compile_decode
one = [(1, 64, 16, 0), (2, 128, 128, 0), (7, 64, 32, 0), (16, 128, 64, 0)]
several = [(4, 128, 128, 4), (2, 128, 128, 8), (7, 64, 32, 2), (16, 64, 16, 1)]
for shape in one + several:
    print("compiled", *shape, callable(compile_decode(*shape)), PagedDecode(*shape).stages)
for shape in [(6, 128, 128, 0), (16, 64, 16, 0), (4, 128, 64, 4)]:
    decode = PagedDecode(*shape, is_fp8=True)
    print("compiled", *shape, callable(compile_decode(*shape, True)), decode.stages)
"""
BLOCK, PIECE = 64, 16


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    return printed(COMPILE, QUACK_CACHE_ENABLED="0")  # compiled, not read from the disk cache


def test_it_compiles_for_every_form_of_group_width_and_page(compiled) -> None:
    assert [line.rsplit(" ", 1)[0] for line in compiled] == [
        "compiled 1 64 16 0 True",
        "compiled 2 128 128 0 True",
        "compiled 7 64 32 0 True",
        "compiled 16 128 64 0 True",
        "compiled 4 128 128 4 True",
        "compiled 2 128 128 8 True",
        "compiled 7 64 32 2 True",
        "compiled 16 64 16 1 True",
        "compiled 6 128 128 0 True",  # 8-bit caches from here on
        "compiled 16 64 16 0 True",
        "compiled 4 128 64 4 True",
    ]


def test_the_ring_fills_shared_memory(compiled) -> None:
    """The ring has all stages that fit in shared memory.

    64 tokens take 32 KiB at width 128, or 16 KiB in 8 bits. The results of 16 pairs take the room
    of two blocks.
    """
    stages = [int(line.rsplit(" ", 1)[1]) for line in compiled]
    assert stages == [13, 6, 12, 4, 4, 4, 10, 10, 11, 16, 7]


def test_its_cases_are_those_it_can_run() -> None:
    from nanovllm_kernels.attention.cute_cases import PAGED_DECODE_CUTE

    names = [case.name for case in PAGED_DECODE_CUTE.cases]
    assert len(names) == len(set(names)) and not any(case.small for case in PAGED_DECODE_CUTE.cases)
    assert sum(case.is_timed for case in PAGED_DECODE_CUTE.cases) == 32
    assert all(any(f" W={width}" in name for name in names) for width in (1, 2, 4, 8))
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
    from nanovllm_kernels.attention.paged_decode_cute import obstacle

    assert obstacle(page_tokens, width, dtype) == reason


WANTED = ("load", "pages_of", "queries_of", "copy_tokens", "mask_new_tokens", "pieces_of")


@functools.cache
def plain_source() -> CodeType:
    """Return the code of the loading warp's methods, without the DSL's decorators."""
    tree = ast.parse(SOURCE.read_text())
    device = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "PagedDecode")
    device.body = [n for n in device.body if isinstance(n, ast.FunctionDef) and n.name in WANTED]
    for method in device.body:
        method.decorator_list = []
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in WANTED]
    future = ast.parse("from __future__ import annotations").body
    return compile(ast.Module([*future, *functions, device], []), str(SOURCE), "exec")


def loader(**mocks: object) -> type:
    """Return a class with the loading warp's methods."""
    scope = {"BLOCK": BLOCK, "PIECE": PIECE, "WARPS": 4, "HALF": 64, "READ_ONCE": 0, **mocks}
    scope |= {"Int32": int, "Int64": int, "Float32": float}
    scope["next_stage"] = lambda at, phase, stages: ((at + 1) % stages, phase ^ (at + 1 == stages))
    exec(plain_source(), scope)
    return scope["PagedDecode"]


def shares(lengths: list[int], num_lanes: int) -> list[tuple[int, int, int]]:
    """Return for each lane, as plan_kernel does, its first row, its place there and its pieces."""
    line = np.cumsum([-(-length // PIECE) for length in lengths]).tolist()
    share, found = -(-line[-1] // num_lanes), []
    for lane in range(num_lanes):
        start = min(lane * share, line[-1])
        row = sum(end <= start for end in line)
        found.append((row, start - (line[row - 1] if row else 0), min(share, line[-1] - start)))
    return found


class Loaded(NamedTuple):
    """Everything that a lane loads.

    For each block, this is its note and {(token of the block, half): (page, token in it)}. Queries
    are those of the first row, and {block: (first, number)} for later rows. Also has the expected
    bytes of each block, and the number of blocks before the wait for the previous kernel.
    """

    blocks: list[tuple[list[int], dict]]
    first_queries: tuple[int, int]
    queries: dict[int, tuple[int, int]]
    num_bytes: list[int]
    early: int


def loaded(
    lengths: list[int], page_tokens: int, num_lanes: int, lane: int, starts: list[int] | None = None
) -> Loaded:
    copied: dict[int, dict] = defaultdict(dict)
    num_bytes: list[int] = []
    queries: dict[int, tuple[int, int]] = {}
    waited: list[int] = []
    first: list[tuple[int, int]] = []

    def copy(box: int, source: tuple, to: tuple, **_: object) -> None:
        (_, place, half, _, page), (_, nth, _, stage) = source, to
        for token in range(box):
            assert (nth * box + token, half) not in copied[stage]
            copied[stage][nth * box + token, half] = (page, place * box + token)

    def nothing(*_: object) -> None:
        pass

    device = loader(
        cutlass=SimpleNamespace(range_constexpr=range, min=np.minimum, const_expr=bool),
        cute=SimpleNamespace(size=len, copy=copy),
        arch=SimpleNamespace(
            block_idx=lambda: (0, lane, 0),
            lane_idx=lambda: np.arange(32),
            shuffle_sync=lambda values, thread: int(values[thread]),
            elect_one=nullcontext,
            griddepcontrol_wait=lambda: waited.append(len(copied)),
            griddepcontrol_launch_dependents=nothing,
            mbarrier_arrive=nothing,
            mbarrier_arrive_and_expect_tx=lambda _, count: num_bytes.append(int(count)),
        ),
    )()
    device.stored, device.line = 128, 64
    device.page_tokens, device.unit = page_tokens, min(BLOCK, page_tokens)
    device.pages_per_block = BLOCK // device.unit
    device.window = 32 // device.pages_per_block
    device.stages, device.q_bytes = 10**6, 1  # the ring never wraps
    device.ragged = starts is not None
    device.copy_q = lambda q, shared, stage, *row: queries.update({stage: row})
    device.copy_first_q = lambda q, shared, *row: first.append(row)
    num_pages = -(-max(lengths) // page_tokens)
    table = 1000 * np.arange(len(lengths))[:, None] + np.arange(num_pages)
    lanes = np.array(shares(lengths, num_lanes))
    anything = type("Any", (), {"__getitem__": lambda self, at: at})()
    whole, pieces = ([(box, box, anything, anything)] for box in (device.unit, PIECE))
    notes: dict[tuple[int, int], int] = {}
    device.load(
        whole,
        pieces,
        SimpleNamespace(lanes=lanes, lengths=lengths, starts=starts, table=table, q=None),
        SimpleNamespace(full=0, notes=notes),
    )
    assert notes[0, len(copied)] == -1 and len(waited) == len(first) == 1
    num_notes = 6 if starts else 4
    blocks = [
        ([int(notes[n, at]) for n in range(num_notes)], copied[at]) for at in range(len(copied))
    ]
    return Loaded(blocks, first[0], queries, num_bytes, waited[0])


LOADS = pytest.mark.parametrize(
    ("lengths", "page_tokens", "num_lanes"),
    [
        ([9000, 300], 128, 3),  # more pages than the threads of a warp hold
        ([9000, 300], 16, 3),
        ([1, 130, 7, 64, 65, 1, 300, 17, 128] * 9, 32, 5),
        ([1, 130, 7, 64, 65, 1, 300, 17, 128], 64, 60),  # more lanes than pieces
        ([1024] * 4, 128, 16),
    ],
)


@LOADS
def test_every_token_is_loaded_once_from_its_page(lengths, page_tokens, num_lanes) -> None:
    seen = [np.zeros((length, 2), int) for length in lengths]
    lanes_of, marks, noted = defaultdict(list), defaultdict(list), {}
    for lane in range(num_lanes):
        for (row, end, flags, ends), copied in loaded(lengths, page_tokens, num_lanes, lane).blocks:
            begin = min(copied)[0]
            assert begin == flags // 4 * PIECE and max(copied)[0] // PIECE == (end - 1) // PIECE
            page, at = copied[begin, 0]
            start = page % 1000 * page_tokens + at - begin  # the block's start in its row
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


@LOADS
def test_rows_of_several_tokens_bring_their_queries(lengths, page_tokens, num_lanes) -> None:
    """A lane loads the tokens as for rows of one token, and the queries of each of its rows once.

    Only old tokens are loaded before the wait for the previous kernel.
    """
    new = [min(row % 5, length) for row, length in enumerate(lengths)]
    starts = [*accumulate([*new, 0, 0], initial=0)]
    told = {}
    for lane in range(num_lanes):
        plain = loaded(lengths, page_tokens, num_lanes, lane)
        found = loaded([*lengths, 0, 0], page_tokens, num_lanes, lane, starts)
        assert len(found.blocks) == len(plain.blocks)
        brought, row = found.first_queries, -1
        for nth, ((note, copied), (known, same)) in enumerate(
            zip(found.blocks, plain.blocks, strict=True)
        ):
            assert copied == same and note[1:4] == known[1:4]
            if known[0] != row:  # the lane's first block of the row
                row = known[0]
                assert (nth in found.queries) == (nth > 0)
                brought = found.queries.get(nth, brought)
                assert brought == (starts[row], new[row])
                told[row] = brought
            length, count = lengths[row], new[row]
            token = min(copied)
            start = (copied[token][0] % 1000) * page_tokens + copied[token][1] - token[0]
            assert note[0] == starts[row] and note[4:] == [count, length - count - start]
            assert found.num_bytes[nth] == len(copied) // 2 * 4 * 128 + count * (
                nth in found.queries
            )
            if nth < found.early:
                assert start + note[1] <= length - count
    assert told == {row: (starts[row], count) for row, count in enumerate(new)}


@pytest.mark.parametrize("group", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("own", [-9, -1, 0, 3, 14, 15, 40])
def test_a_query_sees_what_comes_before_it(group, own) -> None:
    """Scores of tokens after a query are -inf.

    In the accumulator a thread has 8 scores: two pairs at four tokens each.
    """
    at: list[int] = []
    device = loader(
        cutlass=SimpleNamespace(
            range_constexpr=range, select_=lambda is_so, one, other: one if is_so else other
        ),
        arch=SimpleNamespace(lane_idx=lambda: at[-1]),
        math=math,
    )()
    device.group = group
    for thread in range(32):
        at.append(thread)
        scores = [0.0] * 8
        device.mask_new_tokens(scores, own)
        for n, score in enumerate(scores):
            pair = thread // 4 + (8 if n in (2, 3, 6, 7) else 0)
            token = thread % 4 * 2 + n % 2 + (8 if n >= 4 else 0)
            # All queries see the first of their own tokens, all but the first see the next, etc.
            assert score == (0.0 if token - own <= pair // group else -math.inf), (thread, n)
