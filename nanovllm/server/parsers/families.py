"""How each family of models writes: its markers, its turns, and which reader reads its calls."""

from __future__ import annotations

from msgspec.structs import replace

from nanovllm.server.parsers.base import Family, Mends, Syntax
from nanovllm.server.parsers.json_calls import (
    CALL,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    END_CALL,
    SEPARATOR,
    read_fenced,
    read_tagged,
)
from nanovllm.server.parsers.xml_calls import (
    CODER,
    mend_coder,
    read_bare_coder,
    read_coder,
    read_minimax,
)

PLAIN = Family(thinks=False)

QWEN3 = Family(
    turns=("<|im_start|>assistant\n", "<|im_end|>"),
    opener="<tool_call>",
    call_markers=(END_CALL,),
    syntax=Syntax(('<tool_call>\n{"name": QUOTED, "arguments": ', "}\n</tool_call>")),
    read_calls=read_tagged,
)

# Qwen3-Coder, and Qwen3.5 after it.
QWEN3_CODER = replace(
    QWEN3,
    syntax=Syntax(
        ("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>"),
        style="qwen_xml",
        parameter=("<parameter=NAME>\n", "\n</parameter>\n"),
    ),
    read_calls=read_coder,
    mends=Mends(CODER.call[0], read_bare_coder, mend_coder),
)

MINIMAX_M2 = Family(
    turns=("]~b]ai\n", "[e~["),
    opener="<minimax:tool_call>",
    call_markers=("</minimax:tool_call>",),
    syntax=Syntax(
        ('<invoke name="NAME">\n', "</invoke>\n"),
        block=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        between="",
        style="minimax_xml",
        parameter=('<parameter name="NAME">', "</parameter>\n"),
    ),
    read_calls=read_minimax,
)

# R1 and its distillations. What a tool answered stands inside the model's turn.
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
        (f"{CALL}function{SEPARATOR}NAME\n```json\n", f"\n```{CALL_END}"),
        block=(CALLS_BEGIN, CALLS_END),
    ),
    read_calls=read_fenced,
)
