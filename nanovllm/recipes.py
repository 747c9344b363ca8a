"""Shipped recipes by name and by the model that they serve, and what a name on the command line is.

Knows no keys of a recipe but its model. A name is found or it is not: nothing raises.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PACKAGE = Path(__file__).parent
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODEL_LINE = re.compile(r"^model: *([^\s#]+)", re.MULTILINE)
SUFFIXES = (".yaml", ".yml")


def shipped() -> dict[str, Path]:
    """All shipped recipes by name. A package has them inside, a checkout beside it."""
    inside = PACKAGE / "shipped"  # pyproject.toml puts recipes/ there
    folder = inside if inside.is_dir() else PACKAGE.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def is_hub_id(model: str) -> bool:
    """Return True for owner/name, unless a folder here has that path."""
    return HUB_ID.fullmatch(model) is not None and not os.path.isdir(model)


def find(named: str) -> tuple[Path | None, str | None]:
    """A recipe file to read, or a model to serve as it is, or neither.

    In this order: a file, a folder with a config.json, the name of a shipped recipe, a hub id that
    one of them serves, another hub id. So what lies in the current folder wins over what is shipped
    under the same name.
    """
    if os.path.isfile(named) or named.endswith(SUFFIXES):
        return Path(named), None
    if os.path.isfile(os.path.join(named, "config.json")):
        return None, named
    if (path := shipped().get(named)) is not None:
        return path, None
    if not is_hub_id(named):
        return None, None
    by_model = {model.lower(): path for model, path in models().items()}
    if (path := by_model.get(named.lower())) is not None:  # the Hub's ids differ in more than case
        return path, None
    return None, named


def models() -> dict[str, Path]:
    """Return the Hub ids that shipped recipes serve, and these recipes."""
    lines = {
        path: MODEL_LINE.search(path.read_text(encoding="utf-8")) for path in shipped().values()
    }
    found = {line[1]: path for path, line in lines.items() if line is not None}
    return {name: path for name, path in found.items() if HUB_ID.fullmatch(name)}
