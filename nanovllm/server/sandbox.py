"""Jinja environment as transformers sets it up, for which chat templates are written.

Runs in the subprocess of `rendering.py`, which limits its time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class Generation(Extension):
    """The tag `generation`, which marks text for training. Its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(line)


class PublicNamespace(Namespace):
    """`namespace` without names that begin with an underscore, as in transformers."""

    def __init__(*args: object, **kwargs: object) -> None:  # `namespace(self=...)` is allowed
        given: Any = args
        attributes = dict(*given[1:], **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(given[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        _check_public(name)
        Namespace.__setitem__(self, name, value)


class Dicts:
    """`dict` as a function, with `fromkeys` but no other attribute of the class."""

    def __call__(self, *args: object, **kwargs: object) -> dict[Any, Any]:
        given: Any = args
        return dict(*given, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:  # noqa: ANN401
        return dict.fromkeys(keys, value)


def environment() -> ImmutableSandboxedEnvironment:
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    sandbox.globals["namespace"] = PublicNamespace
    sandbox.globals["dict"] = Dicts()
    return sandbox


def _tojson(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}: it begins with an underscore")
