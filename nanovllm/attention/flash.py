"""Attention of prompt chunks by flash-attn-4; decode rows go to our own kernel.

Decision: the Hopper kernel is compiled here, once per number of query heads, with every size left
open, and called directly. The package's own entry point spends about a thousand lines of Python per
layer and step on choices that never change in a running engine, and compiles by the batch's sizes.
Compiling is tied to that kernel's signature, so the package's version is pinned by a test that
compiles without a GPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from nanovllm_kernels import paged_decode as triton_decode
from torch import Tensor

from nanovllm.attention.base import Attend, Batch, PagedKV
from nanovllm.attention.paged import DecodeKernel, bind_rows
from nanovllm.kv.layout import CacheLayout

HOPPER = 9
MAX_HEAD_WIDTH = 256
# Windows, sinks, sparse blocks, other scores' tensors and scalars, schedules: a kernel that comes
# from the disk knows no defaults.
UNUSED = (None, None, None, None, (None, None), None, None)


class FlashPaged:
    name = "flash"

    def __init__(self, caches: tuple[PagedKV, ...], decode: DecodeKernel = triton_decode) -> None:
        self.caches = caches
        self.decode = decode
        self._compiled: dict[int, Callable[..., None]] = {}  # by number of query heads

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Why not, or None."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
            return "flash-attn-4 is used on Hopper GPUs only"
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            return "the package flash-attn-4 is not installed"
        for group in layout.paged:
            if group.bytes_per_element != 2:
                return "flash-attn-4 computes in bfloat16; the cache is wider"
            if max(group.k_width, group.v_width) > MAX_HEAD_WIDTH or group.k_width % 16:
                return f"head width {group.k_width} is not a multiple of 16 up to {MAX_HEAD_WIDTH}"
        return None

    def bind(self, batch: Batch) -> Attend:
        return bind_rows(self.caches, batch, partial(FlashAttend, self), self.decode)

    def forward(self, num_heads: int) -> Callable[..., None]:
        """Compiles on first use, for seconds: the engine's warm-up is to get here first."""
        if num_heads not in self._compiled:
            from nanovllm_kernels.kept import kept

            page_tokens, num_kv_heads, width = (k_PSGA := self.caches[0].k_PSGA).shape[1:]
            shape = num_heads // num_kv_heads, page_tokens, width
            dtype = str(k_PSGA.dtype).removeprefix("torch.")
            self._compiled[num_heads] = kept(compile_causal)(*shape, dtype)
        return self._compiled[num_heads]


@dataclass(frozen=True, slots=True)
class FlashAttend:
    backend: FlashPaged
    batch: Batch

    def __call__(self, layer: int, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        cache, batch = self.backend.caches[layer], self.batch
        o_THA = torch.empty_like(q_THA) if out_THA is None else out_THA
        self.backend.forward(q_THA.shape[1])(
            q_THA,
            cache.k_PSGA,
            cache.v_PSGA,
            o_THA,
            None,
            1 / math.sqrt(q_THA.shape[2]),
            batch.starts_R1,
            None,
            None,
            batch.lengths_R,
            batch.page_table_RM,
            *UNUSED,
        )
        return o_THA


def compile_causal(
    group: int, page_tokens: int, width: int, dtype_name: str
) -> Callable[..., None]:
    """The causal forward kernel for `group` query heads per key/value head.

    Its arguments: q, k, v, o, no log-sum-exp, the scale, where each row's queries start, None,
    None, the rows' lengths, the page table, UNUSED. Needs no GPU, only to know of one.
    """
    import cutlass
    from cutlass import cute
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
    from flash_attn.cute.interface import _tile_size_fwd_sm90
    from quack.compile_utils import make_fake_stream, make_fake_tensor

    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype_name]
    tiles = _tile_size_fwd_sm90(width, width, True, False)
    kernel = FlashAttentionForwardSm90(
        dtype,
        width,
        width,
        group,
        is_causal=True,
        pack_gqa=group > 1,
        tile_m=tiles.m_block_size,
        tile_n=tiles.n_block_size,
        num_stages=2,
        num_threads=384,
        intra_wg_overlap=tiles.intra_wg_overlap,
        mma_pv_is_rs=tiles.mma_pv_is_rs,
        paged_kv_non_tma=page_tokens != tiles.n_block_size,
    )

    def like(rank: int, dtype: Any) -> Any:  # noqa: ANN401
        """A tensor of any sizes; 16-bit ones aligned to 16 bytes, as torch allocates them."""
        sizes = tuple(cute.sym_int() for _ in range(rank))
        return make_fake_tensor(dtype, sizes, 8 if dtype.width == 16 else 1)

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of an unused argument
        compiled: Callable[..., None] = cute.compile(
            kernel,
            like(3, dtype),
            like(4, dtype),
            like(4, dtype),
            like(3, dtype),
            None,
            1.0,
            like(1, cutlass.Int32),
            None,
            None,
            like(1, cutlass.Int32),
            like(2, cutlass.Int32),
            stream=make_fake_stream(),
            options="--enable-tvm-ffi",
        )
    return compiled
