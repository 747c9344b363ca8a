"""Latents in the cache, absorbed attention over them, and the division of its work.

The last part runs in Triton's interpreter, in a process of its own, since TRITON_INTERPRET must be
set before triton is imported.
"""

from __future__ import annotations

import pytest
import torch
from nanovllm_kernels.attention import (
    latent_decode as kernel,
    latent_reference as reference,
    paged_decode,
)
from nanovllm_kernels.attention.decode_cases import KVRows, drafted
from nanovllm_kernels.attention.latent_cases import SCALE, all_rows, case_of, inputs
from nanovllm_kernels.case import check

from tests.interpreted import in_interpreter, in_parent, passes

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 16)


def test_rows_of_r1() -> None:
    assert reference.row_size(512, 64, is_fp8=False) == 576
    assert reference.row_size(512, 64, is_fp8=True) == 512 + 2 * 64 + 16 == 656


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_rows_in_8_bits_are_as_near_as_8_bits_can_be(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = 2.0 ** torch.arange(-30, 20)[:, None]
    latent_TX = (torch.randn(50, 64, generator=generator) * sizes).to(dtype)
    latent_TX[3] = 0
    rotated_TA = torch.randn(50, 24, generator=generator).to(BF16).to(dtype)
    width = reference.row_size(64, 24, is_fp8=True)
    like = torch.empty(1, 1, width, dtype=torch.uint8)
    rows_TX = reference.stored(latent_TX, rotated_TA, like)
    assert rows_TX.shape == (50, width) and rows_TX.dtype == torch.uint8
    found_TX = reference.dequantised(rows_TX, 64, 24, dtype)
    assert torch.equal(found_TX[:, 64:], rotated_TA)
    most_T1 = latent_TX.float().abs().amax(1, keepdim=True)
    # The error is up to half a spacing of three-bit mantissas, or of the smallest numbers.
    allowed = (2**-4 + 2**-8) * latent_TX.float().abs() + 2**-10 / 448 * most_T1
    assert ((found_TX[:, :64].float() - latent_TX.float()).abs() <= allowed).all()


@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_reference_is_the_mean_of_latents(is_fp8: bool) -> None:
    rows = drafted(KVRows((5, 40, 33), (3, 1, 36), 16, torch.float32, width=2, is_fp8=is_fp8))
    *args, starts, width = inputs(lambda *_: None, rows, CPU)
    q, rotated, pages, table = args[:4]
    o_THX = reference.latent_decode(*args, starts_R1=starts, width=width)
    for row, (length, count) in enumerate(zip(rows.lengths, rows.counts, strict=True)):
        found_LX = pages[table[row].long()].flatten(0, 1)[:length]
        found_LX = reference.dequantised(found_LX, 32, 4, torch.float32)
        for nth in range(count):
            seen_LX, token = found_LX[: length - count + 1 + nth], int(starts[row]) + nth
            keys_HL = torch.cat([q[token], rotated[token]], 1) @ seen_LX.T
            expected = (SCALE * keys_HL).softmax(1) @ seen_LX[:, :32]
            torch.testing.assert_close(o_THX[token], expected)


def test_names_differ_and_rows_without_tokens_stand_at_the_tail() -> None:
    every = all_rows()
    cases = [case_of(lambda *_: None, rows) for rows in every]
    assert len({case.name for case in cases}) == len(cases)
    for rows in every:
        used = [length > 0 for length in rows.lengths]
        assert used == sorted(used, reverse=True)
    timed = {case.name: case for case in cases if case.is_timed}
    one = timed["R=128 ctx=4096 HGA=(128, 1, 576) page=128"]
    assert one.num_flops == 128 * 4096 * 128 * 2 * (576 + 512)
    assert one.num_bytes == 128 * 4096 * 1152 + 128 * 128 * (576 + 512) * 2


@in_interpreter
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("lanes", [1, 5, 40])
def test_however_many_lanes(lanes: int, is_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of lanes passes: one has all rows, or each has a block, or some have no work.

    A row's parts are merged a few at once, and in columns.
    """
    monkeypatch.setattr(paged_decode, "INTERPRETED_PROCESSORS", lanes)
    monkeypatch.setattr(kernel, "MERGED", 4)
    monkeypatch.setattr(kernel, "SUMMED", 128)
    lengths = (33, 31, 32, 300, 1, 64, 200, 0)
    rows = KVRows(lengths, (4, 1, 144), 32, BF16, "newest", width=3, is_fp8=is_fp8)
    case = case_of(kernel.plan_decode, drafted(rows))
    assert check(kernel.LATENT_DECODE, case, CPU, slack=2.0) <= 1


@in_interpreter
def test_more_pairs_than_a_program_has() -> None:
    """Rows with more (query, head) pairs than a program's, as in absorbed chunks, are right.

    Shorter rows leave some programs without tokens.
    """
    rows = KVRows((130, 64, 3), (5, 1, 36), 64, BF16, new=(40, 39, 3), width=40)
    case = case_of(kernel.plan_decode, rows)
    assert check(kernel.LATENT_DECODE, case, CPU, slack=2.0) <= 1


@in_interpreter
@pytest.mark.parametrize(
    ("lengths", "firsts"),
    [
        ((320, 319, 290, 310, 305), [0, 1, 2, 3, 4]),
        (
            (320, 319, 32, 200, 305),
            [0, 0, 1, 3, 4],
        ),  # the longest row has a quarter more than a share
        ((64, 64, 60, 64, 64, 33, 64, 64, 64), [0, 2, 4, 6, 8]),
    ],
)
def test_rows_of_like_lengths_are_not_cut(
    lengths: tuple[int, ...], firsts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode, "INTERPRETED_PROCESSORS", 5)
    lengths_R = torch.tensor(lengths, dtype=torch.int32)
    plan_N5 = paged_decode.plan_lanes(lengths_R, 1, 32, 1, whole=True)
    assert plan_N5[:, 0].tolist() == firsts
    blocks = -(-lengths_R // 32)
    assert int(plan_N5[:, 2].sum()) == int(blocks.sum())
    is_whole = firsts[1] > 0
    assert bool(plan_N5[:, 1].any()) != is_whole and bool(plan_N5[:, 4].any()) != is_whole
    rows = KVRows(lengths, (4, 1, 144), 32, BF16)
    assert check(kernel.LATENT_DECODE, case_of(kernel.plan_decode, rows), CPU, slack=2.0) <= 1
