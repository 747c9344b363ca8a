"""A client's schema as a document: its numbered schemas, references, refusals and cost."""

from __future__ import annotations

import json
from typing import Any, NoReturn
from urllib.parse import unquote, urljoin

from nanovllm.grammars.facts import ANYTHING, EVERYTHING, Conj, Facts

MAX_PARTS = 20_000  # schemas within one schema
MAX_ALTERNATIVES = 200  # of one value
MAX_WORK = 40_000  # merges, and states of automata


class SchemaError(Exception):
    """A refused schema. `field` is the request's field that has it."""

    def __init__(self, field: str, complaint: str) -> None:
        super().__init__(f"{field}: {complaint}")
        self.field = field


class InexactError(Exception):
    """A part of a schema that cannot be enforced."""


class Document:
    """Schemas within one schema, by number. Each place is a JSON pointer."""

    def __init__(self, where: str, *, exact: bool) -> None:
        self.exact = exact
        self._where = where
        self._schemas: list[tuple[Any, str]] = [(False, "#")]  # numbered from 1
        self._numbers: dict[int, int] = {}
        self._constants: dict[str, Conj] = {}
        self._work = 0

    def refuse(self, path: str, text: str) -> NoReturn:
        raise SchemaError(self._where, f"the schema {text}, at {path}")

    def expect(self, holds: bool, path: str, otherwise: str) -> None:
        if not holds:
            self.refuse(path, otherwise)

    def inexact(self, path: str, what: str) -> None:
        """Refuse a schema that cannot be enforced; under best effort, return."""
        text = f"has {what}, which cannot be enforced; leave it out or ask for strict: false"
        self.expect(not self.exact, path, text)

    def spend(self, work: int, path: str) -> None:
        """Count work, and refuse a schema that takes too much of it."""
        self._work += work
        self.expect(self._work <= MAX_WORK, path, "takes too long to combine what it says")

    def conj(self, schema: object, path: str) -> Conj:
        if schema is True or schema == {}:
            return ANYTHING
        if schema is False:
            return (1,)
        if not isinstance(schema, dict):
            self.refuse(path, "is not an object")
        number = self._numbers.get(id(schema))
        if number is None:
            self._schemas.append((schema, path))
            number = self._numbers[id(schema)] = len(self._schemas)
            self.expect(number <= MAX_PARTS, path, f"has more than {MAX_PARTS} parts")
        return (number,)

    def schema(self, literal: int) -> tuple[Any, str]:
        """Return the schema of a literal or of its negation, and the schema's place."""
        return self._schemas[abs(literal) - 1]

    def path(self, conj: Conj) -> str:
        return self._schemas[abs(conj[0]) - 1][1] if conj else "#"

    def constant(self, value: object, path: str) -> Conj:
        key = json.dumps(value, sort_keys=True)
        if key not in self._constants:
            self._constants[key] = self.conj({"const": value}, path)
        return self._constants[key]

    def product(self, some: list[Facts], others: list[Facts], path: str) -> list[Facts]:
        """Return the alternatives that satisfy one of `some` and one of `others`."""
        self.spend(len(some) * len(others), path)
        if some == [EVERYTHING]:
            return others
        products = [product for a in some for b in others if not (product := a.and_(b)).is_empty()]
        if len(products) > MAX_ALTERNATIVES:
            self.inexact(path, f"more than {MAX_ALTERNATIVES} combinations of alternatives")
            return some
        return products


# -- references: JSON pointers, anchors and ids ---------------------------------------------------


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
