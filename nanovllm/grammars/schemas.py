"""Clients' JSON Schemas as grammars for xgrammar that enforce the whole schema.

A schema is read (reading.py), merged by type (facts.py) and written as rules (grammar.py).

A keyword that cannot be enforced is refused with its place. Best effort (`strict: false`) leaves it
out and keeps the rest. Properties come in the order of the schema, then those of the schemas that
it merges. Others follow if `additionalProperties` or `patternProperties` allow them.

Decision: a grammar may be narrower than its schema, because its outputs are still valid. An object
whose schemas name properties but do not mention other properties has no others.
"""

from __future__ import annotations

import json

from nanovllm.grammars.grammar import Grammar
from nanovllm.grammars.reading import SchemaReader

MAX_BYTES = 1 << 20
MAX_TEXT = 1 << 20  # of a grammar
MAX_SPACE = 8  # white space between two JSON tokens
OBJECT = {"type": "object"}


def read(schema: object, where: str, *, exact: bool) -> SchemaReader:
    """Return the reader of a schema. `where`: the request's field. Raise SchemaError."""
    reader = SchemaReader(schema, where, exact=exact)
    try:
        size = len(json.dumps(schema))
    except ValueError:  # Python refuses to write integers of more than 4300 digits
        reader.refuse("#", "has a number of too many digits")
    reader.expect(size <= MAX_BYTES, "#", f"has more than {MAX_BYTES} bytes")
    reader.expect(isinstance(schema, bool | dict), "#", "is no object")
    return reader


def compiled(
    schema: object,
    where: str,
    *,
    exact: bool,
    max_space: int = MAX_SPACE,
    is_object: bool = False,
) -> str:
    """Return the grammar of a schema, with the rule `root`. Raise SchemaError.

    `is_object`: allow only objects, as for a function's parameters.
    """
    reader = read(schema, where, exact=exact)
    conj = reader.conj(schema, "#")
    if is_object:
        conj += reader.conj(OBJECT, "#")
    text = Grammar(reader, max_space).text(conj)
    if text is None:
        reader.refuse("#", "must be an object's" if is_object else "allows nothing")
    reader.expect(len(text) <= MAX_TEXT, "#", "comes to too large a grammar")
    return text
