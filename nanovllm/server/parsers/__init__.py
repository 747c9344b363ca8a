"""One parser per model family: raw text in, what the client should see out."""

from __future__ import annotations

from collections.abc import Sequence

PARSERS = {  # recipe name -> "module:attribute", imported on first use
    "plain": "nanovllm.server.parsers.plain:PlainParser",
    "qwen3": "nanovllm.server.parsers.qwen3:Qwen3Parser",
    "deepseek_r1": "nanovllm.server.parsers.deepseek_r1:deepseek_r1",
}


def parser_for(architectures: Sequence[str], model: str) -> str:
    """What `server.parser: auto` means for a model."""
    if any(architecture.startswith("Qwen3") for architecture in architectures):
        return "qwen3"
    if "LlamaForCausalLM" in architectures and "R1" in model:
        return "deepseek_r1"
    return "plain"
