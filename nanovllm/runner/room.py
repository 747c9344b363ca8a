"""Check that weights and cache fit in this machine's memory, before either is allocated.

The module computes sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from nanovllm_kernels.products.library_linear import ADDED_LINEAR

from nanovllm.config import ConfigError
from nanovllm.kv.split import Split, running_bytes
from nanovllm.models.decoder import Decoder
from nanovllm.runner.adapters import adapter_memory
from nanovllm.runner.host_memory import NO_ADAPTERS, gib, host_left
from nanovllm.runner.resolved import GIB, Resolved
from nanovllm.schedule import given_or

WORKSPACE = 32 << 20  # cuBLAS workspace that torch allocates


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a model needs, and the memory available."""

    model: str
    parameters: int
    dtype: str
    dtype_bytes: int
    table_bytes: int  # buffers, and parameters of other dtypes
    others: str  # description of the latter, for the message
    adapter_bytes: int  # matrices of LoRA adapters on the device
    cache_key: str  # recipe key that sets the cache's size; empty: all remaining memory
    cache_bytes: int
    state_bytes: int  # part of cache_bytes for recurrent states
    page_bytes: int
    room: int  # available bytes
    place: str  # name of the memory, for the message

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes + self.table_bytes + self.adapter_bytes

    @property
    def total(self) -> int:
        return self.weight_bytes + self.cache_bytes

    @property
    def arithmetic(self) -> str:
        weights = gib(self.weight_bytes - self.adapter_bytes)
        if self.adapter_bytes:
            weights += f" and {gib(self.adapter_bytes)} of adapters (adapters.slots)"
        if self.cache_key:
            weights += f" and {gib(self.cache_bytes)} of cache ({self.cache_key})"
        return (
            f"{self.model} does not fit: {self.parameters / 1e9:.2f} B parameters x "
            f"{self.dtype_bytes} bytes ({self.dtype}){self.others} = {weights}; "
            f"{self.place} has {gib(self.room)} available"
        )


def check_room(resolved: Resolved) -> None:
    """Raise ConfigError with the arithmetic and a remedy if weights and cache do not fit."""
    need = need_of(resolved)
    if need.total > need.room:
        raise ConfigError(f"{need.arithmetic}; {remedy(need)}")


def remedy(need: Need) -> str:
    """Return flags that make the model fit, if there are any."""
    for changes, one in smaller_ones(need):
        if one.total <= one.room:
            return f"{changes} takes {gib(one.total)} in total"
    if need.total - need.adapter_bytes <= need.room:
        return "lower adapters.slots (or adapters.max_rank with adapters.runtime)"
    return "use a smaller model or a larger machine"


def smaller_ones(need: Need) -> Iterator[tuple[str, Need]]:
    """Yield flags that make the same model need less memory, the least harmful first."""
    yield from less_cache(need, "")
    if need.dtype_bytes > 2:
        # The number of pages stays; keys and values have half the size.
        cache = need.cache_bytes // (2 if need.cache_key == "cache.pages" else 1)
        page = need.page_bytes // 2
        half = replace(need, dtype="bfloat16", dtype_bytes=2, cache_bytes=cache, page_bytes=page)
        yield "--set dtype=bfloat16", half
        yield from less_cache(half, "--set dtype=bfloat16 ")


