"""JSON Schemas of clients as grammars for xgrammar, which enforce all that the schemas say: read
(reading.py), merged type by type (facts.py), and written as rules (grammar.py).

What cannot be enforced is refused with its keyword and place. Best effort (`strict: false`) leaves
it out and keeps the rest. Properties come in the order of the schema: those of a schema itself
before those of the schemas that it merges, then others where `additionalProperties` or
`patternProperties` allow them.

Decision: a grammar may be narrower than its schema, as what it matches is valid still. Objects
whose schemas name properties and say nothing of others have no others.
"""

from __future__ import annotations

import json

from nanovllm.server.structured.grammar import Grammar
from nanovllm.server.structured.reading import SchemaReader

MAX_BYTES = 1 << 20
MAX_TEXT = 1 << 20  # of a grammar
MAX_SPACE = 8  # white space between two tokens of JSON
OBJECT = {"type": "object"}


def read(schema: object, where: str, *, exact: bool) -> SchemaReader:
    """`where`: the request's field. Raises ApiError."""
    reader = SchemaReader(schema, where, exact=exact)
    try:
        size = len(json.dumps(schema))
    except ValueError:  # Python writes no integer of more than 4300 digits
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
    """The grammar's text, with the rule `root`. `is_object`: of a function's parameters, which
    nothing but an object can be. Raises ApiError."""
    reader = read(schema, where, exact=exact)
    conj = reader.conj(schema, "#")
    if is_object:
        conj += reader.conj(OBJECT, "#")
    text = Grammar(reader, max_space).text(conj)
    if text is None:
        reader.refuse("#", "must be an object's" if is_object else "allows nothing")
    reader.expect(len(text) <= MAX_TEXT, "#", "comes to too large a grammar")
    return text
