"""Compiled CuTe DSL kernels on disk, so that a second start does not compile. Imports CuTe DSL.

Decision: quack's cache, which keeps its own products: one object file per kernel, under a key of
the arguments, the versions of CuTe DSL and Python, and all sources of quack; here also of this
package and of flash-attn-4. QUACK_CACHE_DIR says where.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import ParamSpec

import quack.cache

Args = ParamSpec("Args")
Compiled = Callable[..., None]


def kept(compile_kernel: Callable[Args, Compiled]) -> Callable[Args, Compiled]:
    """The same, on disk and in memory. Its arguments are plain values: they are the key."""
    for package in ("nanovllm_kernels", "flash_attn.cute"):
        found = find_spec(package)
        folders = found.submodule_search_locations if found is not None else None
        for sources in map(Path, folders or ()):
            if sources not in quack.cache.EXTRA_SOURCE_DIRS:
                quack.cache.EXTRA_SOURCE_DIRS.append(sources)
    cached: Callable[Args, Compiled] = quack.cache.jit_cache(compile_kernel)
    return cached
