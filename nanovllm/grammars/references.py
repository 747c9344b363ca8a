"""Resolution of references within a schema: JSON pointers, anchors and ids."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urljoin


class UnknownReferenceError(Exception):
    """A reference to another document or to a missing place."""


class Addresses(dict[str, tuple[Any, str]]):
    """Schemas of a document that have an id or an anchor, by absolute address."""

    def __init__(self, root: object) -> None:
        super().__init__()
        waiting: list[tuple[Any, str, str]] = [(root, "#", "")]
        while waiting:
            at, path, base = waiting.pop()
            if isinstance(at, dict):
                for keyword in ("$id", "id"):
                    if isinstance(name := at.get(keyword), str):
                        address = _joined(base, name)
                        self.setdefault(address, (at, path))
                        base = address if not name.startswith("#") else base
                for keyword in ("$anchor", "$dynamicAnchor"):
                    if isinstance(name := at.get(keyword), str):
                        self.setdefault(f"{base}#{name}", (at, path))
                waiting.extend((v, f"{path}/{_step(k)}", base) for k, v in at.items()
                               if k not in ("enum", "const", "default", "examples"))  # fmt: skip
            elif isinstance(at, list):
                waiting.extend((v, f"{path}/{i}", base) for i, v in enumerate(at))
        name = root.get("$id", root.get("id")) if isinstance(root, dict) else None
        self.base = _joined("", name) if isinstance(name, str) else ""


def pointer(reference: object, root: object, names: Addresses) -> tuple[Any, str]:
    """Return the target of a reference and its path. Raise UnknownReferenceError."""
    if not isinstance(reference, str):
        raise UnknownReferenceError
    for address in (_joined(names.base, reference), reference.removesuffix("#")):
        if address in names:
            return names[address]
    before, _, steps = reference.partition("#")
    at, path = (root, "#")
    if before and _joined(names.base, before) != names.base:
        address = _joined(names.base, before)
        if address not in names:
            raise UnknownReferenceError
        at, path = names[address]
    if steps and not steps.startswith("/"):
        raise UnknownReferenceError
    for step in unquote(steps).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and step in at:
            at = at[step]
        elif isinstance(at, list) and step.isascii() and step.isdigit() and int(step) < len(at):
            at = at[int(step)]
        else:
            raise UnknownReferenceError
        path += f"/{_step(step)}"
    return at, path


def _joined(base: str, name: str) -> str:
    try:
        return urljoin(base, name).removesuffix("#")
    except ValueError:
        return name


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
