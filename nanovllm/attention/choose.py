"""Which attention backend serves, and why not another: asked once, at start, and logged."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.attention import BACKENDS
from nanovllm.attention.base import AttentionBackend, PagedKV
from nanovllm.config import ConfigError
from nanovllm.kv.layout import CacheLayout
from nanovllm.registry import resolve

Factory = Callable[[tuple[PagedKV, ...]], AttentionBackend]
PREFERRED = {"cuda": ("flash", "triton", "torch"), "cpu": ("torch",)}  # by device type


def choose_backend(
    name: str, device: torch.device, layout: CacheLayout, page_tokens: int
) -> tuple[Factory, str, str]:
    """The backend's class, its name, and why the preferred ones before it were passed over.

    Raises ConfigError with the reason if the recipe asks for one that cannot serve here.
    """
    passed_over: list[str] = []
    for candidate in PREFERRED[device.type] if name == "auto" else (name,):
        backend = resolve(BACKENDS, candidate)
        reason = backend.supports(device, layout, page_tokens)
        if reason is None:
            return backend, candidate, "; ".join(passed_over)
        passed_over.append(f"{candidate}: {reason}")
    raise ConfigError(f"kernels.attention: {'; '.join(passed_over)}")
