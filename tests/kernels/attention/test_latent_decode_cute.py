"""The CuTe DSL decode kernel of latents without a GPU: its compilation and its data layout."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import nanovllm_kernels
import numpy as np
import pytest
import torch

from tests.kernels.compiled import printed

SOURCE = Path(nanovllm_kernels.__file__).parent / "attention" / "latent_decode_cute.py"
BLOCK = 64

COMPILE = """
from nanovllm_kernels.attention.latent_decode_cute import LatentDecode, compile_decode
for shape in [(16, 128, 0), (32, 16, 3), (128, 64, 4)]:
    decode = LatentDecode(*shape)
    print("compiled", *shape, callable(compile_decode(*shape)), decode.tiles, decode.cluster)
"""


def test_it_compiles_for_every_form_of_heads_page_and_width() -> None:
    assert printed(COMPILE) == [
        "compiled 16 128 0 True 1 1",
        "compiled 32 16 3 True 2 2",
        "compiled 128 64 4 True 8 2",
    ]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({}, None),
        ({"num_heads": 32, "page_tokens": 16}, None),
        ({"num_heads": 128, "page_tokens": 64}, None),
        ({"page_tokens": 48}, "pages must have 16, 32 or a multiple of 64 tokens"),
        ({"num_heads": 8}, "heads must be 16, 32 or a multiple of 64"),
        ({"num_heads": 48}, "heads must be 16, 32 or a multiple of 64"),
        ({"num_heads": 96}, "heads must be 16, 32 or a multiple of 64"),
        ({"rank": 256}, "latents must have 512 numbers, and 64 beside them"),
        ({"dtype": torch.float32}, "it computes in bfloat16, of a cache of the same"),
        ({"is_fp8": True}, "it computes in bfloat16, of a cache of the same"),
    ],
)
def test_which_caches_it_is_for(other: dict, reason: str | None) -> None:
    from nanovllm_kernels.attention.latent_decode_cute import obstacle

    known = {"num_heads": 16, "rank": 512, "rotated": 64, "page_tokens": 128, "is_fp8": False}
    assert obstacle(**{"dtype": torch.bfloat16, **known, **other}) == reason


def test_its_cases_are_those_it_can_run() -> None:
    from nanovllm_kernels.attention.cute_cases import LATENT_DECODE_CUTE

    cases = LATENT_DECODE_CUTE.cases
    names = [case.name for case in cases]
    assert len(names) == len(set(names)) == 25 and not any(case.small for case in cases)
    assert sum(case.is_timed for case in cases) == 13
    assert all(any(f" W={width}" in name for name in names) for width in (2, 3, 4))
    assert not [name for name in names if "fp8" in name or ", 1, 576)" not in name]


def test_a_groups_columns_are_every_other_ones() -> None:
    """The columns of two groups are runs of 32 and cover all 512."""
    from nanovllm_kernels.attention.latent_decode_cute import column_of

    columns = [[column_of(group, part) for part in range(8)] for group in range(2)]
    assert columns[0] == [0, 32, 64, 96, 256, 288, 320, 352]
    assert columns[1] == [128, 160, 192, 224, 384, 416, 448, 480]


PARTS = 3  # parts of a block, with a barrier each
CONSTANTS = {"BLOCK": BLOCK, "STAGES": 2, "PARTS": PARTS, "PAIRS": 64, "LINES": 8, "WIDTH": 576}
FLAGS = {"BEGINS": 1, "ENDS": 2, "WHOLE": 4, "BEGAN": 8}
LINES = {"q": 8, "q_rotated": 1, "latents": 8, "rotated": 1}  # rows of 64 numbers


@functools.cache
def plain_source() -> CodeType:
    """Return the code of the loading warp's methods, without the DSL's decorators."""
    tree = ast.parse(SOURCE.read_text())
    device = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "LatentDecode")
    wanted = ("load", "pages_of", "queries_of", "copy_q", "copy_block")
    device.body = [n for n in device.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    for method in device.body:
        method.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    return compile(ast.Module([*future, device], []), str(SOURCE), "exec")


def loader(**mocks: object) -> type:
    """Return a class with the loading warp's methods."""
    scope = {**CONSTANTS, **FLAGS, "READ_ONCE": 0, "Int16": int, "Int32": int, "Int64": int}
    scope |= {**mocks, "Note": namedtuple("Note", "query count seen tokens flags")}
    scope["next_stage"] = lambda at, phase, stages: ((at + 1) % stages, phase ^ (at + 1 == stages))
    exec(plain_source(), scope)
    return scope["LatentDecode"]


