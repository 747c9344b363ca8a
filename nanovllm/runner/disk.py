"""The disk tier of a rank, by its recipe: owner of the pages, and limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from nanovllm.config import Config
from nanovllm.kv.disk.format import PageOwner
from nanovllm.kv.disk.limits import DiskLimits
from nanovllm.kv.disk.store import DiskStore
from nanovllm.kv.split import host_page_bytes
from nanovllm.model_identity import digest_of, model_identity
from nanovllm.runner.resolved import Resolved

OpenDisk: TypeAlias = "Callable[[Callable[[], None]], DiskStore]"


def disk_of(config: Config, resolved: Resolved, state_parts: int) -> OpenDisk | None:
    """Return a function that opens the store of `cache.disk`, or None without it.

    `state_parts`: number of parts of a checkpoint of recurrent states, each as long as a page.
    """
    disk = resolved.recipe.cache.disk
    if disk is None:
        return None
    limits = DiskLimits(
        payload_bytes=host_page_bytes(resolved.layout, resolved.page_tokens),
        cap_bytes=int(disk.gib * 2**30),
        state_parts=state_parts,
    )
    return partial(DiskStore, disk.folder, owner_of(config, resolved), limits)


def owner_of(config: Config, resolved: Resolved) -> PageOwner:
    """Return everything besides its key that a page of this rank depends on."""
    recipe = resolved.recipe
    drafts: list[object] = []
    if recipe.speculate is not None and resolved.drafts is not None:
        folder = Path(os.path.expanduser(recipe.speculate.model or ""))
        drafts = [recipe.speculate.method]
        if (folder / "config.json").is_file() and recipe.speculate.model:
            stated = {"taps": recipe.speculate.taps, "rope_theta": recipe.speculate.rope_theta}
            stated = {key: value for key, value in stated.items() if value}
            has_weights = recipe.load.format != "dummy"
            drafts.append(model_identity(folder, stated, has_weights=has_weights))
    settings = {
        "quantize": recipe.quantize,
        "num_layers": recipe.num_layers,
        "load": msgspec.to_builtins(recipe.load),
        "routing": recipe.experts.routing,
        "cache": recipe.cache.dtype,
        "drafts": drafts,
    }
    if recipe.kernels.invariant:
        settings["numerics"] = numerics(resolved)
    if config.model_dir is None:
        identity = digest_of("dummy", Path(config.config_path).read_bytes(), settings)
    else:
        has_weights = recipe.load.format != "dummy"
        identity = model_identity(Path(config.model_dir), settings, has_weights=has_weights)
    layout = digest_of(resolved.layout, resolved.page_tokens, resolved.mesh.tp_size)
    return PageOwner(identity=identity, dtype=recipe.dtype, layout=layout, rank=resolved.mesh.rank)


def numerics(resolved: Resolved) -> list[object]:
    """Return what decides the last bits of keys and values: device, ranks and kernels.

    Decision: only servers with kernels.invariant compare it. Others accept pages with other last
    bits, so that their caches stay valid when a kernel changes.
    """
    kernels = msgspec.to_builtins(resolved.recipe.kernels)
    names = {key: name for key, name in kernels.items() if isinstance(name, str)}
    return [resolved.recipe.device, resolved.mesh.tp_size, resolved.mesh.ep_size, names]
