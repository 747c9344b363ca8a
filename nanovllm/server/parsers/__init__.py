"""Output parsers by model family: raw text to the events that a client sees."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from nanovllm.config import Config, ConfigError
from nanovllm.server.probe import TemplateFacts, facts_of
from nanovllm.server.renderer import Renderer
from nanovllm.server.template_files import template_files

PARSERS = {  # recipe name -> "module:attribute", imported on first use
    "plain": "nanovllm.server.parsers.plain:PLAIN",
    "qwen3": "nanovllm.server.parsers.json_calls:QWEN3",
    "qwen3_coder": "nanovllm.server.parsers.xml_calls:QWEN3_CODER",
    "minimax_m2": "nanovllm.server.parsers.xml_calls:MINIMAX_M2",
    "deepseek_r1": "nanovllm.server.parsers.json_calls:DEEPSEEK_R1",
    "deepseek_v3_1": "nanovllm.server.parsers.json_calls:DEEPSEEK_V3_1",
    "llama3": "nanovllm.server.parsers.json_calls:LLAMA3",
    "thinking": "nanovllm.server.parsers.plain:THINKING",
}


def parser_of(config: Config, facts: TemplateFacts | None = None) -> str:
    """Return the recipe's parser, or for "auto" the one of the chat template. Raise ConfigError.

    `facts` are those of the template, if it has been read already.
    """
    name = config.recipe.server.parser
    if name == "auto":
        if facts is not None:
            return facts.parser
        with closing(Renderer()) as renderer:
            return facts_of(template_files(Path(config.tokenizer_dir)), renderer).parser
    if name not in PARSERS:
        raise ConfigError(f"server.parser is {name!r}; it must be auto, {', '.join(PARSERS)}")
    return name
