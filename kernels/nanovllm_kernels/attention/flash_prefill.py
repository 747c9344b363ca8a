"""Causal attention of prompt chunks over their pages, with flash-attn-4's kernel for Hopper.

Decision: that kernel is compiled here, once per number of query heads, with all sizes dynamic, and
called directly. The package's own entry point compiles by batch size. It also runs about a thousand
lines of Python per layer and step for choices that never change in a running engine. This code
depends on that kernel's signature, so a test that compiles without a GPU pins the package's
version.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from nanovllm_kernels.case import bits
from nanovllm_kernels.compile_cache import CachedCompile, Compiled

# Windows, sinks, sparse blocks, tensors and scalars of score modifiers, schedules. A kernel loaded
# from disk has no default arguments.
UNUSED = (None, None, None, None, (None, None), None, None)


def flash_prefill(
    q_THA: Tensor,
    k_PSGA: Tensor,
    v_PSGA: Tensor,
    page_table_RM: Tensor,
    starts_R1: Tensor,
    lengths_R: Tensor,
    out_THA: Tensor | None = None,
) -> Tensor:
    """Return o_THA, which is `out_THA` if given. Rows are the same as in paged_prefill.

    The first call compiles for seconds, so the engine's warm-up makes it.
    """
    (_, num_heads, width), (page_tokens, num_kv_heads) = q_THA.shape, k_PSGA.shape[1:3]
    o_THA = torch.empty_like(q_THA) if out_THA is None else out_THA
    group = num_heads // num_kv_heads
    compile_causal(group, page_tokens, width, bits(k_PSGA.dtype))(
        q_THA,
        k_PSGA,
        v_PSGA,
        o_THA,
        None,
        1 / math.sqrt(width),
        starts_R1,
        None,
        None,
        lengths_R,
        page_table_RM,
        *UNUSED,
    )
    return o_THA


def flash_expanded(
    q_THA: Tensor,
    k_TGA: Tensor,
    v_TGA: Tensor,
    starts_R1: Tensor,
    k_starts_R1: Tensor,
    scale: float,
    out_THA: Tensor,
    *,
    is_causal: bool,
) -> Tensor:
    """Fill out_THA and return lse_HT, the log-sum-exp of scores.

    Row r's queries are starts_R1[r]:starts_R1[r + 1]. Its keys are k_starts_R1[r]:k_starts_R1[r +
    1], at least one. A query sees all keys. If `is_causal`, the row's last query sees all, and each
    earlier one sees one key less. The first call compiles both kinds.
    """
    lse_HT = torch.empty(q_THA.shape[1::-1], dtype=torch.float32, device=q_THA.device)
    sizes = q_THA.shape[2], v_TGA.shape[2], bits(q_THA.dtype)
    kinds = [compile_expanded(*sizes, kind) for kind in (0, 1)]
    kinds[is_causal](
        q_THA,
        k_TGA,
        v_TGA,
        out_THA,
        lse_HT,
        scale,
        starts_R1,
        k_starts_R1,
        None,
        None,
        None,
        *UNUSED,
    )
    return lse_HT


@CachedCompile
def compile_causal(group: int, page_tokens: int, width: int, dtype_name: str) -> Compiled:
    """Compile the causal forward kernel for `group` query heads per key/value head.

    Its arguments are q, k, v, o, None (no log-sum-exp), the scale and the first query of each row.
    Then come None, None, the rows' lengths, the page table, and UNUSED. Needs no GPU if
    CUTE_DSL_ARCH is set.
    """
    return compiled_forward((width, width), dtype_name, group, page_tokens, is_causal=True)


@CachedCompile
def compile_expanded(size: int, v_size: int, dtype_name: str, is_causal: int) -> Compiled:
    """Compile the forward kernel without pages, for equal numbers of query, key and value heads.

    Its arguments are q, k, v, o, the log-sum-exp, the scale, the first query of each row, its first
    key, None, None, None, and UNUSED. Needs no GPU if CUTE_DSL_ARCH is set.
    """
    return compiled_forward((size, v_size), dtype_name, 1, 0, is_causal=bool(is_causal))


def compiled_forward(
    widths: tuple[int, int], dtype_name: str, group: int, page_tokens: int, *, is_causal: bool
) -> Compiled:
    """Compile the forward kernel. With `page_tokens` 0, keys and values have no pages."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90  # imports torch.compile
    from flash_attn.cute.interface import _tile_size_fwd_sm90
    from quack.compile_utils import make_fake_stream, make_fake_tensor

    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype_name]
    tiles = _tile_size_fwd_sm90(*widths, is_causal, False)
    kernel = FlashAttentionForwardSm90(
        dtype,
        *widths,
        group,
        is_causal=is_causal,
        pack_gqa=group > 1,
        tile_m=tiles.m_block_size,
        tile_n=tiles.n_block_size,
        num_stages=2,
        num_threads=384,
        intra_wg_overlap=tiles.intra_wg_overlap,
        mma_pv_is_rs=tiles.mma_pv_is_rs,
        paged_kv_non_tma=page_tokens not in (0, tiles.n_block_size),
    )

    def like(rank: int, dtype: Any) -> Any:  # noqa: ANN401
        """Return a tensor of any sizes. 16-bit ones are aligned to 16 bytes, as in torch."""
        sizes = tuple(cute.sym_int() for _ in range(rank))
        return make_fake_tensor(dtype, sizes, 8 if dtype.width == 16 else 1)

    starts = like(1, cutlass.Int32)
    rows = (starts, None, None, like(1, cutlass.Int32), like(2, cutlass.Int32))
    if page_tokens == 0:
        rows = (starts, like(1, cutlass.Int32), None, None, None)
    rank = 4 if page_tokens else 3
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about an unused argument
        compiled: Compiled = cute.compile(
            kernel,
            like(3, dtype),
            like(rank, dtype),
            like(rank, dtype),
            like(3, dtype),
            None if page_tokens else like(2, cutlass.Float32),
            1.0,
            *rows,
            stream=make_fake_stream(),
            options="--enable-tvm-ffi",
        )
    return compiled
