"""One parser per model family: raw text in, what the client should see out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from nanovllm.config import NOT_JSON, Config, ConfigError

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


class Named(Struct, frozen=True):
    """The part of config.json that says what family a model is of."""

    architectures: list[str] = []


def parser_of(config: Config) -> str:
    """The recipe's, or for "auto" what config.json implies. Raises ConfigError."""
    name, path = config.recipe.server.parser, Path(config.config_path)
    if name == "auto":
        try:
            model = msgspec.json.decode(path.read_bytes(), type=Named)
        except (*NOT_JSON, OSError) as error:
            raise ConfigError(f"{path}: {error}") from None
        return parser_for(model.architectures, config.recipe.model)
    if name not in PARSERS:
        raise ConfigError(f"server.parser is {name!r}; it must be auto, {', '.join(PARSERS)}")
    return name


def parser_for(architectures: Sequence[str], model: str) -> str:
    """What `server.parser: auto` means for a model."""
    if any(architecture.startswith("Qwen3") for architecture in architectures):
        return "qwen3_coder" if "Coder" in model else "qwen3"
    if any(architecture.startswith("MiniMaxM2") for architecture in architectures):
        return "minimax_m2"
    if "R1" in model or any(name.startswith("DeepseekV3") for name in architectures):
        return "deepseek_r1"
    return "plain"
