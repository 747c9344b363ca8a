"""Strings with which models mark reasoning and calls.

Parsers read and write them, and probe.py finds them in chat templates.
"""

from __future__ import annotations

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"  # Qwen, GLM
ARG_KEY, END_ARG_KEY = "<arg_key>", "</arg_key>"  # GLM
ARG_VALUE, END_ARG_VALUE = "<arg_value>", "</arg_value>"  # GLM
FUNCTION, END_FUNCTION = "<function=", "</function>"  # Qwen3-Coder
MINIMAX_CALL, END_MINIMAX_CALL = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, END_INVOKE = '<invoke name="', "</invoke>"  # MiniMax
PYTHON_TAG = "<|python_tag|>"  # Llama
END_HEADER = "<|end_header_id|>"  # Llama
# DeepSeek
CALLS_BEGIN, CALLS_END = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
FENCE = "```"
