"""How each family writes calls, as formats of a structural tag: to the byte what its models and
templates write, and what its parser reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from nanovllm.server.parsers.base import Syntax
from nanovllm.server.structured.forms import (
    Format,
    constant,
    grammar,
    sequence,
)
from nanovllm.server.structured.parameters import Parameters
from nanovllm.server.structured.schemas import compiled

Ids = Mapping[str, int]  # of the markers that are tokens


def spelled(text: str, ids: Ids) -> list[Format]:
    """The text, with markers as the tokens they are."""
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    tokens = {part: {"type": "token", "token": ids[part]} for part in parts if part in ids}
    return [tokens.get(part, constant(part)) for part in parts if part]


def calls(
    syntax: Syntax, functions: Mapping[str, tuple[str, object, bool]], ids: Ids, *, once: bool
) -> Format:
    """One call or more. `functions`: per name the request's field, the schema of the parameters,
    and whether all of it must be enforced."""
    tags = [_call(syntax, name, *found, ids) for name, found in functions.items()]
    # Each call stands here once; with a star behind the first it would stand here twice.
    several: Format = {"type": "tags_with_separator", "tags": tags, "separator": syntax.between}
    several |= {"at_least_one": True, "stop_after_first": once}
    begin, end = (spelled(text, ids) for text in syntax.block)
    return sequence(*begin, several, *end)


def _call(syntax: Syntax, name: str, where: str, schema: object, exact: bool, ids: Ids) -> Format:
    names = {"NAME": name, "QUOTED": json.dumps(name, ensure_ascii=False)}
    filled = [re.sub("NAME|QUOTED", lambda found: names[found[0]], t) for t in syntax.call]
    before, (*behind, end) = (spelled(text, ids) for text in filled)
    content = sequence(*before, arguments(syntax, where, schema, exact=exact), *behind)
    return {"type": "tag", "begin": "", "content": content, "end": end.get("value", end)}


def arguments(syntax: Syntax, where: str, schema: object, *, exact: bool) -> Format:
    """What a function may be given. Raises ApiError."""
    if syntax.style == "json":
        return grammar(compiled(schema, where, exact=exact, is_object=True))
    return Parameters(syntax.parameter, schema, where, exact=exact).form()
