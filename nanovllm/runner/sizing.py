"""Size of the cache: the memory that remains after the measured peak of a full step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from nanovllm.config import Auto, Cache, ConfigError, Recipe, resolve_context
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.split import Split, room_for_pages, running_bytes

GIB = 1 << 30


def num_pages_that_fit(
    recipe: Recipe,
    layout: CacheLayout,
    *,
    useful_pages: int,
    full_step: Callable[[], None],
    device: torch.device,
) -> int:
    """Return the number of pages of the cache.

    `full_step` runs the largest possible step, with the states of all slots. `useful_pages` is the
    maximum that all slots can hold together. Raise ConfigError if too few pages fit.
    """
    if (pages := known_pages(recipe, layout)) is None:
        torch.cuda.reset_peak_memory_stats(device)
        full_step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()  # frees the slots' states of full_step
        left = int(total * recipe.cache.memory_fraction) - peak - others - GIB  # 1 GiB for graphs
        pages = pages_in(left, recipe.cache, layout)
    return min(pages, useful_pages)


def pages_in(left: int, cache: Cache, layout: CacheLayout) -> int:
    """Return the number of pages in `left` bytes, next to checkpoints and the padding page.

    Raise ConfigError if fewer than two fit.
    """
    room = room_for_pages(left, cache, layout)
    page_bytes = layout.bytes_per_token * int(cache.page_tokens)
    pages = room // page_bytes - 1
    if pages < 2:
        raise ConfigError(
            f"no room for a cache: {room / GIB:.2f} GiB left, a page takes {page_bytes / GIB:.3f}; "
            "raise cache.memory_fraction (cache.cpu_gib on a CPU) or lower schedule.step_tokens"
        )
    return pages


def known_pages(recipe: Recipe, layout: CacheLayout) -> int | None:
    """Return the number of pages, or None if it must be measured (on a GPU)."""
    if recipe.cache.pages != "auto":
        return recipe.cache.pages
    if recipe.device != "cpu":
        return None
    left = int(recipe.cache.cpu_gib * GIB) - running_bytes(layout, recipe)
    return pages_in(left, recipe.cache, layout)


def fitting_context(
    asked: int | Auto, model_tokens: int, num_pages: int, recipe: Recipe, layout: CacheLayout
) -> int:
    """Return `server.max_model_tokens` as a number for which the cache holds one request.

    Raise ConfigError if `asked` exceeds the cache or the model's context.
    """
    page_tokens = int(recipe.cache.page_tokens)
    pages = 0 if asked == "auto" else -(-asked // page_tokens)
    if recipe.cache.pages != "auto":
        cure = f"--set cache.pages={pages}"
    elif recipe.device == "cpu":
        split = Split(pages, recipe.cache, layout, page_tokens)
        bytes_needed = running_bytes(layout, recipe) + split.total
        cure = f"--set cache.cpu_gib={math.ceil(10 * bytes_needed / GIB) / 10:g}"
    else:
        cure = "raise cache.memory_fraction"
    size = f"{num_pages} pages of {page_tokens}, {layout.bytes_per_token / 1024:.0f} KiB a token"
    return resolve_context(asked, model_tokens, num_pages * page_tokens, f"{size}; {cure}")
