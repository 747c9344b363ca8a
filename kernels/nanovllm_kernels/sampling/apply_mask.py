"""Grammar masks on logits: tokens whose bit is 0 get -inf, in place.

Bit i of word w of a row belongs to token 32 * w + i. Tokens after the last word are unchanged.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal

BLOCK = 64  # words per program


def apply_mask(logits_SV: Tensor, rows_W: Tensor, words_WX: Tensor) -> None:
    """Mask the rows rows_W (int64) of the logits with the bits of words_WX (int32)."""
    (num_rows, num_words), vocab = words_WX.shape, logits_SV.shape[1]
    assert logits_SV.stride(1) == 1 and words_WX.is_contiguous()
    grid = (num_rows, triton.cdiv(num_words, BLOCK))
    apply_mask_kernel[grid](
        logits_SV, rows_W, words_WX, logits_SV.stride(0), num_words, vocab, BLOCK=BLOCK
    )


@triton.jit
def apply_mask_kernel(logits_SV, rows_W, words_WX, stride, num_words, vocab, BLOCK: tl.constexpr):
    nth = tl.program_id(0)
    row = tl.load(rows_W + nth).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    mask_word = tl.load(words_WX + nth.to(tl.int64) * num_words + word, inside, -1)
    bit = tl.arange(0, 32)[None, :]
    token = word[:, None] * 32 + bit
    is_forbidden = (mask_word[:, None] >> bit & 1) == 0
    lowest = tl.full([BLOCK, 32], -float("inf"), logits_SV.dtype.element_ty)
    tl.store(logits_SV + row * stride + token, lowest, is_forbidden & (token < vocab))


def reference(logits_SV: Tensor, rows_W: Tensor, words_WX: Tensor) -> None:
    bits_X = torch.arange(32, dtype=torch.int32, device=logits_SV.device)
    allowed_WV = (words_WX[:, :, None] >> bits_X & 1).flatten(1)[:, : logits_SV.shape[1]].bool()
    most = allowed_WV.shape[1]
    logits_SV[rows_W, :most] = logits_SV[rows_W, :most].masked_fill(~allowed_WV, -torch.inf)


def inputs(S: int, W: int, V: int, spare: int, dtype: torch.dtype, device: torch.device) -> Args:
    """Return inputs whose masks are `spare` words shorter than the vocabulary, or longer if < 0."""
    generator = torch.Generator().manual_seed(3)
    rows_W = torch.randperm(S, generator=generator)[:W]
    shape = W, -(-V // 32) - spare
    words_WX = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int32)
    logits_SV = normal(device, S, V, dtype=dtype)
    return logits_SV, rows_W.to(device), words_WX.to(device)


def outputs(result: None, args: Args) -> Tensors:
    """Return a table of the impossible tokens, and the logits with a finite lower bound."""
    logits_SV = args[0]
    return (logits_SV == -torch.inf).int(), logits_SV.clamp_min(-1e4)


def cases() -> tuple[Case, ...]:
    shapes = [(1, 1, 33, 0), (5, 3, 4001, 0), (5, 5, 4000, 2), (3, 2, 100, -3)]
    checked = [
        Case(f"S={S} W={W} V={V} spare={n} {bits(dtype)}", partial(inputs, S, W, V, n, dtype), True)
        for S, W, V, n in shapes
        for dtype in (torch.bfloat16, torch.float32)
    ]
    timed = [
        Case(
            f"S={S} W={S} V=151936",
            partial(inputs, S, S, 151936, 0, torch.bfloat16),
            num_bytes=S * 151936 // 8 + S * 151936,  # half of the tokens are forbidden
        )
        for S in (1, 64, 256)
    ]
    return (*checked, *timed)


APPLY_MASK = Kernel("apply_mask", apply_mask, reference, cases(), outputs=outputs)
