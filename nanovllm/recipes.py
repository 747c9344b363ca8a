"""Where recipes and models lie: shipped recipes by name, models in folders and in the hub's cache.

Knows no keys of a recipe. Whatever the text of a name, it is found or it is not: nothing raises.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

log = logging.getLogger("serve")
PACKAGE = Path(__file__).parent
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SUFFIXES = (".yaml", ".yml")


def shipped() -> dict[str, Path]:
    """All shipped recipes by name. A package has them inside, a checkout beside it."""
    inside = PACKAGE / "shipped"  # pyproject.toml puts recipes/ there
    folder = inside if inside.is_dir() else PACKAGE.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(named: str) -> tuple[Path | None, str | None]:
    """A recipe file to read, or a model to serve as it is, or neither.

    In this order: a file, a folder with a config.json, the name of a shipped recipe, a hub id. So
    what lies in the current folder wins over what is shipped under the same name.
    """
    if os.path.isfile(named) or named.endswith(SUFFIXES):
        return Path(named), None
    if os.path.isfile(os.path.join(named, "config.json")):
        return None, named
    if (path := shipped().get(named)) is not None:
        return path, None
    return None, named if HUB_ID.fullmatch(named) and not os.path.isdir(named) else None


def folder_of(model: str, *, download: bool) -> Path | None:
    """A local folder as it is, or a hub id's files, brought here first if allowed and needed."""
    local = os.path.expanduser(model)
    if os.path.isdir(local):
        return Path(local)
    if not HUB_ID.fullmatch(model):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if download:
        log.info("looking for %s in the hub's cache, else it is downloaded", model)
    wanted = ["*.json", "*.safetensors", "*.jinja"]
    try:
        found = snapshot_download(model, allow_patterns=wanted, local_files_only=not download)
    except (OSError, ValueError, HfHubHTTPError):  # no such model, no network, not an id
        return None
    return Path(found)
