"""Folders of adapters, and the paths in them that may be read.

Decision: an adapter is named, never given by a path. The real paths of its files must be below that
of the configured folder. So no name and no link leads out of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from nanovllm.recipes import PACKAGE
from nanovllm.typed_yaml import ConfigError

DEMO = PACKAGE / "demo" / "adapters"
DUMMY = "dummy"  # adapters.folder for random adapters without files
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNSAFE = "adapter_model.bin"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder of adapters does not exist."""
    if not os.path.isdir(folder):
        raise ConfigError(f"adapters.folder: {folder} is not a folder")


def check_name(name: str) -> None:
    """Raise ConfigError if a name may not be that of an adapter."""
    if not NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"the adapter name {name[:100]!r} must be 1 to 64 characters of A-Z a-z 0-9 . _ -, "
            "begin with a letter or digit, and have no two dots in a row"
        )


def names_in(folder: Path) -> list[str]:
    """Return the names of all adapters in a folder, in order."""
    check_folder(folder)
    return sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))


def file_of(folder: Path, name: str, file: str) -> Path:
    """Return the real path of an adapter's file.

    Raise ConfigError if it does not exist, or is not below `folder`.
    """
    check_name(name)
    root, path = folder.resolve(), folder / name / file
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        if file == WEIGHTS and (folder / name / UNSAFE).exists():
            raise ConfigError(
                f"adapter {name}: it has {UNSAFE}, which can run code; save it as {WEIGHTS}"
            ) from None
        raise ConfigError(f"adapter {name}: {folder / name} has no {file}") from None
    if root not in real.parents:
        raise ConfigError(f"adapter {name}: {file} is a link to a place outside of {folder}")
    if not real.is_file():
        raise ConfigError(f"adapter {name}: {path} is not a file")
    return real
