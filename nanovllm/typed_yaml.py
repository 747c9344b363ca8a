"""Conversion of YAML to a frozen Struct of sections and keys, with one-line errors.

The module is independent of any key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import Struct, structs

T = TypeVar("T", bound=Struct)
# Exceptions of msgspec for bytes that are not JSON, or not of the given type.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


MOST_MESSAGE = 2_000  # characters
NOT_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
NO_TEXT = "it has a control character, or one that is not Unicode"
SECRETS = ("api_key", "secret")  # keys that are checked where they are used, and never shown


class ConfigError(ValueError):
    """Error in the user's recipe, flags or checkpoint. The message is sufficient for the user.

    It is one printable line of at most MOST_MESSAGE characters, even if quoted values have others.
    The middle of a longer message is left out, since its end may have the remedy.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)
        if len(line) > MOST_MESSAGE:
            half = (MOST_MESSAGE - len(" ... ")) // 2
            line = f"{line[:half]} ... {line[-half:]}"
        super().__init__(line)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the package has no types
    """YAML loader that refuses duplicate keys, and reads 1e-9 as a number, as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            problem = f"the key {twice[0]} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def parse(text: str, what: str) -> Any:  # noqa: ANN401
    """Return the value of YAML. Raise ConfigError starting with `what`, a name of the text."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        is_alias = error.context in ("while scanning an alias", "while scanning an anchor")
        cure = '; write * and & in quotes, as in ["*"]' if is_alias else ""
        raise ConfigError(f"{what} is not YAML: {line}{error.problem}{cure}") from None
    except (yaml.YAMLError, ValueError) as error:  # invalid characters and dates
        raise ConfigError(f"{what} is not YAML: {error}") from None


def read(path: Path) -> dict[str, Any]:
    """Return a recipe's sections. Raise ConfigError if the file is unreadable or not a recipe."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"recipe {path} is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from None
    raw = parse(text, f"recipe {path}")
    if not isinstance(raw, dict):
        raise ConfigError(f"recipe {path}: expected sections such as 'model:' at the top")
    return raw


def put(raw: dict[str, Any], path: str, value: object) -> None:
    """Set `section.key`, and create the section if needed."""
    *sections, key = path.split(".")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):
            raise ConfigError(f"--set {path}: {section!r} is not a section")
    raw[key] = value


def _check_names(
    raw: Mapping[Any, Any], schema: type[Struct], path: str, whole: type[Struct]
) -> None:
    """Raise ConfigError for an unknown key, with its path and valid names."""
    fields = {field.name: field.type for field in structs.fields(schema)}
    for key, value in raw.items():
        if key not in fields:
            raise ConfigError(f"unknown key {path}{key}; {_meant(str(key), path, fields, whole)}")
        section = _section(fields[key])
        if section is not None and (value is not None or section is fields[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}{key} is a section; write {path}{key}.<key>")
            _check_names(value, section, f"{path}{key}.", whole)


def _section(kind: Any) -> type[Struct] | None:  # noqa: ANN401
    """Return the Struct in a key's type if the key is a section, or a section or null."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, Struct):
            return part
    return None


def _meant(key: str, path: str, fields: Iterable[str], whole: type[Struct]) -> str:
    if close := difflib.get_close_matches(key, fields, 1):
        return f"did you mean {path}{close[0]}?"
    for section in structs.fields(whole):
        if key in getattr(_section(section.type), "__struct_fields__", ()):
            return f"did you mean {section.name}.{key}?"
    return f"{path.rstrip('.') or 'a recipe'} has {', '.join(fields)}"


def _check_text(section: Struct, path: str = "") -> None:
    """Raise ConfigError for text that a file's name, a header or a line of the log cannot contain.

    Surrogates come from YAML's "\\ud800", and from arguments that are not UTF-8.
    """
    for key in section.__struct_fields__:
        value = getattr(section, key)
        if isinstance(value, Struct):
            _check_text(value, f"{path}{key}.")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not key.endswith(SECRETS) and NOT_TEXT.search(text):
                raise ConfigError(f"{path}{key} is {ascii(text)[:80]}; {NO_TEXT}")


def converted(raw: Mapping[str, Any], schema: type[T]) -> T:
    """Return sections as a Struct. Raise ConfigError for an unknown key or an invalid value."""
    _check_names(raw, schema, "", schema)
    try:
        found = msgspec.convert(raw, schema)
    except msgspec.ValidationError as error:
        raise _wrong_value(raw, schema, str(error)) from None
    except UnicodeEncodeError as error:  # a word or a number
        raise ConfigError(f"recipe: a value is {ascii(error.object)[:80]}; {NO_TEXT}") from None
    _check_text(found)
    return found


NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
         list[float]: "a list of numbers", list[int]: "a list of whole numbers",
         list[str]: 'a list of text, as in ["a", "b"]'}  # fmt: skip


def _wrong_value(raw: Mapping[str, Any], whole: type[Struct], message: str) -> ConfigError:
    """Return the error for a value of the wrong type, translated from msgspec's message."""
    match = re.search(r"(field `\w+`)? - at `\$\.([\w.]+)(\[\d+\])?`$", message)
    if match is None:
        return ConfigError(f"recipe: {message}")
    path = match[2] + (f".{match[1][7:-1]}" if match[1] else "")  # the field of a required key
    value: Any = raw
    schema: Any = whole
    is_missing = False
    for name in path.split("."):
        is_missing = name not in value
        value = value.get(name)
        fields = structs.fields(_section(schema) or whole)
        schema = next(field.type for field in fields if field.name == name)
    kinds = (schema,) if schema in NOUNS else (schema, *get_args(schema))
    parts = [NOUNS[kind] for kind in kinds if kind in NOUNS]
    for kind in kinds:
        if get_origin(kind) is Literal:
            parts += get_args(kind)
    allowed = ", ".join(parts[:-1]) + (" or " if parts[1:] else "") + parts[-1]
    shown = "" if path.endswith(SECRETS) else f" is {repr(value)[:80]}; it"
    if is_missing or value is None:
        shown = " is missing; it" if is_missing else " is null; it"
    # Numbers, dates and words such as `on` are text only if they are quoted.
    is_scalar = str in kinds and not isinstance(value, str | list | dict | None)
    cure = """, in quotes for YAML, as in '"1"'""" if is_scalar else ""
    return ConfigError(f"{path}{shown} must be {allowed}{cure}")
