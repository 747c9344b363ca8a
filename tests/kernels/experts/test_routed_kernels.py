"""Routing, sorting, products and sums of experts in Triton that check-kernels does not cover.

The tests run in Triton's interpreter, in a process of their own, as TRITON_INTERPRET must be set
before triton is imported. The kernels are combine.py, products.py, route.py and rows.py.
Their references are compared with loops by test_experts_reference.py.
"""

from __future__ import annotations

import math
from dataclasses import fields
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st
from nanovllm_kernels.case import normal
from nanovllm_kernels.experts import (
    combine,
    products as experts,
    route,
    route_reference,
    rows as expert_rows,
)
from nanovllm_kernels.experts.cases import MoECase
from nanovllm_kernels.experts.route_reference import Chosen, ExpertRows, Placed, Routing
from nanovllm_kernels.experts.routed_cases import sort_inputs

from tests.interpreted import in_interpreter, in_parent, passes
from tests.kernels.compiled import printed
from tests.kernels.test_triton_compiles import COMPILE

CPU = torch.device("cpu")
SOFTMAX = Routing("softmax", renormalise=True)
SIGMOID = Routing("sigmoid", renormalise=True)
GROUPS = Routing("sigmoid", renormalise=False, scale=2.0, num_groups=4, chosen_groups=2)


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 49)


def assert_equal(found: ExpertRows, expected: ExpertRows) -> None:
    for field in fields(ExpertRows):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same, (field.name, one, other)


