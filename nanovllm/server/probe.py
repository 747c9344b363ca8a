"""Properties of a chat template, determined by rendering short conversations.

The parser follows from the calls that the template writes into the history, since a model writes
calls as its template shows them. Names of folders and architectures are not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from nanovllm.config import Config, ConfigError
from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.markers import (
    ARG_KEY,
    CALL,
    END_HEADER,
    END_THINK,
    FENCE,
    FUNCTION,
    INVOKE,
    MINIMAX_CALL,
    PYTHON_TAG,
    SEPARATOR,
    TOOL_CALL,
)
from nanovllm.server.render_task import Task
from nanovllm.server.renderer import Renderer
from nanovllm.server.template_files import TemplateFiles, template_files
from nanovllm.tokenizer import read_object

MAX_RENDER_S = 5.0  # of CPU time
TOOL, CALLED, TEXT = "probe_tool", "probe_called", "probe_text"
KEY_OF_PYTHON = "{'probe_key'"  # an object in Python's notation, which is not JSON
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Probe.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
]
# Parser -> the beginning of a call to NAME.
CALLS = {
    "minimax_m2": rf'{MINIMAX_CALL}\s*{INVOKE}NAME">',
    "qwen3_coder": rf"{TOOL_CALL}\s*{FUNCTION}NAME>",
    "qwen3": rf'{TOOL_CALL}\s*\{{[^<>]*"NAME"',
    "glm4_7": rf"{TOOL_CALL}\s*NAME\s*{ARG_KEY}",
    "deepseek_r1": rf"{CALL}\w*{SEPARATOR}NAME\s*{FENCE}json",
    "deepseek_v3_1": rf"{CALL}NAME{SEPARATOR}",
    "llama3": (
        rf"(?:{re.escape(END_HEADER)}|{re.escape(PYTHON_TAG)})"
        r'\s*\{"name": ?"NAME", ?"parameters":'
    ),
}
# Parser -> calls as shown by instructions in the prompt, if the history shows none.
SHOWN = {
    "minimax_m2": rf"{MINIMAX_CALL}\s*<invoke name=",
    "qwen3_coder": rf"{TOOL_CALL}\s*{FUNCTION}",
    "qwen3": rf'{TOOL_CALL}\s*\{{+"name"',
    "glm4_7": rf"{TOOL_CALL}[^<>]+{ARG_KEY}",
    "deepseek_r1": rf"{CALL}\w*{SEPARATOR}\S+\s*{FENCE}json",
    "deepseek_v3_1": rf"{CALL}\S+{SEPARATOR}",
}
# Added tokens specific to the models of one parser, if the template shows no calls at all.
TOKENS = {
    "minimax_m2": MINIMAX_CALL,
    "deepseek_r1": CALL,
    "glm4_7": ARG_KEY,
    "qwen3": TOOL_CALL,
}
ROLES = ("system", "user", "assistant", "tool")


class TemplateFacts(Struct, frozen=True):
    parser: str
    arguments_as_text: bool = False  # of past calls; otherwise as objects
    shows_tools: bool = True
    reads_parts: frozenset[str] = frozenset()  # roles whose content may be a list of parts
    needs_parts: frozenset[str] = frozenset()  # roles whose content must be a list of parts


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


def prefers_text(source: str) -> bool:
    """Return True if past arguments should be passed as text to a template that takes both.

    Templates that print arguments unchanged need the model's own text, so that its pages are found
    in the prefix cache. Those that serialise or iterate need the object.
    """
    return "arguments is string" in source or "tojson" not in source


def facts_of(files: TemplateFiles, renderer: Renderer) -> TemplateFacts:
    """Render probes. Raise ConfigError if the template is broken or too slow by itself."""
    return _Probe(files, renderer).facts()


class _TooMuchError(Exception):
    """A probe exceeded the limits, so further probes are pointless."""


class _Probe:
    def __init__(self, files: TemplateFiles, renderer: Renderer) -> None:
        self._files = files
        self._renderer = renderer

    def facts(self) -> TemplateFacts:
        for name, source in self._files.sources.items():
            self._check(name, source)
        facts = TemplateFacts("plain", prefers_text(self._files.source(with_tools=True)))
        try:
            parser, as_text = self._calling()
            facts = structs.replace(facts, parser=parser, arguments_as_text=as_text)
            facts = structs.replace(facts, shows_tools=self._shows_tools())
            reads, needs = self._parts()
            return structs.replace(facts, reads_parts=reads, needs_parts=needs)
        except _TooMuchError:  # requests will be refused one by one
            return facts

    def _check(self, name: str, source: str) -> None:
        """Render one message without text, which is fast with any valid template."""
        options = self._files.special | {"messages": [_message("user", "")], "tools": None}
        rendered = self._renderer.render(Task(source, options, MAX_RENDER_S))
        which = "the chat template" if name == "default" else f"the chat template {name!r}"
        if rendered.error == "broken":
            raise ConfigError(f"{which} in {self._files.folder} is broken: {rendered.text}")
        if rendered.error in ("limit", "long"):
            raise ConfigError(
                f"{which} in {self._files.folder} cannot be used: "
                f"even for one message without text, {rendered.text}"
            )

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        as_text: bool | None = None,
    ) -> str | None:
        """Return the text, None if the template refuses the messages."""
        source = self._files.source(with_tools=tools is not None)
        options: dict[str, Any] = {**self._files.special, "messages": messages, "tools": tools}
        options |= {"documents": None, "add_generation_prompt": False}
        as_text = prefers_text(source) if as_text is None else as_text
        task = Task(source, options, MAX_RENDER_S, arguments_as_text=as_text)
        rendered = self._renderer.render(task)
        if rendered.error == "limit":
            raise _TooMuchError
        return None if rendered.error else rendered.text

    def _shows_tools(self) -> bool:
        """Return False if the template would silently drop a request's tools."""
        for begin in ([], [_message("system", TEXT)]):
            text = self._rendered([*begin, _message("user", TEXT)], TOOLS)
            if text is None or TOOL in text:
                return True
        return False

    # -- the parser ----------------------------------------------------------------------------

    def _calling(self) -> tuple[str, bool]:
        """Return the parser, and True if the template takes arguments of past calls as text."""
        first = prefers_text(self._files.source(with_tools=True))
        written: list[bool] = []
        for as_text in (first, not first):
            for messages in _called():
                text = self._with_call(messages, as_text=as_text)
                if CALLED not in text or KEY_OF_PYTHON in text:
                    continue
                written.append(as_text)
                if parser := _first(CALLS, text):
                    return parser, as_text
        if written:
            return self._without_calls(), written[0]
        text = self._rendered([_message("user", TEXT)], TOOLS) or ""
        parser = _first(SHOWN, text) or _first(TOKENS, self._added_tokens())
        return parser or self._without_calls(), first

    def _with_call(self, messages: list[dict[str, Any]], *, as_text: bool) -> str:
        """Render with tools, or without them if the template refuses them."""
        text = self._rendered(messages, TOOLS, as_text=as_text)
        return text or self._rendered(messages, as_text=as_text) or ""

    def _without_calls(self) -> str:
        thinks = any(END_THINK in source for source in self._files.sources.values())
        return "thinking" if thinks else "plain"

    def _added_tokens(self) -> str:
        added = read_object(self._files.folder / "tokenizer.json").get("added_tokens") or ()
        return "\n".join(str(token["content"]) for token in added if isinstance(token, dict))

    # -- content as a list of parts --------------------------------------------------------------

    def _parts(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the roles whose content may be parts, and those whose content must be.

        A template may write each part of a tool's result as a result of its own. So its parts are
        passed only if one part is written as the same text is.
        """
        reads: set[str] = set()
        needs: set[str] = set()
        for role in ROLES:
            as_text = self._rendered(_conversation(role, TEXT)) or ""
            as_parts = self._rendered(_conversation(role, [{"type": "text", "text": TEXT}])) or ""
            if TEXT not in as_parts or re.search(rf"""["']text["']: ["']{TEXT}""", as_parts):
                continue
            if TEXT not in as_text:
                needs.add(role)
            if role in needs or role != "tool" or as_parts == as_text:
                reads.add(role)
        return frozenset(reads), frozenset(needs)


def _first(forms: dict[str, str], text: str) -> str:
    """Return the first parser whose pattern matches the text, "" if none does."""
    matching = (
        parser for parser, form in forms.items() if re.search(form.replace("NAME", CALLED), text)
    )
    return next(matching, "")


def _called() -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with a call. Templates differ in the messages that may surround it."""
    arguments = '{"probe_key": "probe_value"}'
    function = {"name": CALLED, "arguments": arguments}
    call = {"id": "probe0001", "type": "function", "function": function}
    for content in ("", None):
        assistant = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = {"role": "tool", "content": "42", "name": CALLED, "tool_call_id": "probe0001"}
        begin = [_message("user", "Hello"), assistant]
        yield [*begin, result, _message("assistant", "Yes"), _message("user", "Good")]
        yield begin


def _conversation(role: str, content: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return a conversation in which a message of the role has the content."""
    if role == "user":
        return [_message(role, content)]
    if role == "system":
        return [_message(role, content), _message("user", "Hello")]
    if role == "assistant":
        return [_message("user", "Hello"), _message(role, content), _message("user", "Good")]
    begin = next(_called())[:2]
    return [*begin, {**_message(role, content), "name": CALLED, "tool_call_id": "probe0001"}]


def _message(role: str, content: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"role": role, "content": content}
