"""XML calls of Qwen3-Coder and MiniMax-M2, whose parameters are raw text between tags.

One call is read by xml_call.py.
"""

from __future__ import annotations

from functools import partial

from nanovllm.server.parsers.base import (
    FUNCTION_NAME,
    Emit,
    Family,
    Marks,
    Mends,
    Reader,
    Schemas,
    Source,
    Syntax,
)
from nanovllm.server.parsers.markers import (
    END_FUNCTION,
    END_INVOKE,
    END_MINIMAX_CALL,
    END_TOOL_CALL,
    FUNCTION,
    INVOKE,
    MINIMAX_CALL,
    TOOL_CALL,
)
from nanovllm.server.parsers.xml_call import Form, XmlCall

CODER = Form(
    call=(FUNCTION, ">"),
    parameter=("<parameter=", ">"),
    end_call=END_FUNCTION,
    end_block=END_TOOL_CALL,
    pad="\n",
)
MINIMAX = Form(
    call=(INVOKE, '">'),
    parameter=('<parameter name="', '">'),
    end_call=END_INVOKE,
    end_block=END_MINIMAX_CALL,
    pad="",
)


def _read(
    form: Form, source: Source, emit: Emit, marks: Marks, schemas: Schemas, *, mends: bool
) -> Reader[None]:
    """Read calls and the end of their block. With `mends`, end tags may be missing."""
    end_block = marks[form.end_block]
    while True:
        source.keep()
        yield from source.space()
        if not (yield from source.literal(form.call[0])):
            break
        if (name := (yield from source.name(FUNCTION_NAME, form.call[1]))) is None:
            source.back()
            break
        call = XmlCall(form, source, emit, end_block=end_block, name=name, schema=schemas.get(name))
        is_whole = yield from call.read(mends=mends)
        if not call.is_started:
            source.back()
        if not is_whole:
            return
        source.commit()
    yield from source.literal(end_block)


def _read_bare(
    form: Form, source: Source, emit: Emit, marks: Marks, schemas: Schemas
) -> Reader[None]:
    """Read calls without an opener.

    Only a function of the request is accepted, and only if a tag follows its name.
    """
    source.keep()
    yield from source.literal(form.call[0])
    name = yield from source.name(FUNCTION_NAME, form.call[1])
    if name is None or name not in schemas:
        return
    yield from source.space()
    if (yield from source.comes((form.parameter[0], form.end_call))):
        source.back()
        yield from _read(
            form=form, source=source, emit=emit, marks=marks, schemas=schemas, mends=True
        )


read_coder = partial(_read, CODER, mends=False)
mend_coder = partial(_read, CODER, mends=True)
read_bare_coder = partial(_read_bare, CODER)
read_minimax = partial(_read, MINIMAX, mends=False)


# Qwen3-Coder and Qwen3.5.
QWEN3_CODER = Family(
    turns=("<|im_start|>assistant\n", "<|im_end|>"),
    opener=TOOL_CALL,
    call_markers=(END_TOOL_CALL,),
    syntax=Syntax(
        (f"{TOOL_CALL}\n{FUNCTION}NAME>\n", f"{END_FUNCTION}\n{END_TOOL_CALL}"),
        style="qwen_xml",
        parameter=("<parameter=NAME>\n", "\n</parameter>\n"),
        has_words=True,
    ),
    read_calls=read_coder,
    mends=Mends(CODER.call[0], read_bare_coder, mend_coder),
)

MINIMAX_M2 = Family(
    turns=("]~b]ai\n", "[e~["),
    opener=MINIMAX_CALL,
    call_markers=(END_MINIMAX_CALL,),
    syntax=Syntax(
        (f'{INVOKE}NAME">\n', f"{END_INVOKE}\n"),
        block=(f"{MINIMAX_CALL}\n", END_MINIMAX_CALL),
        between="",
        style="minimax_xml",
        parameter=('<parameter name="NAME">', "</parameter>\n"),
    ),
    read_calls=read_minimax,
)
