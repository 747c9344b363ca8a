"""Check that weights and cache fit in this machine's memory, before either is allocated.

The module computes sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from nanovllm_kernels.products.library_linear import ADDED_LINEAR

from nanovllm.config import ConfigError
from nanovllm.kv.split import Split, host_page_bytes, num_host_pages, running_bytes
from nanovllm.models.decoder import Decoder
from nanovllm.runner.adapters import bank_bytes
from nanovllm.runner.resolved import GIB, Resolved
from nanovllm.schedule import given_or

NO_LIMIT = 1 << 60  # control groups without a limit report a larger number
WORKSPACE = 32 << 20  # cuBLAS workspace that torch allocates
# By version of control groups: files with the limit and the usage, prefix of file counters.
GROUPS = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


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
    adapters = recipe.adapters
    adapter_bytes = 0 if adapters is None else bank_bytes(adapters, model, resolved.dtype)
    page_bytes = resolved.layout.bytes_per_token * resolved.page_tokens
    slots = int(recipe.schedule.slots)
    pages = given_or(cache.pages, slots * -(-resolved.max_model_tokens // resolved.page_tokens))
    split = Split(pages, cache, resolved.layout, resolved.page_tokens)
    whole = split.total + running_bytes(resolved.layout, recipe)
    host = host_memory() // resolved.mesh.size
    if (engines := recipe.parallel.dp) > 1:  # others may have allocated their share already
        host = min(host, host_memory(in_all=True) // (engines * resolved.mesh.size))
    if split.host_bytes > host:
        raise ConfigError(
            f"cache.checkpoint_host_gib: a rank's checkpoints take {gib(split.host_bytes)}; this "
            f"machine has {gib(host)} available for it"
        )
    below = num_host_pages(cache, resolved.layout, resolved.page_tokens)
    below_bytes = below * host_page_bytes(resolved.layout, resolved.page_tokens)
    if below_bytes > (host := host - split.host_bytes):
        raise ConfigError(
            f"cache.host_gib: a rank's {below:,} pages in host memory take {gib(below_bytes)}; "
            f"this machine has {gib(host)} available for them"
        )
    if device.type == "cpu":
        room, place = host - below_bytes, "this machine"
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
        adapter_bytes=adapter_bytes,
        cache_key=key,
        cache_bytes=cache_bytes,
        state_bytes=whole - (pages + 1) * page_bytes,
        page_bytes=page_bytes,
        room=room,
        place=place,
    )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


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


# -- memory of the host -----------------------------------------------------------------------


def host_memory(root: Path = Path("/"), *, in_all: bool = False) -> int:
    """Return the bytes that may be allocated: the kernel's estimate, within every control group.

    With `in_all`, return the total, regardless of present allocations.
    """
    return min(of_machine(root, in_all), *group_rooms(root, in_all), NO_LIMIT)


def of_machine(root: Path, in_all: bool) -> int:
    name = "MemTotal:" if in_all else "MemAvailable:"
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return NO_LIMIT
    kib = (int(line.split()[1]) for line in lines if line.startswith(name))
    return next(kib, NO_LIMIT // 1024) * 1024


def group_rooms(root: Path, in_all: bool) -> Iterator[int]:
    """Yield the bytes left by each limit of this process. Cached file pages count as free."""
    for folder, most, used, prefix in groups(root):
        try:
            limit = int((folder / most).read_text())
            used_bytes = int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group here, or "max"
            continue
        files = sum(int(stat.get(prefix + name, 0)) for name in ("inactive_file", "active_file"))
        if limit < NO_LIMIT:
            yield limit if in_all else max(0, limit - used_bytes + files)


def groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield folders from this process's group to the topmost, of both versions, with GROUPS."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, kinds, path in (line.split(":", 2) for line in lines):
        for kind in GROUPS.keys() & kinds.split(","):
            top, own = root / "sys/fs/cgroup" / kind, Path(path.lstrip("/"))
            yield from ((top / folder, *GROUPS[kind]) for folder in (own, *own.parents))
