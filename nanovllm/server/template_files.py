"""Chat templates and special tokens in a checkpoint's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from nanovllm.config import ConfigError
from nanovllm.tokenizer import NAMED, SETTINGS, read_object

DEFAULT, TOOL_USE = "default", "tool_use"


class TemplateFiles(Struct, frozen=True):
    folder: Path
    sources: dict[str, str]  # by name; most folders have "default" only
    special: dict[str, str]  # special tokens by name, for use in templates

    def source(self, *, with_tools: bool) -> str:
        if with_tools and TOOL_USE in self.sources:
            return self.sources[TOOL_USE]
        return self.sources[DEFAULT]


def template_files(folder: Path) -> TemplateFiles:
    """Read the folder. Raise ConfigError if there is no template, or a file is broken."""
    settings = read_object(folder / SETTINGS)
    older = read_object(folder / "special_tokens_map.json")
    special = {
        name: text
        for name in NAMED
        if (text := _token_text(settings.get(name, older.get(name)))) is not None
    }
    return TemplateFiles(folder, _sources(folder, settings), special)


def _sources(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return templates by name. Files (.jinja) take precedence, as they do in transformers."""
    sources = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (path := folder / "chat_template.jinja").is_file():
        sources[DEFAULT] = path.read_text(encoding="utf-8")
    if not sources:
        older = read_object(folder / "chat_template.json").get("chat_template")
        sources = _named(settings.get("chat_template", older))
    if not sources:
        raise ConfigError(
            f"{folder} has no chat template: neither chat_template.jinja "
            "nor chat_template in tokenizer_config.json"
        )
    if DEFAULT not in sources:
        names = ", ".join(sorted(sources))
        raise ConfigError(f"{folder} has chat templates ({names}), but none is named {DEFAULT}")
    if not sources[DEFAULT].strip():
        raise ConfigError(f"the chat template in {folder} is empty")
    return sources


def _named(templates: object) -> dict[str, str]:
    """Return templates by name, from a single one or from several with names."""
    if isinstance(templates, str):
        return {DEFAULT: templates}
    if isinstance(templates, Sequence):
        templates = {
            e["name"]: e.get("template") for e in templates if isinstance(e, dict) and "name" in e
        }
    if not isinstance(templates, dict):
        return {}
    return {str(name): source for name, source in templates.items() if isinstance(source, str)}


def _token_text(value: object) -> str | None:
    """Return the text of a special token, which is stored as a string or an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
