"""An engine with expanded chunks, piecewise graphs and drafts, with flash-attn-4 replaced.

The steps are those of tests/gpu/test_latent.py, with a stand-in in plain torch.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import nanovllm_kernels.attention.flash_prefill
import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.attention import latent_reference
from nanovllm_kernels.attention.paged_decode import DecodeKernel
from torch import Tensor

from nanovllm.attention import choose, latent_rows
from nanovllm.attention.flash import FlashPaged
from nanovllm.config import Kernels
from nanovllm.layers.latent_attention import LatentAttention
from tests.gpu.test_latent import Made, agree, engine_of, in_small_pieces, made
from tests.runner.tape import capture_on_tapes

TILE = 128  # keys per tile of a thread block


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    starts: Tensor,
    k_starts: Tensor,
    *unused: object,
    is_causal: bool,
) -> None:
    """Compute the same as flash-attn-4's forward kernel, for rows of any lengths.

    The last query sees the last key. lse is [head, token], natural, of scaled scores. Keys and
    values are loaded in whole tiles; those of the next row in a tile have masked scores, and values
    times 0.
    """
    assert q.stride(2) == k.stride(2) == v.stride(2) == out.stride(2) == lse.stride(1) == 1
    assert {starts.dtype, k_starts.dtype} == {torch.int32} and lse.dtype == torch.float32
    assert all(x is None or x == (None, None) for x in unused) and len(unused) == 10
    for (start, stop), (k_start, k_stop) in zip(
        pairwise(starts.tolist()), pairwise(k_starts.tolist()), strict=True
    ):
        assert stop > start and k_stop > k_start
        end = k_start - (k_start - k_stop) // TILE * TILE
        keys, values = k[k_start:end].float(), v[k_start:end].float()
        scores = scale * torch.einsum("tha,lha->htl", q[start:stop].float(), keys)
        last = torch.full((stop - start,), k_stop - k_start)
        if is_causal:
            last += torch.arange(1 + start - stop, 1)
        scores.masked_fill_(torch.arange(len(keys)) >= last[:, None], -torch.inf)
        lse[:, start:stop] = scores.logsumexp(2)
        out[start:stop] = torch.einsum("htl,lha->tha", scores.softmax(2), values).to(out.dtype)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("expanded"))


@pytest.mark.parametrize(
    ("cached", "drafts"), [("auto", False), ("auto", True), ("fp8", True)], ids=str
)
def test_expanded_chunks_agree_with_the_reference(
    tiny: Made, cached: str, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0, 0]

    def compiled(size: int, v_size: int, dtype: str, kind: int) -> Any:
        assert (size, v_size, dtype) == (192, 128, "bfloat16")

        def run(*args: Any) -> None:
            calls[kind] += 1
            flash_attn(*args, is_causal=bool(kind))

        return run

    def decode(q_THX: Tensor, *rows: Any, **ragged: Any) -> Tensor:
        return latent_reference.latent_decode(q_THX, *rows, **ragged).to(q_THX.dtype)

    decoding = DecodeKernel(plan=lambda *_: None, attend=decode, max_width=sys.maxsize)
    monkeypatch.setattr(nanovllm_kernels.attention.flash_prefill, "compile_expanded", compiled)
    monkeypatch.setattr(LatentAttention, "jobs", lambda *_: [])
    monkeypatch.setattr(FlashPaged, "supports", staticmethod(lambda *_: None))
    monkeypatch.setattr(choose, "decode_kernel", lambda *_: decoding)
    monkeypatch.setattr(latent_rows, "TRITON_DECODE", decoding)
    in_small_pieces(monkeypatch)
    recipe = replace(tiny[0].recipe, dtype="bfloat16", kernels=Kernels(attention="flash"))
    engine = engine_of(replace(tiny[0], recipe=recipe), cached, drafts=drafts)
    capture_on_tapes(engine.runner, [32, 64, 96])
    agree(tiny, engine, cached, drafts=drafts)
    modes = engine.runner.steps_by_mode
    assert modes["PIECEWISE/mixed"] > 10 and modes["NONE/mixed"] == 0
    assert min(calls) > 50 and calls[1] % 3 == 0
