"""YAML as a frozen Struct of sections and keys, or one line that says what is wrong with it.

Knows what a section is, and no key.
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
# What reading JSON raises for bytes that are none, or not what is asked for.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ConfigError(ValueError):
    """The user's recipe, flags or checkpoint are wrong; the message is all they need to see.

    It is one line, whatever was quoted in it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the package has no types
    """YAML in which no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            problem = f"the key {twice[0]} stands twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def parse(text: str, what: str) -> Any:  # noqa: ANN401
    """The value that a text in YAML has. Raises ConfigError that begins with `what` the text is."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{what} is not YAML: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # characters and dates that there are not
        raise ConfigError(f"{what} is not YAML: {error}") from None


def read(path: Path) -> dict[str, Any]:
    """A recipe's sections. Raises ConfigError."""
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
    """Set `section.key`, whether it was there or not."""
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
    """Refuse unknown keys with their path, and a near valid name or all of the section."""
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
    """What a key holds whose type is `kind`, if that is a section, or a section or null."""
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


def converted(raw: Mapping[str, Any], schema: type[T]) -> T:
    """The sections as a Struct. Raises ConfigError naming a key that is unknown or of no use."""
    _check_names(raw, schema, "", schema)
    try:
        return msgspec.convert(raw, schema)
    except msgspec.ValidationError as error:
        raise _wrong_value(raw, schema, str(error)) from None


NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
         list[float]: "a list of numbers",
         list[str]: 'a list of text, as in ["a", "b"]'}  # fmt: skip


def _wrong_value(raw: Mapping[str, Any], whole: type[Struct], message: str) -> ConfigError:
    """A value of the wrong type, as msgspec reports it, in the words of a recipe."""
    found = re.search(r"(field `\w+`)? - at `\$\.([\w.]+)(\[\d+\])?`$", message)
    if found is None:
        return ConfigError(f"recipe: {message}")
    path = found[2] + (f".{found[1][7:-1]}" if found[1] else "")  # of a required key
    value: Any = raw
    schema: Any = whole
    for name in path.split("."):
        value = value.get(name)
        fields = structs.fields(_section(schema) or whole)
        schema = next(field.type for field in fields if field.name == name)
    kinds = (schema,) if schema in NOUNS else (schema, *get_args(schema))
    parts = [NOUNS[kind] for kind in kinds if kind in NOUNS]
    for kind in kinds:
        if get_origin(kind) is Literal:
            parts += get_args(kind)
    wanted = ", ".join(parts[:-1]) + (" or " if parts[1:] else "") + parts[-1]
    shown = "" if path.endswith("api_key") else f" is {repr(value)[:80]}; it"
    return ConfigError(f"{path}{shown} must be {wanted}")
