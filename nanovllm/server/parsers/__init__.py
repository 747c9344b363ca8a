"""Output parsers by model family: raw text to the events that a client sees."""

from __future__ import annotations

PARSERS = {  # recipe name -> "module:attribute", imported on first use
    "plain": "nanovllm.server.parsers.plain:PLAIN",
    "qwen3": "nanovllm.server.parsers.json_calls:QWEN3",
    "qwen3_coder": "nanovllm.server.parsers.xml_calls:QWEN3_CODER",
    "minimax_m2": "nanovllm.server.parsers.xml_calls:MINIMAX_M2",
    "deepseek_r1": "nanovllm.server.parsers.json_calls:DEEPSEEK_R1",
    "deepseek_v3_1": "nanovllm.server.parsers.json_calls:DEEPSEEK_V3_1",
    "glm4_7": "nanovllm.server.parsers.glm_calls:GLM4_7",
    "llama3": "nanovllm.server.parsers.json_calls:LLAMA3",
    "thinking": "nanovllm.server.parsers.plain:THINKING",
}
