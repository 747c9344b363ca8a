"""Which attention backend serves, and why not another: asked once, at start, and logged."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from msgspec.structs import replace
from nanovllm_kernels.device import is_hopper

from nanovllm.attention import BACKENDS
from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.grouped import pageless
from nanovllm.config import ConfigError, Kernels
from nanovllm.kv.layout import CacheLayout
from nanovllm.registry import resolve

DECODE = {  # importing the second takes a second
    "triton": "nanovllm_kernels.paged_decode",
    "cute": "nanovllm_kernels.paged_decode_cute",
}
LATENT_DECODE = {
    "triton": "nanovllm_kernels.latent_decode",
    "cute": "nanovllm_kernels.latent_decode_cute",
}
PREFERRED = {"cuda": ("flash", "triton", "torch"), "cpu": ("torch",)}  # by device type


def choose_backend(
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    layout: CacheLayout,
    page_tokens: int,
) -> tuple[AttentionBackend, Kernels, str]:
    """The backend, which kernels that means, and why preferred ones were passed over.

    Raises ConfigError with the reason if the recipe asks for one that cannot serve here.
    """
    passed_over: list[str] = []
    like = pageless(layout, page_tokens, dtype)
    asked = kernels.attention
    modules = LATENT_DECODE if layout.paged[0].v_size == 0 else DECODE
    known = [name for name in PREFERRED[device.type] if name in BACKENDS]
    for name in known if asked == "auto" else (asked,):
        backend = resolve(BACKENDS, name)
        if (reason := backend.supports(device, layout, page_tokens)) is not None:
            passed_over.append(f"{name}: {reason}")
            continue
        decode = kernels.decode
        if name == "torch":
            if decode not in ("auto", "torch"):
                why = "on a CPU" if device.type == "cpu" else f"kernels.attention is {name}"
                raise ConfigError(f"kernels.decode is {decode}, but decode rows are by torch {why}")
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
        found = backend(like, import_module(modules[decode]))
        return found, chosen, "; ".join(passed_over)
    raise ConfigError(f"kernels.attention: {'; '.join(passed_over)}")


def cute_obstacle(
    device: torch.device, dtype: torch.dtype, layout: CacheLayout, page_tokens: int
) -> str | None:
    """Why decode rows are not for the CuTe DSL kernel, or None."""
    if not is_hopper(device):
        return "it is for Hopper GPUs"
    if find_spec("cutlass") is None:
        return "the package nvidia-cutlass-dsl is not installed"
    group = layout.paged[0]
    reason: str | None
    if group.v_size == 0:  # how many heads there are is seen when they are there
        if find_spec(LATENT_DECODE["cute"]) is None:
            return "there is none for latents"
        kernel, rotated, is_fp8 = (
            import_module(LATENT_DECODE["cute"]),
            64,
            group.bytes_per_element == 1,
        )
        reason = kernel.obstacle(64, group.k_size - rotated, rotated, page_tokens, dtype, is_fp8)
    else:
        reason = import_module(DECODE["cute"]).obstacle(page_tokens, group.k_size, dtype)
    return reason
