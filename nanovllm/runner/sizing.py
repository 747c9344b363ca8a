"""How many pages fit: the peak of one full step is measured, the rest of the budget becomes cache.

Knows bytes, not requests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.config import ConfigError, Recipe
from nanovllm.kv.layout import CacheLayout

GIB = 1 << 30


def num_pages_that_fit(
    recipe: Recipe,
    layout: CacheLayout,
    *,
    page_tokens: int,
    useful_pages: int,
    full_step: Callable[[], None],
    device: torch.device,
) -> int:
    """`full_step` runs the largest step there is; `useful_pages` is what all slots could ever hold.

    Raises ConfigError when not even one page fits.
    """
    page_bytes = layout.bytes_per_token * page_tokens
    if device.type == "cpu":
        room = int(recipe.cache.cpu_gib * GIB)
    else:
        torch.cuda.reset_peak_memory_stats(device)
        full_step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        room = int(total * recipe.cache.memory_fraction) - peak - others - GIB  # 1 GiB for graphs
    pages = min(room // page_bytes - 1, useful_pages)
    if pages < 2:
        raise ConfigError(
            f"no room for a cache: {room / GIB:.2f} GiB left, a page takes {page_bytes / GIB:.3f}; "
            "raise cache.memory_fraction (cache.cpu_gib on a CPU) or lower schedule.step_tokens"
        )
    return int(pages)
