"""Memory of the host: available bytes, and the parts of a rank's share that a recipe takes.

The ranks and engines of a server are on one host. Each may use an equal share of the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nanovllm.config import ConfigError
from nanovllm.kv.split import Split, host_page_bytes
from nanovllm.runner.resolved import GIB, Resolved

NO_LIMIT = 1 << 60  # control groups without a limit report a larger number
# By version of control groups: files with the limit and the usage, prefix of file counters.
GROUPS = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


class AdapterMemory(NamedTuple):
    """One rank's memory of LoRA adapters. Those in host memory are all that are loaded."""

    device_bytes: int
    host_ranks: int  # ranks of the adapters of the start, each adapter's in whole pages
    rank_bytes: int  # of one rank over all products

    @property
    def host_bytes(self) -> int:
        return self.host_ranks * self.rank_bytes

    @property
    def arithmetic(self) -> str:
        """Return the host memory as text."""
        return (
            f"{self.host_ranks:,} ranks x {self.rank_bytes / 1e6:.3f} MB = {gib(self.host_bytes)}"
        )


NO_ADAPTERS = AdapterMemory(0, 0, 0)


def host_share(num_ranks: int, num_engines: int = 1) -> int:
    """Return the available bytes of one rank.

    `num_ranks` are those of one engine. Other engines may have allocated their share already.
    """
    share = host_memory() // num_ranks
    if num_engines > 1:
        share = min(share, host_memory(in_all=True) // (num_engines * num_ranks))
    return share


def host_left(resolved: Resolved, split: Split, adapters: AdapterMemory) -> int:
    """Return the bytes of a rank's share after checkpoints, pages and adapters in host memory.

    Raise ConfigError with the arithmetic if they do not fit.
    """
    left = host_share(resolved.mesh.size, resolved.recipe.parallel.dp)
    below = split.host_pages
    taken = split.host_bytes + below * host_page_bytes(resolved.layout, resolved.page_tokens)
    if taken > left:
        parts = [f"{below:,} pages"] * (below > 0)
        parts += [f"{split.checkpoints:,} recurrent states"] * (split.host_bytes > 0)
        raise ConfigError(
            f"cache.host_gib: a rank's {' and '.join(parts)} in host memory take {gib(taken)}; "
            f"this machine has {gib(left)} available for them"
        )
    left -= taken
    if adapters.host_bytes > left:
        raise ConfigError(
            f"adapters.names: a rank's adapters in host memory take {adapters.arithmetic}; this "
            f"machine has {gib(left)} available for them; load fewer adapters"
        )
    return left - adapters.host_bytes


def check_load(adapter: AdapterMemory, num_ranks: int) -> None:
    """Raise ConfigError with the arithmetic if one more adapter does not fit in host memory."""
    if adapter.host_bytes > (left := host_share(num_ranks)):
        raise ConfigError(
            f"the adapter takes {adapter.arithmetic} of each rank's host memory; this machine has "
            f"{gib(left)} available for it; unload another adapter first"
        )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


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
            taken = int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group here, or "max"
            continue
        files = sum(int(stat.get(prefix + name, 0)) for name in ("inactive_file", "active_file"))
        if limit < NO_LIMIT:
            yield limit if in_all else max(0, limit - taken + files)


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
