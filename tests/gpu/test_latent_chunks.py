"""Prompt chunks over latents of R1's shape on a GPU: flash-attn-4, and expanded against absorbed.

Run as a program, it prints the times of both ways for some chunks, and their peak memory:

    python -m tests.gpu.test_latent_chunks
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from nanovllm_kernels.attention.latent_decode import DECODE
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.attention.latent import Latents
from nanovllm.attention.latent_rows import Expanded, absorbed_chunks
from nanovllm.plan import Chunk
from tests.attention.paged_batches import make_batch

HEADS, KEY, ROTATED, VALUE, RANK, PAGE = 128, 128, 64, 128, 512, 128
CUDA = torch.device("cuda")
Rows = list[tuple[int, int]]  # of each chunk: cached tokens, new tokens
TIMED: list[Rows] = [
    *([(0, new)] for new in (64, 128, 256, 512, 1024)),
    [(0, 128)] * 8,
    *([(1024, new)] for new in (64, 128)),
    *([(4096, new)] for new in (32, 64, 128, 512)),
    *([(16384, new)] for new in (64, 128, 512)),
    [(5000, 3000), *[(0, 1000)] * 4],
    [(3808, 192), (0, 4000), (0, 4000)],
    [(24576, 8192)],
]
MOST_ABSORBED = 4096  # tokens; more would need gigabytes


def made(rows: Rows, device: torch.device, heads: int = HEADS) -> tuple[Tensor, Latents, Batch]:
    lengths, new = [start + count for start, count in rows], [count for _, count in rows]
    q_THA, paged, batch = make_batch(
        lengths, new, (heads, 1, RANK + ROTATED), PAGE, torch.bfloat16, device
    )
    generator = torch.Generator(device).manual_seed(0)
    both = torch.randn(heads, KEY + VALUE, RANK, generator=generator, device=device) / 16
    cache = Latents(paged.k_PSGA[:, :, 0], *both.bfloat16().split([KEY, VALUE], 1), 0.08)
    slots = torch.cat(
        [
            batch.page_table_RM[row, at // PAGE].long() * PAGE + at % PAGE
            for row, (start, count) in enumerate(rows)
            for at in [torch.arange(start, start + count, device=device)]
        ]
    )
    planned = [Chunk(0, count, True, start=start) for start, count in rows]
    batch = replace(
        batch, slot_mapping_T=slots, planned=planned, num_decodes=0, num_decode_tokens=0
    )
    return q_THA[..., : KEY + ROTATED].contiguous(), cache, batch


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [TIMED[1], TIMED[5], TIMED[10], [(300, 17), (0, 5), (5000, 200)]])
def test_expanded_is_absorbed(rows: Rows) -> None:
    difference(rows, CUDA)


def difference(rows: Rows, device: torch.device, heads: int = HEADS) -> None:
    q_THA, cache, batch = made(rows, device, heads)
    found, expected = (
        way(cache, q_THA, q_THA.new_full((*q_THA.shape[:2], VALUE), torch.nan)).float()
        for way in (Expanded(batch, 0, PAGE), absorbed_chunks(batch, 0, DECODE))
    )
    assert (found - expected).abs().max() <= 0.03 * expected.abs().max()


@pytest.mark.gpu
def test_what_is_no_number_stays_its_rows_own(device: torch.device = CUDA) -> None:
    """flash-attn-4 multiplies values of whole tiles, and rows are adjacent."""
    (q_THA, cache, batch), found = made([(0, 130), (0, 5), (300, 17)], device), []
    for latent in (0.0, torch.nan):
        cache.pages_PSX[batch.page_table_RM[1, 0], 0, :RANK] = latent
        out_THA = q_THA.new_zeros(*q_THA.shape[:2], VALUE)
        found.append(Expanded(batch, 0, PAGE)(cache, q_THA, out_THA))
    sound, spoilt = (out_THA.split([130, 5, 17]) for out_THA in found)
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[0], sound[0]) and torch.equal(spoilt[2], sound[2])


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("new", "lengths"),
    [((1, 130, 257, 64), (1, 130, 300, 500)), ((3, 128, 64), (64, 333, 64)), ((700,), (1100,))],
)
def test_flash_attn_alone(
    new: tuple[int, ...], lengths: tuple[int, ...], is_causal: bool, device: torch.device = CUDA
) -> None:
    """Means and logarithms of sums are checked, for rows that end inside tiles."""
    from nanovllm_kernels.attention.flash_prefill import flash_expanded

    sizes = (sum(new), KEY + ROTATED), (sum(lengths), KEY + ROTATED), (sum(lengths), VALUE)
    q, k, v = (torch.randn(n, 16, width, device=device).bfloat16() for n, width in sizes)
    starts, k_starts = (
        torch.tensor([0, *each]).cumsum(0).int().to(device) for each in (new, lengths)
    )
    out = torch.full((sum(new), 16, VALUE), torch.nan, device=device).bfloat16()
    lse_HT = flash_expanded(q, k, v, starts, k_starts, 0.09, out, is_causal=is_causal)
    rows = zip(q.split(new), k.split(lengths), v.split(lengths), strict=True)
    at = 0
    for queries, keys, values in rows:
        scores = 0.09 * torch.einsum("tha,lha->htl", queries.float(), keys.float())
        if is_causal:
            unseen = torch.full_like(scores[0], -torch.inf).triu(1 + len(keys) - len(queries))
            scores = scores + unseen
        expected = torch.einsum("htl,lha->tha", scores.softmax(2), values.float())
        here = slice(at, at + len(queries))
        torch.testing.assert_close(lse_HT[:, here], scores.logsumexp(2), rtol=0, atol=1e-3)
        torch.testing.assert_close(out[here].float(), expected, rtol=0, atol=0.03)
        at += len(queries)


def microseconds(call: Callable[[], object]) -> float:
    call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(3):
        call()
    last.record()
    last.synchronize()
    return 1000 * first.elapsed_time(last) / 3


def main() -> None:
    for rows in TIMED:
        q_THA, cache, batch = made(rows, CUDA)
        out_THA, said = q_THA.new_empty(*q_THA.shape[:2], VALUE), []
        pairs = HEADS * sum(count * (2 * start + count) for start, count in rows)
        for name, way, each in (
            ("absorbed", absorbed_chunks(batch, 0, DECODE), 2 * RANK + ROTATED),
            ("expanded", Expanded(batch, 0, PAGE), KEY + ROTATED + VALUE),
        ):
            if name == "absorbed" and len(q_THA) > MOST_ABSORBED:
                continue
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            us = microseconds(lambda way=way, of=(cache, q_THA, out_THA): way(*of))
            room = (torch.cuda.max_memory_allocated() - before) / 1e9
            said.append(f"{name} {us:8.0f} us {pairs * each / us / 1e6:4.0f} TFLOP/s {room:.2f} GB")
        sys.stdout.write(f"{str(rows)[:40]:40s} {'  '.join(said)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