class At(NamedTuple):
    """A mock of a copied tensor. Indexing returns the place."""

    lines: int

    def __getitem__(self, at: tuple) -> tuple:
        return at


class Loaded:
    """Everything that a kernel loads for one lane of the plan and one tile.

    A row is (tokens, new tokens among them), a kind is (heads, tokens of a page, most new tokens).
    Records each block's note and {token: (page, token in it)}, and {query: place of its first pair}
    for each row. Also records the waits, and the expected and copied bytes of queries.
    """

    def __init__(self, rows: list, kind: tuple[int, int, int], lane: list, tile: int) -> None:
        self.heads, self.page_tokens, self.most_new = kind
        self.tile, self.unit, self.box_heads = tile, min(BLOCK, kind[1]), min(64, kind[0])
        self.lines: dict[int, dict] = defaultdict(dict)
        self.queries: list[dict[int, int]] = []
        self.waits: list[tuple[object, int]] = []
        self.notes: dict[tuple[int, int], int] = {}
        self.made: list[int] = []
        self.q_bytes = self.q_copied = 0
        lengths = [length for length, _ in rows]
        starts = [*accumulate((new for _, new in rows), initial=0)]
        pages = np.arange(-(-max(lengths) // self.page_tokens))
        table = 1000 * np.arange(len(rows))[:, None] + pages
        given = SimpleNamespace(lanes=np.array([lane]), lengths=lengths, starts=starts, table=table)
        barriers = SimpleNamespace(full=0, empty=0, q_full="q_full", q_empty="q_empty")
        shared = SimpleNamespace(**{name: name for name in LINES}, **vars(barriers), notes=self)
        self.device().load((None,) * 3, given, shared)
        assert self.notes[0, len(self.made) - 1] == -1

    def device(self) -> Any:
        arch = SimpleNamespace(
            block_idx=lambda: (self.tile, 0, 0),
            lane_idx=lambda: np.arange(32),
            shuffle_sync=lambda values, thread: int(values[thread]),
            elect_one=nullcontext,
            griddepcontrol_wait=lambda: self.waits.append(("before", len(self.made))),
            griddepcontrol_launch_dependents=lambda: None,
            mbarrier_arrive=lambda _: self.made.append(0),
            mbarrier_wait=lambda barrier, phase: self.waits.append((barrier, int(phase))),
            mbarrier_arrive_and_expect_tx=self.expect,
        )
        plain = {"range_constexpr": range, "const_expr": bool}
        cutlass = SimpleNamespace(min=np.minimum, max=np.maximum, **plain)
        cute = SimpleNamespace(size=lambda x, **_: getattr(x, "lines", 0) or len(x), copy=self.copy)
        device = loader(cutlass=cutlass, cute=cute, arch=arch)()
        device.num_heads, device.ragged, device.tiles = self.heads, self.most_new > 0, 1
        device.page_tokens, device.unit, device.cluster = self.page_tokens, self.unit, 1
        device.units = BLOCK // self.unit
        device.window, device.box_heads = 32 // device.units, self.box_heads
        device.boxes = min(64 // self.box_heads, max(1, self.most_new))
        device.ways = (None,) * 3
        device.partition = lambda box, way, rings: (None, [(At(LINES[x]),) * 2 for x in rings])
        return device

    def __setitem__(self, at: tuple, value: object) -> None:
        """Store a note."""
        self.notes[at[0], len(self.made)] = int(value)

    def expect(self, barrier: object, count: int) -> None:
        if barrier == "q_full":
            self.queries.append({})
            self.q_bytes += int(count)
        elif barrier % PARTS == 0:
            self.made.append(PARTS * int(count))

    def copy(self, _: object, source: tuple, to: tuple, tma_bar_ptr: object, **__: object) -> None:
        if tma_bar_ptr == "q_full":
            (_, at, _, query), n = source, to[1]
            assert at == self.tile % max(1, self.heads // 64)
            self.queries[-1].setdefault(query, n * self.box_heads)
            self.q_copied += self.box_heads * 64 * 2
            return
        (_, at, part, page), nth, block = source, to[1], len(self.made) - 1
        assert tma_bar_ptr == block % 2 * PARTS + part // (9 // PARTS)
        for token in range(self.unit):
            key = nth * self.unit + token, part
            assert key not in self.lines[block]
            self.lines[block][key] = page, at * self.unit + token

    @property
    def blocks(self) -> Iterator[tuple[list[int], dict[int, tuple[int, int]]]]:
        for nth in range(len(self.made) - 1):
            found: dict[int, tuple[int, int]] = {}
            for (token, _), where in self.lines[nth].items():
                assert found.setdefault(token, where) == where
            assert len(self.lines[nth]) == 9 * len(found)
            assert self.made[nth] == len(found) * 2 * 576
            yield [self.notes[n, nth] for n in range(5)], found


def lanes_of(rows: list[tuple[int, int]], num_lanes: int) -> list[list[int]]:
    """Return for each lane, as plan_kernel does, its first row, its place there and its blocks."""
    line = np.cumsum([-(-length // BLOCK) for length, _ in rows]).tolist()
    share, found = -(-line[-1] // num_lanes), []
    for lane in range(num_lanes):
        start = min(lane * share, line[-1])
        row = sum(end <= start for end in line)
        found.append([row, start - (line[row - 1] if row else 0), min(share, line[-1] - start)])
    return found


ROWS = [(1, 1), (130, 3), (7, 2), (64, 4), (65, 4), (1, 1), (300, 0), (17, 2), (128, 4), (0, 0)]


@pytest.mark.parametrize("num_lanes", [1, 3, 60])
@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (ROWS, (16, 64, 4)),
        (ROWS, (32, 16, 4)),
        (ROWS, (64, 32, 4)),
        (ROWS, (128, 128, 4)),
        ([(length, 1) for length, _ in ROWS[:-1]], (32, 128, 0)),
        ([(9000, 1), (300, 1)], (128, 16, 0)),  # more pages than the threads of a warp hold
        ([(9000, 1), (300, 1)], (16, 64, 0)),
    ],
)
def test_every_token_is_loaded_once_from_its_page_with_its_queries(rows, kind, num_lanes) -> None:
    heads, page_tokens, most_new = kind
    tiles = -(-heads * max(1, most_new) // 64)
    starts = [*accumulate((new for _, new in rows), initial=0)]
    for tile in {0, tiles - 1}:
        seen = [np.zeros(length, int) for length, _ in rows]
        for lane in lanes_of(rows, num_lanes):
            found = Loaded(rows, kind, lane, tile)
            nth, began = -1, 0
            blocks = [*found.blocks]
            for at, ((query, count, visible, tokens, flags), copied) in enumerate(blocks):
                page, within = copied[0]
                row, start = page // 1000, page % 1000 * page_tokens + within
                length, new = rows[row]
                assert (query, count, tokens) == (starts[row], new, length - start)
                assert visible == length - new + 1 - start
                for token, (page, within) in copied.items():
                    where = divmod(start + token, page_tokens)
                    assert (page - 1000 * row, within) == where
                    if token < tokens:
                        seen[row][start + token] += 1
                began = start if flags & 1 else began
                nth += flags & 1
                assert flags & 1 == (at == 0 or start == 0)
                assert (flags & 2 > 0) == (at == len(blocks) - 1 or tokens <= BLOCK)
                assert (flags & 4 > 0) == (tokens <= BLOCK and began == 0)
                assert (flags & 8 > 0) == (began == 0)
                pairs = {n: n * heads - 64 * tile for n in range(count)}
                expected = {n: max(0, pair) for n, pair in pairs.items() if -heads < pair < 64}
                assert found.queries[nth] == {query + n: pair for n, pair in expected.items()}
            assert len(found.queries) == nth + 1
            assert found.q_bytes == found.q_copied
            assert [x for x in found.waits if x[0] == "q_empty"] == [
                ("q_empty", n % 2) for n in range(nth)
            ]
        assert all((count == 1).all() for count in seen)


def test_old_tokens_are_loaded_before_the_kernel_before_is_done() -> None:
    """Up to two blocks without new tokens are loaded before the wait for the previous kernel."""
    for length, new, start, early in [
        (300, 1, 0, 2), (130, 1, 1, 1), (130, 3, 1, 0), (64, 1, 0, 0), (65, 1, 0, 1), (128, 4, 0, 1)
    ]:  # fmt: skip
        found = Loaded([(length, new)], (16, 64, 4), [0, start, -(-length // 64) - start], 0)
        assert [n for name, n in found.waits if name == "before"] == [early], (length, new, start)
