"""Built-in recipes by name and by model, and the lookup of a name given on the command line.

The module reads only the key `model` of a recipe. No function raises an error for an unknown name.
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
    """Return all built-in recipes by name, from the package or from the checkout."""
    inside = PACKAGE / "shipped"  # where pyproject.toml puts recipes/ in a wheel
    folder = inside if inside.is_dir() else PACKAGE.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def is_hub_id(model: str) -> bool:
    """Return True for owner/name, unless it is the path of a folder."""
    return HUB_ID.fullmatch(model) is not None and not os.path.isdir(model)


def find(named: str) -> tuple[Path | None, str | None]:
    """Return (recipe file, None), (None, model), or (None, None) if the name is unknown.

    The order is: a file, a folder with a config.json, a built-in recipe, the Hub id of a built-in
    recipe's model, another Hub id. Files and folders thus take precedence over built-in
    recipes of the same name.
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
    if (path := by_model.get(named.lower())) is not None:  # Hub ids never differ in case only
        return path, None
    return None, named


def models() -> dict[str, Path]:
    """Return built-in recipes by the Hub id of their model."""
    lines = {
        path: MODEL_LINE.search(path.read_text(encoding="utf-8")) for path in shipped().values()
    }
    by_model = {line[1]: path for path, line in lines.items() if line is not None}
    return {name: path for name, path in by_model.items() if HUB_ID.fullmatch(name)}