@in_interpreter
@pytest.mark.parametrize("rule", [SOFTMAX, SIGMOID, GROUPS], ids=["softmax", "sigmoid", "groups"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_any_logits_choose_different_experts(rule, bad) -> None:
    """Any bad logits (all, one or every other one) still choose distinct, valid experts."""
    logits_TE = torch.linspace(-3, 3, 20).repeat(4, 1)
    logits_TE[0], logits_TE[1, 7], logits_TE[2, ::2] = bad, bad, bad
    weights_TK, experts_TK = route.route(logits_TE, None, 6, rule)
    rows = expert_rows.sort_rows(experts_TK, 0, 20, 4)
    assert_equal(rows, route_reference.sort_rows(experts_TK, 0, 20, 4))
    assert all(len(set(row)) == 6 and set(row) <= set(range(20)) for row in experts_TK.tolist())
    assert weights_TK[3].isfinite().all()
    if math.isnan(bad):
        assert weights_TK[:3].isnan().any(1).all()


@in_interpreter
def test_of_equal_scores_the_lower_experts_are_chosen() -> None:
    """The lowest experts win ties, also between -0 and 0 and between scores that underflow."""
    logits_TE = torch.tensor([[0.0, -0.0] * 4, [-500.0, -400.0, -300.0, 0.0] * 2])
    _, experts_TK = route.route(logits_TE, None, 4, SOFTMAX)
    assert experts_TK.tolist() == [[0, 1, 2, 3], [3, 7, 0, 1]]


@in_interpreter
@pytest.mark.parametrize("rule", [SOFTMAX, GROUPS], ids=["softmax", "groups"])
@pytest.mark.parametrize("has_copies", [False, True])
def test_copies_are_found_and_counted_as_defined(rule: Routing, has_copies: bool) -> None:
    """Replicas and their counts equal those of the reference.

    Some of 20 experts have 2 or 3 replicas on 3 ranks. Every third token is padding.
    """
    logits_TE = torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
    at_T = torch.arange(64) * 37 % 1000
    at_T[::3] = 0
    copies: list[list[int]] = [[e, *range(20 + e, 30, 5)] for e in range(20)]
    turns_EX = torch.tensor([(each * 6)[:6] for each in copies], dtype=torch.int32)
    found = []
    for kernel in (route.route, route_reference.route):
        tokens_X = torch.full((30,), 2**33)
        placed = Placed(at_T, tokens_X, turns_EX if has_copies else None)
        found.append((kernel(logits_TE, None, 6, rule, None, placed)[1], tokens_X))
    (ours_TK, counts_X), (experts_TK, expected_X) = found
    assert torch.equal(ours_TK, experts_TK) and torch.equal(counts_X, expected_X)
    sorting = ours_TK, 10, 20, 4
    assert_equal(expert_rows.sort_rows(*sorting), route_reference.sort_rows(*sorting))
    assert (ours_TK[::3] == -1).all() and int((counts_X - 2**33).sum()) == 6 * int((at_T > 0).sum())
    assert {int(e) for e in ours_TK.unique()} > {-1, *range(10)}
    assert bool((counts_X[20:] > 2**33).all()) is has_copies


@in_interpreter
@settings(deadline=None, max_examples=25)
@given(
    T=st.sampled_from([1, 2, 31, 128, 129, 300]),
    E=st.sampled_from([3, 8, 40]),
    K=st.integers(1, 3),
    tile=st.sampled_from([1, 16, 64]),
    kind=st.sampled_from(["plain", "one", "few"]),
    data=st.data(),
)
def test_sorted_rows_equal_the_definition(T, E, K, tile, kind, data) -> None:
    first = data.draw(st.integers(0, E - 1))
    num_experts = data.draw(st.integers(1, E - first))
    args = sort_inputs(T, E, K, first, num_experts, tile, kind, CPU)
    expected = route_reference.sort_rows(*args)
    assert_equal(expert_rows.sort_rows(*args), expected)
    for name, value in (("SCANNED", 0), ("TOGETHER", 2)):
        with patch.object(expert_rows, name, value):
            assert_equal(expert_rows.sort_rows(*args), expected)


@in_interpreter
@pytest.mark.parametrize("together", [2, 4])
def test_counts_of_experts_beside_each_other_do_not_run_over(together: int) -> None:
    """The 16-bit counts hold SCANNED pairs, of two experts, of one, or all but one of no expert."""
    pairs = expert_rows.SCANNED
    few_TK = torch.tensor([[2, 3]], dtype=torch.int32).repeat(pairs // 2, 1)
    one_TK = torch.full((pairs, 1), 3, dtype=torch.int32)
    nobody_TK = one_TK.clone().fill_(-1)
    nobody_TK[-1] = 0
    with patch.object(expert_rows, "TOGETHER", together):
        for experts_TK in (few_TK, one_TK, nobody_TK):
            args = experts_TK, 0, 7, 64
            assert_equal(expert_rows.sort_rows(*args), route_reference.sort_rows(*args))


@in_interpreter
def test_tiles_are_large_where_experts_have_many_rows() -> None:
    assert experts.tile_of(8, 128) == experts.tile_of(2047, 128) == experts.FEW
    assert experts.tile_of(2048, 128) == experts.MANY


@in_interpreter
@pytest.mark.parametrize(
    ("name", "tokens", "chosen", "gate_up", "itemsize"),
    [
        ("Qwen3-Next", 4, 11, (513, 1024, 2048), 2),
        ("Qwen3.5-35B-A3B", 4, 9, (257, 1024, 2048), 2),
        ("Qwen3.5-35B-A3B in fp8", 5, 9, (257, 1024, 2048), 1),
        ("30B-A3B", 4, 8, (128, 1536, 2048), 2),
        ("M2", 4, 8, (256, 3072, 3072), 1),
        ("R1", 3, 9, (257, 4096, 7168), 1),
        ("many small experts", 8, 8, (1024, 64, 64), 2),
    ],
)
def test_pairs_are_sorted_if_they_would_read_many_weights_twice(
    name: str, tokens: int, chosen: int, gate_up: tuple[int, int, int], itemsize: int
) -> None:
    dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16}[itemsize]
    weight = torch.empty(*gate_up, dtype=dtype, device="meta")
    most = max(n for n in range(16) if experts.is_unsorted(n * chosen, weight))
    assert most == tokens, name


@in_interpreter
@pytest.mark.parametrize(
    ("name", "size", "step_bytes", "programs", "stages"),
    [
        ("M2's gate_up: 3 a multiprocessor", (8, 1), 10240, 384, 6),
        ("R1's gate_up: 5", (8, 1), 10240, 576, 4),
        ("R1's down, more than can run at once with any", (8, 1), 12288, 1792, 3),
        ("Qwen3-Next's gate_up", (16, 2), 20480, 176, 4),
        ("Qwen3-Next's down", (16, 2), 20480, 512, 2),
        ("30B-A3B's down", (16, 2), 20480, 256, 4),
    ],
)
def test_all_programs_run_at_once(
    name: str, size: tuple[int, int], step_bytes: int, programs: int, stages: int
) -> None:
    assert experts.at_once(experts.SHAPES[size], step_bytes, programs, 132).stages == stages, name


@in_interpreter
@pytest.mark.parametrize("block_fp8", [False, True])
def test_pairs_that_are_not_sorted_are_multiplied_alike(block_fp8: bool) -> None:
    """Products of unsorted pairs equal those of sorted rows.

    There are three pairs for each of two tokens. One pair has no expert, and its row is undefined.
    """
    routed = MoECase(2, 3, 6, 72, 136, block_fp8=block_fp8)
    x_TD, gate_up, gate_up_scale, rows, K = routed.gate_up(experts.FEW, CPU)
    down, down_scale = routed.weight(1, routed.D, routed.F, CPU)
    experts_TK = torch.empty(6, dtype=torch.int32)
    experts_TK[rows.pair_of_X.long()] = (
        torch.arange(6).repeat_interleave(rows.starts_E1.diff(), output_size=6).int()
    )
    experts_TK[5] = -1
    found = []
    for each in (rows, Chosen(experts_TK.view(2, 3))):
        y_XF = experts.expert_gate_up(x_TD, gate_up, gate_up_scale, each, K)
        found.append(experts.expert_down(y_XF, down, down_scale, each, K))
    assert torch.equal(found[1][:5], found[0][rows.row_of_TK.view(-1)[:5].long()])
    assert found[1][:5].abs().min() > 0


@in_interpreter
def test_numbers_beside_weights_of_8_bits_may_be_large_and_small() -> None:
    """An identity of 8-bit weights keeps tokens up to 4e6, with errors up to 2e-6 for small ones.

    Infinity does not become finite.
    """
    sizes_X = torch.logspace(-6, 6.6, 127)
    y_XF = torch.cat([sizes_X, torch.zeros(1)]).bfloat16()[None]
    one_EXX = torch.eye(128).to(torch.float8_e4m3fn)[None]
    chosen = Chosen(torch.zeros(1, 1, dtype=torch.int32))
    down = lambda y: experts.expert_down(y, one_EXX, torch.ones(1, 1, 1), chosen, 1)  # noqa: E731
    off_X = (down(y_XF).float() - y_XF.float()).abs()
    assert (off_X <= y_XF.float() * 2**-10 + 2e-6).all()
    y_XF[0, 7] = torch.inf
    assert not down(y_XF).isfinite().any()


@in_interpreter
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("block_fp8", [False, True])
@pytest.mark.parametrize(("T", "K", "E"), [(1, 1, 3), (4, 8, 24), (3, 10, 16)])
def test_down_and_sum_of_one_launch_are_those_of_two(T, K, E, block_fp8, adds) -> None:
    """The fused down product equals down and combine, except for the order of sums.

    A pair without an expert may use any. The stream is overwritten.
    """
    routed = MoECase(T, K, E, 200, 136, block_fp8=block_fp8)
    y_XF = normal(CPU, T * K, 200, dtype=torch.bfloat16)
    weight = routed.weight(1, 136, 200, CPU)
    experts_TK = torch.rand(T, E, generator=torch.Generator().manual_seed(T)).argsort(1)[:, :K]
    experts_TK = experts_TK.int().contiguous()
    experts_TK[T // 2, -1] = -1
    rows = Chosen(experts_TK)
    weights_TK = normal(CPU, T, K, dtype=torch.float32, seed=1).softmax(-1)
    shared_TD, stream_TD = normal(CPU, 2, T, 136, dtype=torch.bfloat16, seed=2)
    more = (shared_TD, stream_TD) if adds else (None, None)
    y_XD = experts.expert_down(y_XF, *weight, rows, K)
    expected_TD = combine.combine(
        y_XD, weights_TK, None, *(x if x is None else x.clone() for x in more)
    )
    x_TD = experts.down_combine(y_XF, *weight, rows, weights_TK, *more)
    assert (x_TD is stream_TD) is adds and x_TD.abs().mean() > 0.05
    torch.testing.assert_close(x_TD, expected_TD, rtol=2**-7, atol=1e-5)


COMPILED = """
from nanovllm_kernels.experts.products import SHAPES, product_kernel
types = dict(x_XD="*bf16", weight_END="*fp8e4nv", scale_EXX="*fp32", tile_expert_X="*i32",
             pair_of_X="*i32", starts_E1="*i32", tile_start_X="*i32", weights_TK="*fp32",
             shared_TD="*bf16", residual_TD="*bf16", out_XN="*bf16")
for tile in (8, 16):
    shape = SHAPES[tile, 1]
    for gated, together in ((False, 1), (True, 1), (False, tile)):
        kind = ("weights_TK shared_TD residual_TD" if together == 1
                else "pair_of_X starts_E1 tile_start_X").split()
        ptx = compiled(product_kernel, types, shape.warps, N=3072, D=1536, GATED=gated, TILE=tile,
                       TOGETHER=together, FEATURES=shape.weights // max(1 + gated, together),
                       DEPTH=shape.depth, STAGES=shape.stages, WAITS=True, **dict.fromkeys(kind))
        print(ptx.count("cvt.rn.f16x2.e4m3x2"), "cvt.f32.f16" in ptx)
"""


@in_parent
def test_weights_of_8_bits_are_widened_by_one_instruction() -> None:
    assert printed(COMPILE + COMPILED) == ["compiled product_kernel True", "64 False"] * 6
