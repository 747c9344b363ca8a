"""The gated delta rule in Triton over texts in several steps, which check-kernels does not cover.

The tests run in Triton's interpreter, in a process of their own, as TRITON_INTERPRET must be set
before triton is imported. The kernels are decode.py and prefill.py. Their reference is
compared with transformers by test_reference.py.
"""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st
from nanovllm_kernels.case import check
from nanovllm_kernels.delta import decode as delta_decode, prefill as delta_prefill, reference
from nanovllm_kernels.delta.cases import DELTA_DECODE, DELTA_PREFILL, DeltaLayer, case, inputs
from torch import Tensor

from tests.interpreted import in_interpreter, in_parent, passes

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 12)


@in_interpreter
@settings(deadline=None, max_examples=6)
@given(
    heads=st.sampled_from([(1, 1), (2, 2), (1, 2), (1, 3), (1, 4)]),
    sizes=st.sampled_from([(16, 16), (32, 16), (24, 40)]),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=4).filter(any),
)
def test_prompts_equal_the_definition(heads, sizes, lengths) -> None:
    layer = DeltaLayer(*heads, *sizes, dtype=torch.float32)
    assert check(DELTA_PREFILL, case(layer, tuple(lengths), None), CPU) <= 1


@in_interpreter
def test_more_rows_than_a_program_reads_at_once() -> None:
    lengths = (0, 3, 65, 1, 0) * (delta_prefill.ROWS // 4)
    assert len(lengths) > delta_prefill.ROWS
    layer = DeltaLayer(1, 2, 16, 16, dtype=torch.float32)
    assert check(DELTA_PREFILL, case(layer, lengths, None), CPU) <= 1


def whole(layer: DeltaLayer, T: int) -> tuple[tuple[Any, ...], Tensor, tuple[Tensor, Tensor]]:
    """Return a text, its result by the reference in one step, and the states after it."""
    text = inputs(layer, (T,), None, CPU)
    states = text[5].clone(), text[6].clone()
    x_THV = reference.mix_rows(*text[:5], *states, *text[7:9])
    return text, x_THV, states


def part(text: tuple[Any, ...], start: int, end: int) -> list[Any]:
    return [tensor[start:end] for tensor in text[:4]] + [text[4]]


def steps(*lengths: int) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@in_interpreter
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)])
def test_a_text_in_chunks_and_tokens_equals_it_at_once(heads) -> None:
    layer = DeltaLayer(*heads, 16, 24, dtype=torch.float32)
    text, expected_THV, expected_states = whole(layer, 170)
    states, slots_R = text[5:7], text[7]
    tickets_RG = torch.zeros(1, layer.G, dtype=torch.int32)
    found = [
        delta_prefill.mix_rows(*part(text, at, end), *states, slots_R, steps(end - at))
        for at, end in ((0, 1), (1, 3), (3, 70), (70, 134), (134, 160))
    ]
    found += [
        delta_decode.mix_decodes(*part(text, at, at + 1), *states, slots_R, tickets_RG)
        for at in range(160, 170)
    ]
    torch.testing.assert_close(torch.cat(found), expected_THV, **CLOSE)
    torch.testing.assert_close(states, expected_states, **CLOSE)
    assert tickets_RG.tolist() == [[0] * layer.G]


@in_interpreter
def test_states_in_bands_of_columns() -> None:
    """Bands of 8 columns give the same results, with a partial last band.

    Three value heads share each key head.
    """
    layer = DeltaLayer(2, 6, 24, 20, dtype=torch.float32)
    with patch.object(delta_decode, "COLUMNS", 8):
        assert check(DELTA_DECODE, case(layer, (1,) * 3, ()), CPU) <= 1


