"""Decode rows of 0 to W new tokens in Triton's interpreter.

The tests run in a process of their own, since TRITON_INTERPRET must be set before triton is
imported.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from nanovllm_kernels.attention import paged_decode as triton_decode, reference
from nanovllm_kernels.attention.paged_decode import (
    MAX_WIDTH,
    block_tokens,
    paged_decode,
    plan_decode,
)

from tests.interpreted import in_interpreter, in_parent, passes

CPU = torch.device("cpu")
UNTOUCHED = 77.0
ROWS = {  # (tokens in the cache, new tokens among them)
    "ends of blocks": [(64 * n + d, c) for n in (1, 2) for d in (-1, 0, 1, 2, 3) for c in (2, 4)],
    "one long row": [(645, 4)],
    "one long row that fills its blocks": [(640, 4)],
    "short rows": [(4, 4), (1, 1), (3, 2), (1, 0), (2, 2), (4, 3)],
    "long among short": [(66, 3), (1, 1), (900, 4), (65, 2), (64, 4), (1, 1), (130, 0), (129, 4)],
}
KINDS = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)


@in_parent
def test_widths_in_the_interpreter() -> None:
    # Without this option numpy only warns about a division by zero.
    passes(__file__, 28, "-W", "error::RuntimeWarning")


def made(
    rows: list[tuple[int, int]], heads: tuple[int, int, int], kind: str = "newest", tail: int = 0
) -> dict:
    """Return arguments for rows and `tail` unused rows, whose page numbers are invalid."""
    lengths, new = zip(*rows, *[(0, 0)] * tail, strict=True)
    q, k, v, table, starts, at = reference.paged_inputs(
        lengths, new, heads, 32, torch.float32, CPU, kind
    )
    table[len(rows) :] = 2**30
    found = {"q_THA": q, "k_PSGA": k, "v_PSGA": v, "page_table_RM": table, "lengths_R": at}
    return found | {"starts_R1": starts, "width": 4}


def planned(args: dict, lanes: int | None = None) -> dict:
    lengths, k = args["lengths_R"], args["k_PSGA"]
    if lanes is None:
        return args | {"plan_N5": plan_decode(lengths, k)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_decode, "INTERPRETED_PROCESSORS", lanes)
        plan = triton_decode.plan_lanes(lengths, 1, block_tokens(k), 1)
    assert len(plan) == lanes
    return args | {"plan_N5": plan}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@in_interpreter
@pytest.mark.parametrize("lanes", [1, 5, 40])
@KINDS
def test_rows_cut_in_every_way(rows, lanes) -> None:
    """Any division of rows among lanes is right, also if no query sees a part of a lane."""
    args = planned(made(rows, (4, 2, 64)), lanes)
    close(paged_decode(**args), reference.paged_decode(**args))


@in_interpreter
def test_the_newest_token_is_the_last_querys_alone() -> None:
    """Only a row's last query sees its newest token, which dominates the result of that query.

    Otherwise the tests above would find few faults.
    """
    args = planned(made([(65, 4)], (1, 1, 64)))
    o_THA = paged_decode(**args)
    newest = args["v_PSGA"][args["page_table_RM"][0, 2], 0, 0]
    off = (o_THA[:, 0] - newest).abs().amax(1)
    assert off[3] < 1e-3 and (off[:3] > 0.5).all(), off


@in_interpreter
def test_a_row_of_several_tokens_is_as_many_rows_of_one() -> None:
    rows = ROWS["long among short"]
    several = planned(made(rows, (6, 2, 64), "spike", tail=3))
    one = dict(several, starts_R1=None, width=1)
    order = [row for row, (_, count) in enumerate(rows) for _ in range(count)]
    seen = [length - count + 1 + i for length, count in rows for i in range(count)]
    one["page_table_RM"] = several["page_table_RM"][order]
    one["lengths_R"] = torch.tensor(seen, dtype=torch.int32)
    close(paged_decode(**several), paged_decode(**planned(one)))


@in_interpreter
def test_rows_of_one_token_each_are_the_same_with_starts() -> None:
    args = planned(made([(length, 1) for length, _ in ROWS["long among short"]], (4, 2, 64)))
    plain = paged_decode(**dict(args, starts_R1=None, width=1))
    for width in (1, 4):
        torch.testing.assert_close(paged_decode(**args | {"width": width}), plain, rtol=0, atol=0)


@in_interpreter
@pytest.mark.parametrize("rows", [ROWS["long among short"], []], ids=["some", "no rows at all"])
def test_unused_rows_and_tokens_of_a_graph_are_left_alone(rows) -> None:
    if rows:
        args = made(rows, (4, 2, 64), tail=len(ROWS["one long row"]) + 6)
    else:
        args = made([(1, 1)], (4, 2, 64))
        args["lengths_R"], args["starts_R1"] = args["lengths_R"] * 0, args["starts_R1"] * 0
    used = int(args["starts_R1"][-1])
    padded = torch.full((used + 9, 4, 64), torch.nan)
    padded[:used] = args["q_THA"][:used]
    out_THA = torch.full((used + 9, 4, 64), UNTOUCHED)
    args = planned(args | {"q_THA": padded})
    assert paged_decode(**args, out_THA=out_THA) is out_THA
    assert (out_THA[used:] == UNTOUCHED).all()
    if rows:
        close(out_THA[:used], reference.paged_decode(**args)[:used])


@in_interpreter
@pytest.mark.parametrize("width", [1, 4])
def test_nan_in_one_row_stays_there(width) -> None:
    """NaN in a page makes only its row NaN, also if one lane computes all rows in turn."""
    args = planned(made([(70, 1), (40, 1), (130, 1), (9, 1)], (4, 2, 64)), lanes=1)
    args |= {"width": width, "starts_R1": args["starts_R1"] if width > 1 else None}
    for row, page in ((0, 2), (2, 0)):
        args["v_PSGA"][args["page_table_RM"][row, page]] = torch.nan
    assert paged_decode(**args).isnan().all((1, 2)).tolist() == [True, False, True, False]
    assert paged_decode(**args).isnan().any((1, 2)).tolist() == [True, False, True, False]


@in_interpreter
@pytest.mark.parametrize(("starts", "width"), [(False, 2), (True, MAX_WIDTH + 1)])
def test_rows_wider_than_it_takes_are_refused(starts, width) -> None:
    args = planned(made([(65, 1)], (4, 2, 64)))
    args |= {"width": width} if starts else {"width": width, "starts_R1": None}
    with pytest.raises(AssertionError, match=str(width)):
        paged_decode(**args)


def test_the_reference_sees_what_each_query_may() -> None:
    """Each query's result is the mean of the values it may see, since all scores are equal."""
    page = torch.arange(32.0).reshape(1, 32, 1, 1)
    o_THA = reference.paged_decode(
        torch.zeros(5, 1, 1),
        torch.zeros(1, 32, 1, 1),
        page,
        torch.zeros(4, 1, dtype=torch.int32),
        torch.tensor([5, 9, 7, 0]),
        torch.empty(0),
        starts_R1=torch.tensor([*accumulate([3, 0, 2, 0], initial=0)]),
        width=3,
    )
    assert o_THA.flatten().tolist() == [1.0, 1.5, 2.0, 2.5, 3.0]


@in_interpreter
@pytest.mark.parametrize("rows", [[(645, 4)], [(3, 1)], [(64, 2)]])
def test_one_row_is_merged_by_its_first_lane(rows: list[tuple[int, int]]) -> None:
    """A single row, divided or not, is merged by its first lane; other lanes merge nothing."""
    args = planned(made(rows, (4, 2, 64)))
    assert (args["plan_N5"][1:, 4] == 0).all()
    expected_THA = reference.paged_decode(**args)
    torch.testing.assert_close(paged_decode(**args), expected_THA, rtol=1e-5, atol=1e-5)
