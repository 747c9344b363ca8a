"""Compiled CuTe DSL kernels on disk, so that a second start does not compile. Imports CuTe DSL.

Decision: quack's cache, which keeps its own products (gated_linear's), too: one object file per
kernel, under a key of the function's name and arguments, the versions of CuTe DSL and Python, and
all sources of quack; here also of this package and of flash-attn-4. Sources are read once, when the
first kernel is asked for: so this is imported before, and what compiles one lies in those packages.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import ParamSpec

import quack.cache

Args = ParamSpec("Args")
Compiled = Callable[..., None]


def folders_of(package: str) -> list[Path]:
    """Where its sources are: nowhere if it is not installed."""
    found = find_spec(package)
    return [Path(folder) for folder in (found and found.submodule_search_locations) or ()]


quack.cache.EXTRA_SOURCE_DIRS += folders_of("nanovllm_kernels") + folders_of("flash_attn")


def keep_in(folder: Path) -> None:
    """Every kernel, from now on. Not called: in QUACK_CACHE_DIR, or in a temporary folder."""
    quack.cache.CACHE_DIR = str(folder)


def kept(compile_kernel: Callable[Args, Compiled]) -> Callable[Args, Compiled]:
    """The same, on disk and in memory. Its arguments are plain values: they are the key."""
    cached: Callable[Args, Compiled] = quack.cache.jit_cache(compile_kernel)
    return cached
