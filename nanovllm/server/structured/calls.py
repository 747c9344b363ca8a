"""How each family writes calls, as formats of a structural tag: to the byte what its models and
templates write, and what its parser reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from nanovllm.server.errors import ApiError
from nanovllm.server.parsers.base import KEY_NAME, Syntax
from nanovllm.server.structured.schemas import DEFINITIONS, Schema, resolved

Format = dict[str, Any]
Ids = Mapping[str, int]  # of the markers that are tokens
ANY_TEXT: Format = {"type": "any_text"}
MAX_SPACE = 8  # white space between two tokens of JSON
LENGTHS = re.compile(r"\.\{(\d+),(\d*)\}")  # what schemas.py makes of them


def json_of(schema: Schema, style: str = "json", max_space: int = MAX_SPACE) -> Format:
    what = {"type": "json_schema", "json_schema": schema, "style": style}
    return what | {"max_whitespace_cnt": max_space}


def constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def either(*branches: Format) -> Format:
    return {"type": "or", "elements": list(branches)} if len(branches) > 1 else branches[0]


def sequence(*elements: Format) -> Format:
    """Nothing is in it for an empty text: only for that, as a client's format may say anything."""
    kept = [element for element in elements if element != constant("")]
    return {"type": "sequence", "elements": kept} if kept else constant("")


def optional(*elements: Format) -> Format:
    return {"type": "optional", "content": sequence(*elements)}


def spelled(text: str, ids: Ids) -> Format:
    """The text, with markers as the tokens they are."""
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    tokens = {part: {"type": "token", "token": ids[part]} for part in parts if part in ids}
    return sequence(*(tokens.get(part, constant(part)) for part in parts))


def calls(
    syntax: Syntax, schemas: Mapping[str, tuple[str, Schema]], ids: Ids, *, once: bool
) -> Format:
    """One call or more. `schemas`: per function the request's field, and the vetted schema."""
    one = either(*(_call(syntax, name, *found, ids) for name, found in schemas.items()))
    more = {"type": "star", "content": sequence(spelled(syntax.between, ids), one)}
    begin, end = (spelled(text, ids) for text in syntax.block)
    return sequence(begin, one, *([] if once else [more]), end)


def _call(syntax: Syntax, name: str, where: str, schema: Schema, ids: Ids) -> Format:
    target = resolved(schema, schema)
    if target and target.get("type") != "object":
        text = f"{where}: the schema must be an object's"
        raise ApiError(400, text, param=where, code="invalid_schema")
    if syntax.style != "json" and target.get("additionalProperties", True) is False:
        arguments = _parameters(syntax, where, target, schema)
    else:
        arguments = json_of(schema or {"type": "object"}, syntax.style)
    names = {"NAME": name, "QUOTED": json.dumps(name, ensure_ascii=False)}
    filled = [re.sub("NAME|QUOTED", lambda found: names[found[0]], t) for t in syntax.call]
    before, after = (spelled(text, ids) for text in filled)
    return sequence(before, arguments, after)


def _parameters(syntax: Syntax, where: str, target: Schema, root: Schema) -> Format:
    """As XML, in the order of the schema.

    Decision: not xgrammar's own style, which allows white space around values that have none.
    """
    end = syntax.parameter[1]
    text = ANY_TEXT | {"excludes": [end.strip()]}
    found = []
    for name, schema in target["properties"].items():
        if not KEY_NAME.fullmatch(name):
            refusal = f"{where}: this model cannot write a parameter named {name!r}"
            raise ApiError(400, refusal, param=where, code="invalid_schema")
        begin = constant(syntax.parameter[0].replace("NAME", name))
        parts = begin, _value(schema, root, text), constant(end)
        found.append(sequence(*parts) if name in target["required"] else optional(*parts))
    return sequence(*found)


def _value(schema: Schema, root: Schema, text: Format) -> Format:
    """Strings stand as they are, everything else as JSON."""
    target = resolved(schema, root)
    if "enum" in target:
        values = (v if isinstance(v, str) else json.dumps(v) for v in target["enum"])
        return either(*map(constant, values))
    if "anyOf" in target:
        return either(*(_value(branch, root, text) for branch in target["anyOf"]))
    kind = target.get("type", "string")
    if kind != "string":
        return json_of(schema | {key: root[key] for key in DEFINITIONS if key in root})
    lengths = LENGTHS.fullmatch(target.get("pattern", ""))
    if "pattern" in target and lengths is None:
        return {"type": "regex", "pattern": target["pattern"]}
    low = int(lengths[1]) if lengths else target.get("minLength", 0)
    high = lengths[2] if lengths else target.get("maxLength", "")
    if high != "":
        text = text | {"max_chars": int(high) - low}
    return sequence({"type": "regex", "pattern": f"[^<]{{{low}}}"}, text) if low else text
