"""DeepSeek-R1 and its distillations: Qwen3's <think>, and no tool calls the vocabulary knows."""

from __future__ import annotations

from nanovllm.server.parsers.qwen3 import Qwen3Parser


def deepseek_r1(*, in_reasoning: bool, tools: bool) -> Qwen3Parser:
    return Qwen3Parser(in_reasoning=in_reasoning, tools=False)
