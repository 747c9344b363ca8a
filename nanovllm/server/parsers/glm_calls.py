"""Calls of GLM-4.5 to 4.7: a name, then a key and a value for each parameter, in one tag a call.

All tags are added tokens of the models.
"""

from __future__ import annotations

from nanovllm.server.parsers.base import (
    FUNCTION_NAME,
    Emit,
    Family,
    Marks,
    Reader,
    Schemas,
    Source,
    Syntax,
)
from nanovllm.server.parsers.markers import (
    ARG_KEY,
    ARG_VALUE,
    END_ARG_KEY,
    END_ARG_VALUE,
    END_TOOL_CALL,
    TOOL_CALL,
)
from nanovllm.server.parsers.xml_call import Form, XmlCall


def read_glm(source: Source, emit: Emit, marks: Marks, schemas: Schemas) -> Reader[None]:
    """Read one call and its end tag."""
    form = Form(
        call=(marks[TOOL_CALL], ""),
        parameter=(marks[ARG_KEY], marks[END_ARG_KEY]),
        end_call=marks[END_TOOL_CALL],
        end_block=marks[END_TOOL_CALL],
        pad="",
        begin_value=marks[ARG_VALUE],
        end_value=marks[END_ARG_VALUE],
    )
    source.keep()
    yield from source.space()
    name = yield from name_before_tag(source)
    yield from source.space()
    tags = form.parameter[0], form.end_call  # any other text after the name makes it no call
    if name is None or not (yield from source.comes(tags)):
        source.back()
        return
    call = XmlCall(
        form, source, emit, end_block=form.end_block, name=name, schema=schemas.get(name)
    )
    is_whole = yield from call.read(mends=False)
    if not call.is_started:
        source.back()
    elif is_whole:
        source.commit()


def name_before_tag(source: Source) -> Reader[str | None]:
    """Read a function's name, which any other character ends. Return None if it is absent."""
    while True:
        match = FUNCTION_NAME.match(source.text, source.at)
        if match is not None and match.end() < len(source.text):
            source.at = match.end()
            return match[0]
        if source.is_over or (match is None and source.at < len(source.text)):
            return None
        yield


GLM4_7 = Family(
    turns=("<|assistant|>",),
    opener=TOOL_CALL,
    call_markers=(END_TOOL_CALL, ARG_KEY, END_ARG_KEY, ARG_VALUE, END_ARG_VALUE),
    syntax=Syntax(
        (f"{TOOL_CALL}NAME", END_TOOL_CALL),
        between="",
        style="glm_xml",
        parameter=(f"{ARG_KEY}NAME{END_ARG_KEY}{ARG_VALUE}", END_ARG_VALUE),
    ),
    read_calls=read_glm,
)
