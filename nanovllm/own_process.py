"""The name and the resource limits of the current process. Systems without them are no error."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


def set_name(name: str) -> None:
    """Set the name that `ps` shows, of which Linux keeps 15 characters."""
    with suppress(OSError):  # the file exists on Linux only
        Path("/proc/self/comm").write_text(name)


def set_limit(kind: int, value: int) -> None:
    """Set a soft limit, at most the hard one. `kind` is one of resource.RLIMIT_*."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:  # a number smaller than all limits
        value = most if value == resource.RLIM_INFINITY else min(value, most)
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, most))


def num_pages(field: int) -> int:
    """Return a number of memory pages of /proc/self/statm, or 0 if the system lacks it."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[field])
    return 0