@in_interpreter
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)])
def test_rejected_drafts_leave_nothing_behind(heads) -> None:
    """Steps that feed wrong drafts after tokens of the text end with the states of the text."""
    layer, luck = DeltaLayer(*heads, 16, 24, dtype=torch.float32), random.Random(5)
    text, expected_THV, expected_states = whole(layer, 24)
    states, slots_R = text[5:7], text[7]
    tickets_RG, kept_NWX = (
        torch.zeros(1, layer.G, dtype=torch.int32),
        inputs(layer, (1,), (1,), CPU)[9],
    )
    at, replays, found = 0, 0, []
    while at < 24:
        right = min(luck.randint(1, 4), 24 - at)
        fed = part(text, at, at + right)
        for i in range(4):
            fed[i] = torch.cat([fed[i], torch.randn(luck.randint(0, 2), *fed[i].shape[1:])])
        num_fed = min(map(len, fed[:4]))
        fed[:4] = [tensor[:num_fed] for tensor in fed[:4]]
        rows = steps(num_fed), kept_NWX, torch.tensor([replays], dtype=torch.int32), tickets_RG
        found.append(delta_decode.mix_drafted(*fed, *states, slots_R, *rows)[:right])
        at, replays = at + right, right
    rows = steps(0), kept_NWX, torch.tensor([replays], dtype=torch.int32), tickets_RG
    delta_decode.mix_drafted(*part(text, 0, 0), *states, slots_R, *rows)
    torch.testing.assert_close(torch.cat(found), expected_THV, **CLOSE)
    torch.testing.assert_close(states, expected_states, **CLOSE)
    assert tickets_RG.tolist() == [[0] * layer.G]


@in_interpreter
@pytest.mark.parametrize("mix_rows", [reference.mix_rows, delta_prefill.mix_rows])
def test_states_are_saved_in_other_tensors(mix_rows) -> None:
    """The state after a row's first part is written to `saved` only, and the last to its slot."""
    layer = DeltaLayer(1, 2, 16, 24, 3, dtype=torch.float32)
    rows = inputs(layer, (3, 66, 40, 17), None, CPU)
    targets_R, slots_R = rows[10][::2].tolist(), rows[7].tolist()
    assert targets_R[0] == -1 and min(targets_R[1:]) >= 0
    expected, before = [t.clone() for t in rows[5:7]], [t.clone() for t in rows[5:7]]
    expected_THV = reference.mix_rows(*rows[:5], *expected, *rows[7:])
    saved = [torch.full_like(tensor, 7.0) for tensor in rows[5:7]]
    torch.testing.assert_close(mix_rows(*rows, *saved), expected_THV, **CLOSE)
    for own, other, right, old in zip(rows[5:7], saved, expected, before, strict=True):
        torch.testing.assert_close(other[targets_R[1:]], right[targets_R[1:]], **CLOSE)
        torch.testing.assert_close(own[slots_R], right[slots_R], **CLOSE)
        assert (own[targets_R[1:]] == old[targets_R[1:]]).all()
        assert (other[[i for i in range(len(other)) if i not in targets_R]] == 7).all()


@in_interpreter
def test_rows_that_pad_a_graph_change_no_others() -> None:
    layer = DeltaLayer(1, 2, 16, 16, dtype=torch.float32)
    *rows, tickets_RG = inputs(layer, (1,) * 5, (), CPU)
    expected = [tensor.clone() for tensor in rows[5:7]]
    x_THV = reference.mix_rows(*[tensor[:3] for tensor in rows[:4]], rows[4], *expected,
                               rows[7][:3], steps(1, 1, 1))  # fmt: skip
    rows[7][3:] = rows[7][3].clone()
    found_THV = delta_decode.mix_decodes(*rows[:-1], tickets_RG)
    torch.testing.assert_close(found_THV[:3], x_THV, **CLOSE)
    others = torch.arange(10) != rows[7][3]
    for found, state in zip(rows[5:7], expected, strict=True):
        torch.testing.assert_close(found[others], state[others], **CLOSE)
    assert found_THV.isfinite().all()


@in_interpreter
@pytest.mark.parametrize("first", [0, 1])
def test_tokens_of_no_row_are_left_alone(first) -> None:
    """Decode rows before the chunks of a step, and padding tokens after them, are not written."""
    layer = DeltaLayer(1, 2, 16, 16, dtype=torch.float32)
    rows = inputs(layer, (3, 66, 2), None, CPU)
    out_THV = torch.full_like(rows[3], 7.0)
    chunks = slice(first, 2)
    expected_THV = reference.mix_rows(*rows[:5], rows[5].clone(), rows[6].clone(), *rows[7:])
    rows_of = rows[8][first:3], rows[9][2 * first : 5], rows[10][2 * first : 4]
    found_THV = delta_prefill.mix_rows(*rows[:7], rows[7][chunks], *rows_of, out_THV=out_THV)
    assert found_THV is out_THV
    start, end = rows[8][first], rows[8][2]
    torch.testing.assert_close(out_THV[start:end], expected_THV[start:end], **CLOSE)
    assert (out_THV[:start] == 7).all() and (out_THV[end:] == 7).all()
