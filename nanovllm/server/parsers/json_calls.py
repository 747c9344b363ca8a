"""JSON calls: Qwen3's in a tag, DeepSeek's between markers, Llama's without a tag."""

from __future__ import annotations

from msgspec import structs

from nanovllm.server.parsers.base import (
    FUNCTION_NAME,
    CallEnd,
    CallPart,
    CallStart,
    Emit,
    Family,
    Marks,
    Reader,
    Schemas,
    Source,
    Syntax,
)
from nanovllm.server.parsers.json_call import NO_ARGUMENTS, JsonCall, object_of, quoted_object
from nanovllm.server.parsers.markers import (
    CALL,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    END_HEADER,
    END_TOOL_CALL,
    FENCE,
    PYTHON_TAG,
    SEPARATOR,
    TOOL_CALL,
)


def read_tagged(source: Source, emit: Emit, marks: Marks, schemas: Schemas) -> Reader[None]:
    """Read calls after <tool_call>: one, several or a list of them, then </tool_call>."""
    yield from _calls(source, emit, marks[END_TOOL_CALL], None)
    yield from source.space()
    yield from source.literal(marks[END_TOOL_CALL])


def read_untagged(source: Source, emit: Emit, marks: Marks, schemas: Schemas) -> Reader[None]:
    """Read calls without a tag. Only functions of the request are accepted."""
    yield from _calls(source, emit, "", schemas)


def _calls(source: Source, emit: Emit, end: str, known: Schemas | None) -> Reader[None]:
    """Read calls up to other text, which is left to be read again."""
    yield from source.space()
    is_list = yield from source.literal("[")
    may_follow = True
    is_first = True
    while may_follow:
        if not is_first:
            source.commit()
            source.keep()
            yield from source.space()
            for separator in (",", ";"):
                if (yield from source.literal(separator)):
                    break
        yield from source.space()
        call = JsonCall(source, emit, end, known)
        may_follow = yield from call.read()
        if not call.is_started:
            source.back()
            break
        is_first = False
    if is_list and not is_first:
        yield from source.space()
        yield from source.literal("]")


def read_marked(source: Source, emit: Emit, marks: Marks, schemas: Schemas) -> Reader[None]:
    """Read DeepSeek's calls after their opener: names and arguments as in R1 or in V3.1."""
    while True:
        source.keep()
        yield from source.space()
        if not (yield from source.literal(marks[CALL])):
            break
        name = yield from _marked_name(source, marks)
        if name is None:
            source.back()
            break
        is_call = yield from _marked_arguments(source, emit, name, marks, known=name in schemas)
        if not is_call:
            source.back()
            break
        yield from source.space()
        yield from source.literal(FENCE)
        yield from source.space()
        yield from source.literal(marks[CALL_END])
        source.commit()
    yield from source.literal(marks[CALLS_END])


def _marked_name(source: Source, marks: Marks) -> Reader[str | None]:
    """Read the function's name.

    V3.1 writes the name, then the arguments. R1 writes the kind, the name and a code block.
    """
    first = yield from source.name(FUNCTION_NAME, marks[SEPARATOR])
    if first is None:
        return None
    yield from source.space()
    if (yield from source.peek()) in ("{", '"') or (yield from source.comes((marks[CALL_END],))):
        return first
    if (name := (yield from source.name(FUNCTION_NAME, "\n"))) is None:
        return None
    if (yield from source.literal(FENCE)):
        yield from source.literal("json")
    yield from source.space()
    return name


def _marked_arguments(
    source: Source, emit: Emit, name: str, marks: Marks, *, known: bool
) -> Reader[bool]:
    """Read the arguments; return False, to have the text read again, if there are none.

    Only a function of the request (`known`) is called without arguments. They are an empty object.
    """
    end = marks[CALL_END]
    if known and (yield from source.comes((end, FENCE + end, f"{FENCE}\n{end}"))):
        emit(CallStart(name))
        emit(CallPart(NO_ARGUMENTS))
        emit(CallEnd())
        return True
    opener = yield from source.peek()
    if opener == "{":
        emit(CallStart(name))
        yield from object_of(source, emit, end, FENCE)
        return True
    if opener != '"':
        return False
    text, is_whole = yield from quoted_object(source)
    if text is not None:
        emit(CallStart(name))
        emit(CallPart(text))
        if is_whole:
            emit(CallEnd())
    return text is not None


QWEN3 = Family(
    turns=("<|im_start|>assistant\n", "<|im_end|>"),
    opener=TOOL_CALL,
    call_markers=(END_TOOL_CALL,),
    syntax=Syntax((f'{TOOL_CALL}\n{{"name": QUOTED, "arguments": ', f"}}\n{END_TOOL_CALL}")),
    read_calls=read_tagged,
)

# R1 and its distillations. A tool's result is inside the model's turn.
DEEPSEEK_R1 = Family(
    turns=(
        "<\uff5cAssistant\uff5c>",
        "<\uff5ctool\u2581outputs\u2581end\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    tool_template="deepseek_r1.jinja",
    opener=CALLS_BEGIN,
    call_markers=(CALLS_END, CALL, SEPARATOR, CALL_END),
    syntax=Syntax(
        (f"{CALL}function{SEPARATOR}NAME\n{FENCE}json\n", f"\n{FENCE}{CALL_END}"),
        block=(CALLS_BEGIN, CALLS_END),
    ),
    read_calls=read_marked,
)

# DeepSeek-V3.1: the same markers around a name and bare JSON.
DEEPSEEK_V3_1 = structs.replace(
    DEEPSEEK_R1,
    turns=(*DEEPSEEK_R1.turns, "<\uff5ctool\u2581output\u2581end\uff5c>"),
    tool_template="deepseek_v3_1.jinja",
    syntax=Syntax((f"{CALL}NAME{SEPARATOR}", CALL_END), block=(CALLS_BEGIN, CALLS_END), between=""),
)

# Llama 3.1 and later: the whole answer is one call.
LLAMA3 = Family(
    thinks=False,
    turns=(f"<|start_header_id|>assistant{END_HEADER}\n\n", "<|eot_id|>"),
    opener=PYTHON_TAG,
    bare=("{", "["),
    read_bare=read_untagged,
    syntax=Syntax(('{"name": QUOTED, "parameters": ', "}"), between="", is_single=True),
    read_calls=read_untagged,
)
