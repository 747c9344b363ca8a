"""Latent attention: absorbed equals expanded, in pieces or not, and only latents are cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.attention import latent
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.latent import LatentHeads, Latents, absorbed, expanded
from nanovllm.attention.torch_ref import TorchPaged
from tests.attention.paged_batches import make_batch

CPU = torch.device("cpu")
HEADS, KEY, ROTATED, VALUE, RANK = 5, 6, 4, 7, 9
SCALE = 0.3


def by_hand(q_NHA: Tensor, latents_CX: Tensor, cache: Latents) -> Tensor:
    """Return the attention of one row. Each query sees all tokens up to its own."""
    keys_CHA = torch.einsum("cx,hax->cha", latents_CX[:, :RANK], cache.key_HAX)
    rotated_CHA = latents_CX[:, None, RANK:].expand(-1, HEADS, -1)
    values_CHA = torch.einsum("cx,hax->cha", latents_CX[:, :RANK], cache.value_HAX)
    scores_NHC = SCALE * torch.einsum("nha,cha->nhc", q_NHA, torch.cat([keys_CHA, rotated_CHA], 2))
    num_new, length = len(q_NHA), len(latents_CX)
    ahead = torch.arange(length) > torch.arange(length - num_new, length)[:, None]
    weights_NHC = scores_NHC.masked_fill(ahead[:, None], -torch.inf).softmax(-1)
    return torch.einsum("nhc,cha->nha", weights_NHC, values_CHA)


def halves(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    both = torch.randn(HEADS, KEY + VALUE, RANK, dtype=dtype, generator=generator)
    return both[:, :KEY], both[:, KEY:]


@pytest.mark.parametrize("piece", [3, 16, 1024])
@pytest.mark.parametrize(("num_new", "length"), [(1, 1), (1, 40), (4, 33), (20, 20), (7, 50)])
def test_absorbed_is_expanded(
    num_new: int, length: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "PIECE", piece)
    generator = torch.Generator().manual_seed(length)
    shape = 3, num_new, HEADS, KEY + ROTATED
    q_RNHA = 4 * torch.randn(shape, dtype=torch.float64, generator=generator)
    latents_RCX = torch.randn(3, length, RANK + ROTATED, dtype=torch.float64, generator=generator)
    cache = Latents(torch.empty(0), *halves(torch.float64, generator), SCALE)
    last = torch.arange(length - num_new, length)
    seen = (torch.arange(length) <= last[:, None]).expand(3, 1, -1, -1)
    found = [way(q_RNHA, latents_RCX, seen, cache) for way in (absorbed, expanded)]
    hand = torch.stack([by_hand(*row, cache) for row in zip(q_RNHA, latents_RCX, strict=True)])
    for o_RNHA in found:
        assert o_RNHA.shape == (3, num_new, HEADS, VALUE)
        assert (o_RNHA - hand).abs().max() < 1e-10 * hand.abs().max()


class Largest(TorchDispatchMode):
    """Mode that records the largest new memory of any operation."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)]
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("way", [absorbed, expanded])
@pytest.mark.parametrize("num_new", [1, 2, 70])
def test_no_more_is_made_of_a_long_context_than_of_a_piece(
    way: Callable[..., Tensor], num_new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tensor is scores of a piece, its keys and values, or queries.

    With latents repeated for each head it would be 5 * 13 * 4 bytes for each of 4,000 tokens.
    """
    monkeypatch.setattr(latent, "PIECE", 64)
    generator = torch.Generator().manual_seed(1)
    cache = Latents(torch.empty(0), *halves(torch.float32, generator), SCALE)
    q_RNHA = torch.zeros(1, num_new, HEADS, KEY + ROTATED)
    most = []
    for length in (128, 4000):
        latents_RCX = torch.zeros(1, length, RANK + ROTATED)
        seen = torch.ones(1, 1, num_new, length, dtype=torch.bool)
        with Largest() as largest:
            way(q_RNHA, latents_RCX, seen, cache)
        most.append(largest.num_bytes)
    of_piece = HEADS * 4 * max(num_new * 64, 64 * VALUE)
    assert most[0] == most[1] <= of_piece


@pytest.mark.parametrize("way", [absorbed, expanded])
def test_scores_of_16_bit_numbers_are_not_rounded(way: Callable[..., Tensor]) -> None:
    """The scores are up to 40, where the last bit of bfloat16 is a quarter."""
    generator = torch.Generator().manual_seed(4)
    q_RNHA = 20 * torch.randn(2, 6, HEADS, KEY + ROTATED, generator=generator)
    latents_RCX = torch.randn(2, 300, RANK + ROTATED, generator=generator)
    narrow = [x.bfloat16() for x in (q_RNHA, latents_RCX, *halves(torch.float32, generator))]
    seen = torch.ones(2, 1, 6, 300, dtype=torch.bool)
    off = []
    for dtype in (torch.bfloat16, torch.float64):
        q, latents, *matrices = (x.to(dtype) for x in narrow)
        cache = Latents(torch.empty(0), *matrices, SCALE)
        off.append(way(q, latents, seen, cache).double())
    assert (off[0] - off[1]).norm() < 0.01 * off[1].norm()


@pytest.mark.parametrize("few", [0, 4, 128])
@pytest.mark.parametrize("into", [False, True])
def test_rows_of_a_step_read_their_own_pages(
    few: int, into: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are decode rows, rows with drafts, and chunks. Cells after a row's end do not count."""
    monkeypatch.setattr(latent, "FEW", few)
    lengths, new = (90, 17, 64, 7, 130, 50), (1, 3, 4, 1, 40, 50)
    shape = HEADS, 1, RANK + ROTATED
    q_THA, paged, batch = make_batch(lengths, new, shape, 16, torch.float32, CPU)
    q_THA = q_THA[..., : KEY + ROTATED].contiguous()
    generator = torch.Generator().manual_seed(3)
    cache = Latents(paged.k_PSGA[:, :, 0], *halves(torch.float32, generator), SCALE)
    heads = LatentHeads()
    heads.cache = cache
    attend = TorchPaged(PagedKV(paged.k_PSGA, paged.k_PSGA[..., :0])).bind(batch)
    out_THA = heads.empty(q_THA) if into else None
    o_THA = attend(cache, q_THA, out_THA)
    assert o_THA.shape == (sum(new), HEADS, VALUE) and (not into or o_THA is out_THA)
    for row, (length, count) in enumerate(zip(lengths, new, strict=True)):
        own = slice(int(batch.starts_R1[row]), int(batch.starts_R1[row]) + count)
        latents_CX = cache.pages_PSX[batch.page_table_RM[row].long()].flatten(0, 1)[:length]
        expected_NHA = by_hand(q_THA[own], latents_CX, cache)
        torch.testing.assert_close(o_THA[own], expected_NHA, rtol=1e-4, atol=1e-4)
