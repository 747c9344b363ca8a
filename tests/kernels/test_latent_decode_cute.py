"""The decode kernel of latents without a GPU: it compiles for Hopper, and what its threads hold is
where they say.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict, namedtuple
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import nanovllm_kernels
import numpy as np
import pytest
import torch

SOURCE = Path(nanovllm_kernels.__file__).parent / "latent_decode_cute.py"
BLOCK = 64

COMPILE = """
from nanovllm_kernels.latent_decode_cute import compile_decode, num_tiles
for shape in [(16, 128, 0), (32, 16, 3), (64, 32, 2), (128, 64, 4)]:
    print("compiled", *shape, callable(compile_decode(*shape)), num_tiles(shape[0], shape[2] or 1))
"""


def test_it_compiles_for_every_form_of_heads_page_and_width() -> None:
    """In a process of its own: the architecture is read when the package is imported."""
    variables = ["CUTE_DSL_ARCH=sm_90a", "CUDA_VISIBLE_DEVICES="]
    command = ["env", *variables, sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [
        "compiled 16 128 0 True 1",
        "compiled 32 16 3 True 2",
        "compiled 64 32 2 True 2",
        "compiled 128 64 4 True 8",
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
    from nanovllm_kernels.latent_decode_cute import obstacle

    known = {"num_heads": 16, "rank": 512, "rotated": 64, "page_tokens": 128, "is_fp8": False}
    assert obstacle(**{"dtype": torch.bfloat16, **known, **other}) == reason


def test_its_cases_are_those_it_can_run() -> None:
    from nanovllm_kernels.latent_decode_cute_cases import LATENT_DECODE_CUTE

    names = [case.name for case in LATENT_DECODE_CUTE.cases]
    assert len(names) == len(set(names)) and not any(
        case.small for case in LATENT_DECODE_CUTE.cases
    )
    assert sum(case.is_timed for case in LATENT_DECODE_CUTE.cases) == 12
    assert all(any(f" W={width}" in name for name in names) for width in (2, 3, 4))
    assert not [name for name in names if "fp8" in name or "512+64" not in name]


def test_a_groups_columns_are_every_other_ones() -> None:
    """32 at a time; two groups have all 512."""
    from nanovllm_kernels.latent_decode_cute import column_of

    columns = [[column_of(group, part) for part in range(8)] for group in range(2)]
    assert columns[0] == [0, 32, 64, 96, 256, 288, 320, 352]
    assert columns[1] == [128, 160, 192, 224, 384, 416, 448, 480]


def loader(**mocks: object) -> type:
    """The methods of the loading warp without the DSL's decorators, over plain numbers."""
    tree = ast.parse(SOURCE.read_text())
    device = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "LatentDecode")
    wanted = ("load", "pages_of", "queries_of", "copy_q", "copy_block")
    device.body = [n for n in device.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    for method in device.body:
        method.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    scope = {
        "BLOCK": BLOCK,
        "STAGES": 2,
        "PARTS": 3,
        "PAIRS": 64,
        "LINES": 8,
        "WIDTH": 576,
        "READ_ONCE": 0,
    }
    scope |= {
        "Int16": int,
        "BEGINS": 1,
        "ENDS": 2,
        "WHOLE": 4,
        "BEGAN": 8,
        "Int32": int,
        "Int64": int,
        **mocks,
    }
    scope["Note"] = namedtuple("Note", "query count seen tokens flags")
    exec(compile(ast.Module([*future, device], []), str(SOURCE), "exec"), scope)
    return scope["LatentDecode"]


class Loaded(NamedTuple):
    """What a lane loads: of each block its note and {token: (page, token there)}, if all lines came
    once; {query: first pair's place} with each row's queries; what it waited for, in order; the
    bytes announced and copied by barrier.
    """

    blocks: list[tuple[list[int], dict[int, tuple[int, int]]]]
    queries: list[dict[int, int]]
    waits: list[tuple[str, int]]
    num_bytes: dict[str, list[int]]


def loaded(
    rows: list[tuple[int, int]], kind: tuple[int, int, int], lane: list, tile: int
) -> Loaded:
    """Of rows (tokens, new ones among them), by a kernel of a kind (heads, page's tokens, most new
    tokens), for a lane of the plan and a tile.
    """
    heads, page_tokens, most_new = kind
    lengths = [length for length, _ in rows]
    starts = [*accumulate((new for _, new in rows), initial=0)]
    lines: dict[int, dict] = defaultdict(dict)
    queries: list[dict[int, int]] = []
    waits: list[tuple[str, int]] = []
    num_bytes: dict[str, list[int]] = defaultdict(list)
    notes: dict[tuple[int, int], int] = {}
    made: list[int] = []
    place = SimpleNamespace

    def copy(_: object, source: tuple, to: tuple, tma_bar_ptr: object, **__: object) -> None:
        if tma_bar_ptr == "q_full":
            (_, at, _, query), n = source, to[1]
            queries[-1].setdefault(query, n * device.box_heads)
            num_bytes["q copied"].append(device.box_heads * 64 * 2)
            assert at == tile % max(1, heads // 64)
            return
        (_, at, part, page), nth = source, to[1]
        assert tma_bar_ptr == (len(made) - 1) % 2 * 3 + part // 3
        for token in range(device.unit):
            key = nth * device.unit + token, part
            assert key not in lines[len(made) - 1]
            lines[len(made) - 1][key] = page, at * device.unit + token

    def expect(barrier: object, count: int) -> None:
        if barrier == "q_full":
            queries.append({})
            num_bytes["q"].append(int(count))
        elif barrier % 3 == 0:
            made.append(3 * int(count))

    cutlass = place(range_constexpr=range, min=np.minimum, max=np.maximum, const_expr=bool)
    device = loader(
        cutlass=cutlass,
        cute=place(size=lambda x, **_: x.parts if hasattr(x, "parts") else len(x), copy=copy),
        arch=place(
            block_idx=lambda: (tile, 0, 0),
            lane_idx=lambda: np.arange(32),
            shuffle_sync=lambda values, thread: int(values[thread]),
            elect_one=nullcontext,
            griddepcontrol_wait=lambda: waits.append(("before", len(made))),
            griddepcontrol_launch_dependents=lambda: None,
            mbarrier_arrive=lambda _: made.append(0),
            mbarrier_wait=lambda barrier, phase: waits.append((str(barrier), int(phase))),
            mbarrier_arrive_and_expect_tx=expect,
        ),
    )()
    device.num_heads, device.ragged, device.tiles = heads, most_new > 0, 1
    device.cluster = 1
    device.page_tokens, device.unit = page_tokens, min(BLOCK, page_tokens)
    device.units = BLOCK // device.unit
    device.window, device.box_heads = 32 // device.units, min(64, heads)
    device.boxes = min(64 // device.box_heads, max(1, most_new))

    class At:
        def __init__(self, parts: int) -> None:
            self.parts = parts

        def __getitem__(self, at: tuple) -> tuple:
            return at

    parts = {"q": 8, "q_rotated": 1, "latents": 8, "rotated": 1}
    device.partition = lambda box, way, rings: (
        None,
        [(At(parts[x]), At(parts[x])) for x in rings],
    )
    pages = -(-max(lengths) // page_tokens)
    table = 1000 * np.arange(len(lengths))[:, None] + np.arange(pages)
    shared = place(**{name: name for name in (*parts, "q_full", "q_empty")})
    shared.full = shared.empty = 0

    class Notes(dict):
        def __setitem__(self, at: tuple, value: object) -> None:
            notes[at[0], len(made)] = int(value)

    shared.notes = Notes()
    given = place(lanes=np.array([lane]), lengths=lengths, starts=starts, table=table)
    device.ways = (None,) * 3
    device.load((None,) * 3, given, shared)
    assert notes[0, len(made) - 1] == -1
    blocks = []
    for nth in range(len(made) - 1):
        found = {}
        for (token, part), where in lines[nth].items():
            assert found.setdefault(token, where) == where
            assert (token, 8 - part) in lines[nth]
        assert len(lines[nth]) == 9 * len(found) and made[nth] == len(found) * 2 * 576
        blocks.append(([notes[n, nth] for n in range(5)], found))
    return Loaded(blocks, queries, waits, num_bytes)


def lanes_of(rows: list[tuple[int, int]], num_lanes: int) -> list[list[int]]:
    """Of each lane, as plan_kernel has it: its first row, its place there, its number of blocks."""
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
        ([(9000, 1), (300, 1)], (128, 16, 0)),  # more pages than a warp's threads hold
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
            found = loaded(rows, kind, lane, tile)
            nth, began = -1, 0
            for at, ((query, count, visible, tokens, flags), copied) in enumerate(found.blocks):
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
                assert (flags & 2 > 0) == (at == len(found.blocks) - 1 or tokens <= BLOCK)
                assert (flags & 4 > 0) == (tokens <= BLOCK and began == 0)
                assert (flags & 8 > 0) == (began == 0)
                pairs = {n: n * heads - 64 * tile for n in range(count)}
                expected = {n: max(0, pair) for n, pair in pairs.items() if -heads < pair < 64}
                assert found.queries[nth] == {query + n: pair for n, pair in expected.items()}
            assert len(found.queries) == nth + 1
            assert sum(found.num_bytes["q"]) == 9 * sum(found.num_bytes["q copied"]) // 9
            assert [x for x in found.waits if x[0] == "q_empty"] == [
                ("q_empty", n % 2) for n in range(nth)
            ]
        assert all((count == 1).all() for count in seen)


def test_old_tokens_are_loaded_before_the_kernel_before_is_done() -> None:
    """Two blocks at most, and none with a new token; then the queries."""
    for length, new, start, early in [
        (300, 1, 0, 2), (130, 1, 1, 1), (130, 3, 1, 0), (64, 1, 0, 0), (65, 1, 0, 1), (128, 4, 0, 1)
    ]:  # fmt: skip
        found = loaded([(length, new)], (16, 64, 4), [0, start, -(-length // 64) - start], 0)
        assert [n for name, n in found.waits if name == "before"] == [early], (length, new, start)