def less_cache(need: Need, before: str) -> Iterator[tuple[str, Need]]:
    left = need.room - need.weight_bytes
    if need.cache_key == "cache.cpu_gib" and (tenths := 10 * left // GIB) > 0:
        smaller = replace(need, cache_bytes=tenths * GIB // 10)
        yield f"{before}--set cache.cpu_gib={tenths / 10:g}", smaller
    pages = (left - need.state_bytes) // need.page_bytes - 1
    if need.cache_key == "cache.pages" and pages > 1:
        smaller = replace(need, cache_bytes=(pages + 1) * need.page_bytes + need.state_bytes)
        yield f"{before}--set cache.pages={pages}", smaller


def need_of(resolved: Resolved) -> Need:
    recipe, device, cache = resolved.recipe, resolved.device, resolved.recipe.cache
    model, models = resolved.empty_models(torch.device("meta"))
    options = recipe.adapters
    adapters = NO_ADAPTERS if options is None else adapter_memory(options, model, resolved.dtype)
    page_bytes = resolved.layout.bytes_per_token * resolved.page_tokens
    slots = int(recipe.schedule.slots)
    pages = given_or(cache.pages, slots * -(-resolved.max_model_tokens // resolved.page_tokens))
    split = Split(pages, cache, resolved.layout, resolved.page_tokens)
    whole = split.total + running_bytes(resolved.layout, recipe)
    host = host_left(resolved, split, adapters)
    if device.type == "cpu":
        room, place = host, "this machine"
    else:
        free, total = torch.cuda.mem_get_info(device)
        room = min(free, int(total * recipe.cache.memory_fraction) - (total - free))
        place = (
            f"{resolved.device_name} with cache.memory_fraction {recipe.cache.memory_fraction:g}"
        )
    key = "cache.cpu_gib" if device.type == "cpu" else ""
    if cache.pages != "auto":
        key = "cache.pages"
    cache_bytes = {"cache.pages": whole, "": 0}.get(key, min(int(cache.cpu_gib * GIB), whole))
    others = sum(t.nbytes for t in models.parameters() if t.dtype != resolved.dtype)
    return Need(
        model=recipe.model,
        parameters=sum(t.numel() for t in models.parameters() if t.dtype == resolved.dtype),
        dtype=recipe.dtype,
        dtype_bytes=resolved.dtype.itemsize,
        table_bytes=others + sum(tensor.nbytes for tensor in models.buffers()),
        others=f" + {gib(others)} of other types" if others else "",
        adapter_bytes=adapters.device_bytes,
        cache_key=key,
        cache_bytes=cache_bytes,
        state_bytes=whole - (pages + 1) * page_bytes,
        page_bytes=page_bytes,
        room=room,
        place=place,
    )


# -- memory of a step on a GPU ---------------------------------------------------------------


def step_bytes(resolved: Resolved, model: Decoder, *, fuses_gate: bool) -> int:
    """Return the bytes of one rank, besides the weights, while `build.largest_steps` runs.

    They are the slots' columns, two pages, and the larger of two steps: a full prefill, or a row
    with its drafts in every slot. `model` may be on the meta device. `fuses_gate`: gate and up are
    one product, as on Hopper.
    """
    recipe, bytes_each = resolved.recipe, resolved.dtype.itemsize
    slots, longest = int(recipe.schedule.slots), resolved.max_model_tokens
    num_prompts = -(-int(recipe.schedule.step_tokens) // longest)
    num_tokens = int(recipe.schedule.step_tokens) // num_prompts * num_prompts
    layers: Any = model.layers
    attn, mlps = layers[0].attn, [one.mlp for one in layers]
    hidden = len(attn.out.weight)
    # The caller of a block holds the product that the previous block has not added yet.
    stream = 2 * hidden
    is_added = resolved.mesh.tp_size == 1 and ADDED_LINEAR.fits(num_tokens, attn.out.weight)
    pending = 0 if is_added else hidden
    attention = stream + attn.elements() + pending
    mlp = stream + hidden + max(mlp.elements(pending, fuses_gate=fuses_gate) for mlp in mlps)
    columns = longest + 1 - (-longest // resolved.page_tokens)  # tokens and pages of a slot
    pages = 2 * resolved.layout.bytes_per_token * resolved.page_tokens
    rows = slots * (1 + recipe.num_drafts)
    most = max(num_tokens * max(attention, mlp), rows * len(model.head.weight)) * bytes_each
    return int(4 * (slots + 1) * columns + pages + WORKSPACE + most)
