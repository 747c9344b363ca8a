"""Tool calls of each model family as formats of a structural tag.

The formats match, to the byte, the calls that the family's models and templates write and its
parser reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from nanovllm.server.parsers.base import Syntax
from nanovllm.server.structured.forms import (
    Format,
    constant,
    either,
    grammar,
    sequence,
)
from nanovllm.server.structured.parameters import Parameters
from nanovllm.server.structured.schemas import compiled

Ids = Mapping[str, int]  # ids of the markers that are single tokens


def spelled(text: str, ids: Ids) -> list[Format]:
    """Return the text as formats, with each marker as its single token."""
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    return [{"type": "token", "token": ids[x]} if x in ids else constant(x) for x in parts if x]


def calls(
    syntax: Syntax, functions: Mapping[str, tuple[str, object, bool]], ids: Ids, *, once: bool
) -> Format:
    """Return the format of one or more calls.

    `functions` has, by name, the request's field, the schema of the parameters, and whether all of
    the schema must be enforced.

    Each call is written once in the grammar, because 512 tools would otherwise make it too long.
    Calls with a separator are tags; other calls repeat. The content of a tag cannot contain the
    tag's end, but raw text parameters may.
    """
    each = [_call(syntax, name, found, ids) for name, found in functions.items()]
    one = either(*(sequence(*call) for call in each))
    several: Format = {"type": "repeat", "min": 1, "max": 1 if once else -1, "content": one}
    if syntax.between and not once:
        tag = {"type": "tag", "begin": ""}
        tags = [tag | {"content": sequence(*x), "end": end.get("value", end)} for *x, end in each]
        several = {"type": "tags_with_separator", "tags": tags, "separator": syntax.between}
        several["at_least_one"] = True
    begin, end = (spelled(text, ids) for text in syntax.block)
    return sequence(*begin, several, *end)


def _call(syntax: Syntax, name: str, of: tuple[str, object, bool], ids: Ids) -> list[Format]:
    names = {"NAME": name, "QUOTED": json.dumps(name, ensure_ascii=False)}
    filled = [re.sub("NAME|QUOTED", lambda found: names[found[0]], t) for t in syntax.call]
    before, after = (spelled(text, ids) for text in filled)
    return [*before, arguments(syntax, *of[:2], exact=of[2]), *after]


def arguments(syntax: Syntax, where: str, schema: object, *, exact: bool) -> Format:
    """Return the format of a function's arguments. Raise ApiError."""
    if syntax.style == "json":
        return grammar(compiled(schema, where, exact=exact, is_object=True))
    return Parameters(syntax.parameter, schema, where, exact=exact).form()
