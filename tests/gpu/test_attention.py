"""Attention backends on a GPU against float32, with batches like those of an engine."""

from __future__ import annotations

import random

import pytest
import torch
from nanovllm_kernels.attention.reference import in_8_bits, paged_prefill
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, Batch
from nanovllm.attention.flash import FlashPaged
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.triton import TritonPaged
from tests.attention.paged_batches import Heads, error_share, layout_of, make_batch

CUDA = torch.device("cuda")
BACKENDS: list[type[AttentionBackend]] = [TritonPaged, FlashPaged]
HEADS: list[Heads] = [(16, 8, 128), (32, 8, 128), (14, 2, 64), (16, 2, 256), (8, 8, 128)]
KINDS = [
    "one prompt", "decode", "one long decode", "mixed", "many rows",
    "drafts", "drafts before chunks",
]  # fmt: skip
WIDTH = 4  # maximum tokens of a decode row with drafts


def rows_of(kind: str) -> tuple[list[int], list[int]]:
    """Return the lengths and the numbers of new tokens of rows."""
    draw = random.Random(kind)
    if kind == "one prompt":
        return [777], [777]
    if kind == "decode":
        return [draw.randint(1, 3000) for _ in range(37)] + [1] * 3, [1] * 40
    if kind == "one long decode":
        return [30_000], [1]
    if kind == "mixed":
        lengths = [draw.randint(2, 2000) for _ in range(20)] + [4096, 515, 130, 1500]
        return lengths, [1] * 20 + [2048, 515, 2, 129]
    if kind == "drafts":  # the last rows are padding of a graph
        new = [draw.randint(1, WIDTH) for _ in range(37)]
        return [draw.randint(count, 3000) for count in new] + [0] * 3, new + [0] * 3
    if kind == "drafts before chunks":
        new = [draw.randint(1, WIDTH) for _ in range(20)] + [515, 130]
        return [draw.randint(count, 2000) for count in new], new
    assert kind == "many rows"
    lengths = [draw.randint(2, 300) for _ in range(300)]
    return [*lengths, 512], [1] * 300 + [300]


@pytest.mark.parametrize("page_tokens", [16, 64, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend(backend, kind, heads, page_tokens) -> None:
    assert backend.supports(CUDA, layout_of(heads), page_tokens) is None
    width = WIDTH if kind.startswith("drafts") else 1
    shape = heads, page_tokens, torch.bfloat16, CUDA
    q_THA, cache, batch = make_batch(*rows_of(kind), *shape, width=width)
    o_THA = backend(cache).bind(batch)(cache, q_THA)
    assert error_share(o_THA, q_THA, cache, batch) <= 1


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_of_8_bits(backend, kind, heads) -> None:
    assert backend.supports(CUDA, layout_of(heads, 1), 128) is None
    width = WIDTH if kind.startswith("drafts") else 1
    shape = heads, 128, torch.bfloat16, CUDA
    q_THA, wide, batch = make_batch(*rows_of(kind), *shape, width=width)
    cache = PagedKV(*in_8_bits(*wide[:2]))
    rows = batch.page_table_RM, batch.starts_R1, batch.lengths_R, batch.max_new
    expected_THA = paged_prefill(q_THA, *cache[:2], *rows, cache.scales_2G)
    o_THA = backend(cache).bind(batch)(cache, q_THA)
    torch.testing.assert_close(o_THA.float(), expected_THA, rtol=5e-2, atol=5e-2)


def run_decode(batch: Batch, cache: PagedKV, q_RHA: Tensor) -> Tensor:
    return FlashPaged(cache).bind(batch)(cache, q_RHA)


def test_a_graph_of_decode_follows_lengths_and_pages() -> None:
    """The graph is captured with the shortest rows, and replayed after they grew and moved."""
    heads, lengths = (16, 8, 128), [3000, 17, 1, 640, 129]
    q_RHA, cache, batch = make_batch(lengths, [1] * 5, heads, 64, torch.bfloat16, CUDA)
    table_RM, lengths_R = batch.page_table_RM.clone(), batch.lengths_R.clone()
    batch.page_table_RM.zero_()
    batch.lengths_R.fill_(1)
    run_decode(batch, cache, q_RHA)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_RHA = run_decode(batch, cache, q_RHA)
    graph.replay()
    assert error_share(o_RHA, q_RHA, cache, batch) <= 1
    batch.page_table_RM.copy_(table_RM)
    batch.lengths_R.copy_(lengths_R)
    graph.replay()
    assert error_share(o_RHA, q_RHA, cache, batch) <= 1


def test_flash_compiles_once_whatever_the_batch() -> None:
    from nanovllm_kernels.attention.flash_prefill import compile_causal

    heads, compiled = (16, 8, 128), []
    for kind in ("one prompt", "mixed", "many rows"):
        q_THA, cache, batch = make_batch(*rows_of(kind), heads, 128, torch.bfloat16, CUDA)
        o_THA = FlashPaged(cache).bind(batch)(cache, q_THA)
        assert error_share(o_THA, q_THA, cache, batch) <= 1
        compiled.append(len(compile_causal.known))
    assert compiled[0] > 0 and len(set(compiled)) == 1
