"""Latent attention of the GPU backend against plain torch, in Triton's interpreter.

A reference replaces flash-attn-4. The tests run in a separate process, since TRITON_INTERPRET must
be set before triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced
from nanovllm_kernels.attention.latent_decode import DECODE
from nanovllm_kernels.attention.latent_reference import row_size, stored
from torch import Tensor

from nanovllm.attention import BACKENDS, latent_rows
from nanovllm.attention.base import Batch
from nanovllm.attention.flash import FlashPaged
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.latent import LatentHeads, Latents
from nanovllm.attention.latent_rows import Absorbed, newest_of, spans_of
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.attention.triton import TritonPaged
from nanovllm.config import Kernels, Speculate
from nanovllm.plan import Chunk
from nanovllm.registry import resolve
from tests.attention.paged_batches import make_batch
from tests.interpreted import in_interpreter, in_parent, passes
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import WholeEngine, prompts_of

CPU = torch.device("cpu")
HEADS, KEY, ROTATED, VALUE, RANK, PAGE = 3, 16, 8, 24, 32, 16
ROWS = {
    "decode": ((90, 17, 64, 7), (1, 1, 1, 1), 1),
    "drafts": ((90, 17, 64, 7), (1, 4, 3, 2), 4),
    "chunks": ((90, 17, 64, 50, 70), (40, 17, 1, 50, 3), 0),
    "mixed": ((90, 17, 130, 7, 50, 33), (1, 1, 40, 7, 20, 2), 1),
}


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 28)


def attend_by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_R1: Tensor,
    k_starts_R1: Tensor,
    scale: float,
    out_THA: Tensor,
    *,
    is_causal: bool,
) -> Tensor:
    """Compute the same as flash_expanded. Its tiles multiply values of other rows by 0."""
    lse_HT = torch.full(q.shape[1::-1], torch.nan)
    spans = zip(pairwise(starts_R1.tolist()), pairwise(k_starts_R1.tolist()), strict=True)
    for (start, stop), (k_start, k_stop) in spans:
        assert k_stop > k_start
        keys, values = k[k_start:k_stop].float(), v[k_start:k_stop].float()
        scores = scale * torch.einsum("tha,lha->htl", q[start:stop].float(), keys)
        if is_causal:
            scores += torch.full(scores.shape[1:], -torch.inf).triu(
                1 + k_stop - k_start - stop + start
            )
        lse_HT[:, start:stop] = scores.logsumexp(2)
        beside = 0 * v[k_stop : k_stop + 64].float().sum(0)
        sums = torch.einsum("htl,lha->tha", scores.softmax(2), values) + beside
        out_THA[start:stop] = sums.to(out_THA.dtype)
    return lse_HT


def made(
    name: str, dtype: torch.dtype, *, is_fp8: bool = False
) -> tuple[Tensor, Latents, PagedKV, Batch]:
    lengths, new, width = ROWS[name]
    size = HEADS, 1, RANK + ROTATED
    q_THA, paged, batch = make_batch(lengths, new, size, PAGE, dtype, CPU, width=max(width, 1))
    if width == 0:
        planned = [Chunk(0, n, True, start=c - n) for c, n in zip(lengths, new, strict=True)]
        batch = replace(batch, num_decodes=0, num_decode_tokens=0, planned=planned)
    slots = [
        batch.page_table_RM[row, at // PAGE] * PAGE + at % PAGE
        for row, (length, count) in enumerate(zip(lengths, new, strict=True))
        for at in range(length - count, length)
    ]
    batch = replace(batch, slot_mapping_T=torch.tensor(slots))
    both = torch.randn(HEADS, KEY + VALUE, RANK, generator=torch.Generator().manual_seed(3))
    pages, like = paged.k_PSGA[:, :, 0], paged.k_PSGA[..., :0]
    if is_fp8:
        bytes_ = torch.empty(1, 1, row_size(RANK, ROTATED, is_fp8=True), dtype=torch.uint8)
        rows = stored(*pages.flatten(0, 1).split([RANK, ROTATED], 1), bytes_)
        pages = rows.unflatten(0, (-1, PAGE))
    cache = Latents(pages, *(both / 4).to(dtype).split([KEY, VALUE], 1), 0.3)
    return q_THA[..., : KEY + ROTATED].contiguous(), cache, PagedKV(paged.k_PSGA, like), batch


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    most = 1e-5 if dtype == torch.float32 else 0.03
    assert (found.float() - expected.float()).abs().max() <= most * expected.abs().max()


ABSORBED = [
    *product(("decode", "drafts"), (torch.float32, torch.bfloat16), (False, True)),
    ("chunks", torch.float32, False), ("chunks", torch.bfloat16, True),
    ("mixed", torch.float32, True), ("mixed", torch.bfloat16, False),
]  # fmt: skip


@in_interpreter
@pytest.mark.parametrize(("name", "dtype", "is_fp8"), ABSORBED)
def test_absorbed(name: str, dtype: torch.dtype, is_fp8: bool) -> None:
    q_THA, cache, like, batch = made(name, dtype, is_fp8=is_fp8)
    expected = TorchPaged(like).bind(batch)(cache, q_THA)
    heads = LatentHeads()
    heads.cache = cache
    out_THA = heads.empty(q_THA)
    attend = TritonPaged(like, DECODE, "latent").bind(batch)
    assert attend(cache, q_THA, out_THA) is out_THA
    close(out_THA, expected, torch.bfloat16 if is_fp8 else dtype)
    assert torch.equal(attend(cache, q_THA), out_THA)


@in_interpreter
@pytest.mark.parametrize("piece", [7, 16, 4096])
def test_expanded(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are many pieces, of several rows or of one row, in 16 bits and in 8 bits."""
    import nanovllm_kernels.attention.flash_prefill

    pieces = []

    def counted(*args: Any, is_causal: bool, **kwargs: Any) -> Tensor:
        pieces.append(is_causal)
        return attend_by_hand(*args, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(nanovllm_kernels.attention.flash_prefill, "flash_expanded", counted)
    monkeypatch.setattr(latent_rows, "PIECE", piece)
    monkeypatch.setattr(latent_rows, "SLOWER", 1e9)
    for name in ("chunks", "mixed"):
        for is_fp8 in (False, True):
            q_THA, cache, like, batch = made(name, torch.bfloat16, is_fp8=is_fp8)
            expected = TorchPaged(like).bind(batch)(cache, q_THA)
            pieces.clear()
            attend = FlashPaged(like, DECODE, "latent").bind(batch)
            close(attend(cache, q_THA), expected, torch.bfloat16)
            cached = [chunk.start for chunk in batch.planned]
            older = [a - b for a, b in zip(cached, newest_of(cached), strict=True)]
            assert pieces == [True] + [False] * len(list(spans_of(older)))
            assert (len(pieces) >= 3) == (piece < 100)


@in_interpreter
@pytest.mark.parametrize("rotated", [8, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_parts_reach_all_heads_bit_by_bit(rotated: int, dtype: torch.dtype) -> None:
    """Copies have eight bytes, or one element for odd sizes."""
    pages_PSX = torch.randn(3, PAGE, RANK + rotated).to(dtype)
    key, value = torch.randn(HEADS, KEY, RANK).to(dtype), torch.randn(HEADS, VALUE, RANK).to(dtype)
    slots, q_THA = torch.tensor([20, 3, 47]), torch.zeros(3, HEADS, KEY + rotated, dtype=dtype)
    k_TGA, v_TGA = latent_rows.expanded(Latents(pages_PSX, key, value, 1.0), slots, q_THA)
    rows_TX = pages_PSX.flatten(0, 1)[slots]
    assert torch.equal(k_TGA[..., KEY:], rows_TX[:, None, RANK:].expand(-1, HEADS, -1))
    close(k_TGA[..., :KEY], torch.einsum("tx,hax->tha", rows_TX[:, :RANK], key), dtype)
    close(v_TGA, torch.einsum("tx,hax->tha", rows_TX[:, :RANK], value), dtype)


@in_interpreter
@pytest.mark.parametrize("piece", [7, 16, 4096])
def test_what_is_no_number_stays_its_rows_own(piece: int, monkeypatch) -> None:
    """The NaN is in a row's latents, whose values follow those of another row."""
    import nanovllm_kernels.attention.flash_prefill

    monkeypatch.setattr(nanovllm_kernels.attention.flash_prefill, "flash_expanded", attend_by_hand)
    monkeypatch.setattr(latent_rows, "PIECE", piece)
    monkeypatch.setattr(latent_rows, "SLOWER", 1e9)
    q_THA, cache, like, batch = made("chunks", torch.float32)
    monkeypatch.setattr(latent_rows, "can_expand", lambda *_: True)
    expected = FlashPaged(like, DECODE, "latent").bind(batch)(cache, q_THA)
    cache.pages_PSX[batch.page_table_RM[3, 0], 2, 5] = torch.nan
    found = FlashPaged(like, DECODE, "latent").bind(batch)(cache, q_THA)
    own = slice(*batch.starts_R1[3:5].tolist())
    assert found[own][2:].isnan().all()  # from this token on
    found[own] = expected[own]
    assert torch.equal(found, expected)


@in_interpreter
@pytest.mark.parametrize("cached", ["auto", "fp8"])
def test_a_whole_engine_writes_the_same_text(cached: str, tmp_path: Path) -> None:
    """There are chunks next to decode rows, drafts, and prompts with cached pages."""
    family, overrides = CASES["deepseek_v3 tied"]
    make_tiny(tmp_path, family, **overrides)
    config, drafts = config_of(tmp_path), Speculate(method="ngram", tokens=3, min_match=1)
    texts = []
    for attention in ("torch", "triton"):
        recipe = replaced(config.recipe, device="cpu", kernels=Kernels(attention=attention))
        engine = WholeEngine(
            replaced(config, recipe=recipe),
            page_tokens=16,
            slots=3,
            step_tokens=24,
            cache_dtype=cached,
            speculate=drafts,
        )
        for i, prompt in enumerate(prompts_of(3, seed=1)):
            engine.submit(i, prompt, 4)
            engine.loop.step()
        engine.run()
        assert type(engine.runner.backend) is resolve(BACKENDS, attention)
        texts.append(engine.text)
    assert texts[0] == texts[1] and all(len(text) == 4 for text in texts[0].values())


def test_few_tokens_are_absorbed_and_many_expanded() -> None:
    """All rows together decide. Sizes that are no multiple of 8 are always absorbed."""
    q_THA, cache, _, batch = made("chunks", torch.bfloat16)

    def is_cheaper(*rows: tuple[int, int], wide: int = 24) -> bool:
        planned = [Chunk(0, new, True, start=start) for start, new in rows]
        like = q_THA.new_empty(1, 128, 192)
        sizes = torch.empty(128, 128, 512), torch.empty(128, 128 if wide == 24 else wide, 512)
        of = cache._replace(key_HAX=sizes[0], value_HAX=sizes[1])
        return latent_rows.expands_cheaper(replace(batch, planned=planned, max_new=1), of, like)

    assert not is_cheaper((10_000, 60)) and is_cheaper((10_000, 100))
    assert not is_cheaper((10_000, 60), (0, 70)) and is_cheaper((10_000, 60), (0, 2000))
    assert is_cheaper(*[(0, 100)] * 11), "more than MOST_ABSORBED"
    assert not is_cheaper((0, 1)) and not is_cheaper((0, 500), wide=12)
    kinds = (192, 128, "bfloat16"), (264, 128, "bfloat16"), (192, 128, "float32")
    assert [latent_rows.can_expand(*kind) for kind in kinds] == [True, False, False]


def test_pieces_end_where_rows_without_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_rows, "PIECE", 10)
    assert list(spans_of([])) == list(spans_of([0, 0])) == []
    assert list(spans_of([3, 4])) == [(0, 2, 0, 7)]
    assert list(spans_of([0, 3, 0, 4, 6, 1])) == [(1, 2, 0, 3), (3, 5, 3, 13), (5, 6, 13, 14)]
    assert list(spans_of([25, 0, 2])) == [
        (0, 1, 0, 10), (0, 1, 10, 20), (0, 1, 20, 25), (2, 3, 25, 27)
    ]  # fmt: skip
    assert list(spans_of([10, 10])) == [(0, 1, 0, 10), (1, 2, 10, 20)]


def test_the_newest_tokens_of_the_first_rows_are_expanded_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent_rows, "PIECE", 10)
    assert newest_of([]) == [] and newest_of([0, 3, 0]) == [0, 3, 0]
    assert newest_of([4, 0, 9, 1]) == [4, 0, 6, 0]
    assert newest_of([25, 2]) == [10, 0]


def test_a_kernel_that_is_not_for_these_heads_is_passed_over() -> None:
    def obstacle(**kind: object) -> str:
        assert kind == {
            "num_heads": HEADS, "rank": RANK, "rotated": ROTATED, "page_tokens": PAGE,
            "dtype": torch.float32, "is_fp8": False,
        }  # fmt: skip
        return "no"

    never = replace(DECODE, obstacle=obstacle)
    _, cache, _, batch = made("decode", torch.float32)
    rows = Absorbed(never, batch.page_table_RM, batch.lengths_R, None, 1)
    assert rows.fitting(cache, torch.empty(4, HEADS, KEY + ROTATED)) is DECODE
