"""Selection of a kernel for decode rows, its arguments, and where chunks begin after these rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nanovllm_kernels.attention import reference as reference
from nanovllm_kernels.attention.paged_decode import DecodeKernel
from torch import Tensor

from nanovllm.attention import paged
from nanovllm.attention.triton import TritonPaged
from tests.attention.paged_batches import error_share, make_batch

CPU = torch.device("cpu")
HEADS = 4, 2, 16


class Kernels:
    """Stand-ins for the Triton and the CuTe kernel that call the reference."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.triton = self.kernel("triton", 8)
        self.cute = self.kernel("cute", 2)

    def kernel(self, name: str, max_width: int) -> DecodeKernel:
        def plan_decode(lengths_R: Tensor, k_PSGA: Tensor) -> tuple[str, int, tuple[int, ...]]:
            return name, len(lengths_R), tuple(k_PSGA.shape[1:])

        def paged_decode(
            q_THA: Tensor,
            k_PSGA: Tensor,
            v_PSGA: Tensor,
            table_RM: Tensor,
            lengths_R: Tensor,
            plan: object,
            out_THA: Tensor | None = None,
            **ragged: object,
        ) -> Tensor:
            assert plan == (name, len(lengths_R), (16, 2, 16))
            self.calls.append((name, ragged))
            starts_R1 = ragged.get("starts_R1", torch.arange(len(lengths_R) + 1))
            rows = table_RM, starts_R1, lengths_R, 0
            o_THA = reference.paged_prefill(q_THA, k_PSGA, v_PSGA, *rows)
            return o_THA if out_THA is None else out_THA.copy_(o_THA)

        return DecodeKernel(plan_decode, paged_decode, max_width)


def by_definition(
    q_THA: Tensor,
    k_PSGA: Tensor,
    v_PSGA: Tensor,
    table_RM: Tensor,
    starts_R1: Tensor,
    lengths_R: Tensor,
    max_new: int,
    out_THA: Tensor | None = None,
    *,
    parts: int = 1,
) -> Tensor:
    """Reference of prompt chunks, which may start after the step's first token."""
    o_THA = torch.full_like(q_THA, torch.nan) if out_THA is None else out_THA
    first = int(starts_R1[0])
    rows = table_RM, starts_R1 - first, lengths_R, max_new
    o_THA[first:] = reference.paged_prefill(q_THA[first:], k_PSGA, v_PSGA, *rows)
    return o_THA


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(paged, "TRITON_DECODE", found.triton)
    monkeypatch.setattr(paged, "paged_prefill", by_definition)
    return found


@pytest.mark.parametrize("chunks", [[], [40, 7]], ids=["alone", "before chunks"])
@pytest.mark.parametrize(
    ("counts", "width", "name"),
    [
        ([1] * 5, 1, "triton"),  # too few rows for the CuTe kernel
        ([1] * 9, 1, "cute"),
        ([1] * 9, 2, "cute"),  # rows that have no drafts in this step
        ([1, 2, 2, 1, 2, 1, 1, 1, 2], 2, "cute"),
        ([1, 3, 2, 1, 2, 1, 1, 1, 2], 3, "triton"),  # wider than the CuTe kernel supports
        ([8, 1, 3], 8, "triton"),
    ],
)
def test_rows_and_tokens_are_split_where_chunks_begin(
    counts: list[int], width: int, name: str, chunks: list[int], kernels: Kernels
) -> None:
    lengths = [count + 11 * row for row, count in enumerate([*counts, *chunks])]
    shape = HEADS, 16, torch.float32, CPU
    q_THA, cache, batch = make_batch(lengths, [*counts, *chunks], *shape, width=width)
    assert (batch.num_decodes, batch.num_decode_tokens) == (len(counts), sum(counts))
    o_THA = TritonPaged(cache, kernels.cute).bind(batch)(cache, q_THA)
    assert error_share(o_THA, q_THA, cache, batch) < 8
    ((called, ragged),) = kernels.calls
    assert called == name
    if width == 1:
        assert ragged == {}  # a kernel for one token per row has no such arguments
    else:
        assert ragged["width"] == width
        assert ragged["starts_R1"].diff().tolist() == counts


def test_a_kernel_without_widths_serves_rows_of_one_token(kernels: Kernels) -> None:
    cute = replace(kernels.cute, max_width=1)
    q_THA, cache, batch = make_batch([30] * 9, [1] * 9, HEADS, 16, torch.float32, CPU)
    o_THA = TritonPaged(cache, cute).bind(batch)(cache, q_THA)
    assert error_share(o_THA, q_THA, cache, batch) < 8
    assert kernels.calls == [("cute", {})]


def test_each_part_of_a_batch_knows_its_rows() -> None:
    counts = [1, 3, 2, 40]
    _, _, batch = make_batch([9, 9, 9, 50], counts, HEADS, 16, torch.float32, CPU, width=3)
    decodes, chunks = batch.decodes(), batch.chunks()
    assert decodes.slots_R.tolist() == [0, 1, 2] and chunks.slots_R.tolist() == [3]
    assert decodes.starts_R1.tolist() == [0, 1, 4, 6] and chunks.starts_R1.tolist() == [6, 46]
    assert (len(decodes.lengths_R), decodes.num_decodes, decodes.num_decode_tokens) == (3, 3, 6)
    assert (len(chunks.lengths_R), chunks.num_decodes, chunks.num_decode_tokens) == (1, 0, 0)
