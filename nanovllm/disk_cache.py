"""Recipe section `cache.disk`: a folder for pages that leave host memory or outlive the server."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from nanovllm.typed_yaml import ConfigError

RANGE = 0.001, 1 << 20  # of gib


class Disk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str  # folder, created with mode 0700; several servers may share it
    gib: float = 100.0  # limit of all files there

    @property
    def folder(self) -> Path:
        """The path with the home folder for a leading `~`, which stays if there is none."""
        return Path(os.path.expanduser(self.path))


def check(disk: Disk | None, *, host_gib: float) -> None:
    """Raise ConfigError for values out of range, or without host memory to pass pages through."""
    if disk is None:
        return
    low, high = RANGE
    if not low <= disk.gib <= high:
        raise ConfigError(f"cache.disk.gib is {disk.gib}; it must be between {low} and {high}")
    if not disk.path:
        raise ConfigError("cache.disk.path is empty; name a folder, or drop cache.disk")
    if os.path.expanduser(disk.path).startswith("~"):
        raise ConfigError(
            f"cache.disk.path is {disk.path!r}; {disk.folder.parts[0]} has no home folder; "
            "write the whole path"
        )
    if not host_gib:
        raise ConfigError("cache.disk needs cache.host_gib, through which its pages go; set both")
