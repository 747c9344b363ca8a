"""Choice of the attention backend, made and logged once at start."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from nanovllm_kernels.device import is_hopper

from nanovllm.attention import BACKENDS
from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.grouped import PagedKV, pageless
from nanovllm.attention.invariant import InvariantGpu, InvariantTorch
from nanovllm.config import ConfigError, Kernels
from nanovllm.kv.layout import CacheKind, CacheLayout
from nanovllm.registry import resolve

if TYPE_CHECKING:  # the import loads Triton
    from nanovllm_kernels.attention.paged_decode import DecodeKernel

PREFERRED = {"cuda": ("flash", "triton", "torch"), "cpu": ("torch",)}  # by device type
DECODE: dict[CacheKind, dict[str, str]] = {  # the import of a CuTe DSL module takes a second
    "grouped": {
        "triton": "nanovllm_kernels.attention.paged_decode:DECODE",
        "cute": "nanovllm_kernels.attention.paged_decode_cute:DECODE",
    },
    "latent": {
        "triton": "nanovllm_kernels.attention.latent_decode:DECODE",
        "cute": "nanovllm_kernels.attention.latent_decode_cute:DECODE",
    },
}


def choose_backend(
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    layout: CacheLayout,
    page_tokens: int,
) -> tuple[AttentionBackend, Kernels, str]:
    """Return the backend, the resolved kernels, and the reasons against preferred backends.

    Raise ConfigError with the reason if the recipe names a backend that is not supported here.
    """
    passed_over: list[str] = []
    like = pageless(layout, page_tokens, dtype)
    if kernels.invariant:
        return invariant_backend(kernels, device, layout, like)
    choice = kernels.attention
    known = [name for name in PREFERRED[device.type] if name in BACKENDS]
    for name in known if choice == "auto" else (choice,):
        backend = resolve(BACKENDS, name)
        if (reason := backend.supports(device, layout, page_tokens)) is not None:
            passed_over.append(f"{name}: {reason}")
            continue
        decode = kernels.decode
        if name == "torch":
            if decode not in ("auto", "torch"):
                why = "on a CPU" if device.type == "cpu" else f"with kernels.attention {name}"
                raise ConfigError(f"kernels.decode is {decode}, but decode rows use torch {why}")
            chosen = replace(kernels, attention=name, decode=name)
            return backend(like), chosen, "; ".join(passed_over)
        if decode == "torch":
            raise ConfigError(f"kernels.decode is torch, but kernels.attention is {name}")
        if decode != "triton":
            reason = cute_obstacle(device, dtype, layout, page_tokens)
            if reason is not None and decode == "cute":
                raise ConfigError(f"kernels.decode is cute, but {reason}; use triton")
            passed_over += [f"decode by cute: {reason}"] if reason else []
            decode = "triton" if reason else "cute"
        chosen = replace(kernels, attention=name, decode=decode)
        kind = layout.paged[0].kind
        return backend(like, decode_kernel(kind, decode), kind), chosen, "; ".join(passed_over)
    raise ConfigError(f"kernels.attention: {'; '.join(passed_over)}")


def invariant_backend(
    kernels: Kernels, device: torch.device, layout: CacheLayout, like: PagedKV
) -> tuple[AttentionBackend, Kernels, str]:
    """Return the values of choose_backend for kernels.invariant.

    Raise ConfigError if the recipe names a backend, or no invariant one supports the model.
    """
    if device.type == "cpu":
        return InvariantTorch(like), replace(kernels, attention="torch", decode="torch"), ""
    for name in ("attention", "decode"):
        if (backend := getattr(kernels, name)) != "auto":
            raise ConfigError(f"kernels.{name} is {backend}, but kernels.invariant needs auto")
    page_tokens = like.k_PSGA.shape[1]
    if (reason := resolve(BACKENDS, "triton").supports(device, layout, page_tokens)) is not None:
        raise ConfigError(f"kernels.invariant is true, but {reason}")
    chosen = replace(kernels, attention="triton", decode="triton")
    return InvariantGpu(like, layout.paged[0].kind), chosen, ""


def cute_obstacle(
    device: torch.device, dtype: torch.dtype, layout: CacheLayout, page_tokens: int
) -> str | None:
    """Return the reason why the CuTe DSL kernel cannot compute decode rows, or None."""
    if not is_hopper(device):
        return "it is for Hopper GPUs"
    if find_spec("cutlass") is None:
        return "the package nvidia-cutlass-dsl is not installed"
    group = layout.paged[0]
    kernel = decode_kernel(group.kind, "cute")
    if group.kind == "latent":  # the number of heads is checked later, by layer
        return kernel.obstacle(
            num_heads=64,
            rank=group.k_size - 64,
            rotated=64,
            page_tokens=page_tokens,
            dtype=dtype,
            is_fp8=group.bytes_per_element == 1,
        )
    return kernel.obstacle(page_tokens, group.k_size, dtype)


def decode_kernel(kind: CacheKind, name: str) -> DecodeKernel:
    kernel: DecodeKernel = resolve(DECODE[kind], name)
    return kernel
