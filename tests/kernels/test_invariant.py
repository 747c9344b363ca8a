"""Operations in fixed sizes: the bits of a row are the same next to any other rows."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from nanovllm_kernels.activations import sigmoid, silu, softplus
from nanovllm_kernels.attention.invariant import attention, tiles_of
from nanovllm_kernels.products.invariant import linear
from torch import Tensor

LENGTH = 150
SIZES = [(4, 2, 16, 4), (8, 1, 32, 16), (5, 5, 24, 4), (16, 2, 128, 64)]
CHUNKS = {
    "whole": [150],
    "token by token": [1] * 150,
    "uneven": [100, 37, 1, 1, 1, 10],
    "around a block": [63, 1, 1, 64, 21],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(256, 256), (1000, 320), (96, 64), (24, 1024)])
def test_a_product_of_a_row_is_the_same_next_to_any_rows(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(1)
    weight_ND = torch.randn(*sizes, generator=draw).to(dtype)
    x_TD = torch.randn(100, sizes[1], generator=draw).to(dtype)
    y_TN = linear(x_TD, weight_ND)
    torch.testing.assert_close(
        y_TN.float(), x_TD.float() @ weight_ND.float().T, rtol=0.02, atol=0.5
    )
    for start, end in itertools.combinations((0, 1, 2, 7, 15, 16, 17, 50, 99, 100), 2):
        assert torch.equal(linear(x_TD[start:end], weight_ND), y_TN[start:end])
    order = torch.randperm(100, generator=draw)
    assert torch.equal(linear(x_TD[order], weight_ND), y_TN[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_of_a_number_is_the_same_at_any_place(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.cat(
        [torch.randn(1000, generator=draw) * 6, torch.tensor([-200.0, 200.0, 20.0, -20.0, 0.0])]
    ).to(dtype)
    for ours, theirs in (sigmoid, torch.sigmoid), (silu, F.silu), (softplus, F.softplus):
        y = ours(x)
        torch.testing.assert_close(
            y, theirs(x), rtol=2e-6 if dtype.itemsize == 4 else 8e-3, atol=1e-7
        )
        for start, end in itertools.pairwise(range(0, 1005, 67)):
            assert torch.equal(ours(x[start:end]), y[start:end])


class Request:
    """A request with random queries in a random cache, and other requests that share its steps."""

    def __init__(self, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.num_heads, self.num_kv_heads, self.head_size, self.page_tokens = sizes
        self.draw = torch.Generator().manual_seed(3)
        self.dtype = dtype
        shape = (200, self.page_tokens, self.num_kv_heads, self.head_size)
        self.k_PSGA, self.v_PSGA = self.random(*shape), self.random(*shape)
        pages = -(-LENGTH // self.page_tokens)
        numbers = torch.randperm(199, generator=self.draw)[: 3 * pages] + 1
        self.table_RM = numbers.view(3, pages)
        self.q_THA = self.random(LENGTH, self.num_heads, self.head_size)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw).to(self.dtype)

    def step(self, length: int, count: int, others: list[tuple[int, int, int]]) -> Tensor:
        """Return the result of the tokens before `length`. Others are (row, length, tokens)."""
        rows = [(0, length, count), *others]
        random.Random(length).shuffle(rows)
        starts = [0, *itertools.accumulate(count for _, _, count in rows)]
        q_THA = self.random(starts[-1], self.num_heads, self.head_size)
        own = starts[rows.index((0, length, count))]
        q_THA[own : own + count] = self.q_THA[length - count : length]
        o_THA = attention(
            q_THA,
            lambda pages, offsets: (self.k_PSGA[pages, offsets], self.v_PSGA[pages, offsets]),
            tiles_of(
                torch.tensor(starts),
                torch.tensor([length for _, length, _ in rows]),
                self.table_RM[[row for row, _, _ in rows]],
            ),
            num_kv_heads=self.num_kv_heads,
            width=self.head_size,
            page_tokens=self.page_tokens,
            scale=self.head_size**-0.5,
        )
        return o_THA[own : own + count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_attention_of_a_token_is_the_same_in_any_chunk_and_step(
    sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    request = Request(sizes, dtype)
    whole_THA = request.step(LENGTH, LENGTH, [])
    k_LGA, v_LGA = (
        each[request.table_RM[0]].flatten(0, 1)[:LENGTH].float()
        for each in (request.k_PSGA, request.v_PSGA)
    )
    expected_HTA = F.scaled_dot_product_attention(
        request.q_THA.float().transpose(0, 1),
        k_LGA.transpose(0, 1),
        v_LGA.transpose(0, 1),
        is_causal=True,
        enable_gqa=True,
    )
    torch.testing.assert_close(whole_THA, expected_HTA.transpose(0, 1), rtol=1e-5, atol=1e-5)
    for name, counts in CHUNKS.items():
        for others in [], [(1, 50, 1), (2, 140, 30)], [(1, 150, 7)]:
            at = 0
            for count in counts:
                at += count
                found_THA = request.step(at, count, others)
                assert torch.equal(found_THA, whole_THA[at - count : at]), (name, at, others)
