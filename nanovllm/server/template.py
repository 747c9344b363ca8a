"""Chat template and tokenizer of the model: messages to prompt ids.

Independent of requests in flight and of detokenisation.

Decision: only `tokenizers` and jinja2; transformers would add seconds to every start.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from nanovllm.server.errors import ApiError
from nanovllm.server.length import Lengths
from nanovllm.server.probe import MAX_RENDER_S, facts_of
from nanovllm.server.protocol import ChatMessage, ChatRequest, PastCall
from nanovllm.server.render_task import Task
from nanovllm.server.renderer import Renderer
from nanovllm.server.template_files import template_files
from nanovllm.tokenizer import read_tokenizer

NEWER_ROLES = {"developer": "system", "function": "tool"}  # roles that templates do not handle
TEMPLATES = Path(__file__).parent / "templates"
NO_TOOLS = (
    "tools: the model's chat template does not support tools, so the model would not see them; "
    "leave them out, or serve the model with a template that supports tools"
)
# Names, besides `reasoning_content`, under which templates read a message's reasoning.
REASONING_NAMES = ("reasoning", "thinking")


class Prompt(Struct, frozen=True):
    ids: list[int]
    turn: str = ""  # beginning of the model's turn in the prompt
    grammar: str = ""  # for the output


class Template:
    """Chat template with its tokenizer. Threads may share it."""

    def __init__(
        self,
        folder: Path,
        last_turn: Callable[[str], str] = lambda _: "",
        tool_template: str = "",
        renderer: Renderer | None = None,
    ) -> None:
        """Read the folder. Raise ConfigError if its files are missing or broken.

        `last_turn` finds the model's turn at the end of a prompt. `tool_template` (a file in
        templates/) serves requests with tools if the model's own template ignores them.
        """
        self._last_turn = last_turn
        self._renderer = renderer or Renderer()
        self._files = template_files(folder)
        self.facts = facts_of(self._files, self._renderer)
        self.tokenizer = read_tokenizer(folder)
        self._lengths = Lengths(self.tokenizer)
        self._tool_source = ""
        if tool_template and not self.facts.shows_tools:
            self._tool_source = (TEMPLATES / tool_template).read_text(encoding="utf-8")
        self._reasoning_names = ["reasoning_content"]
        for name in REASONING_NAMES:
            if any(_reads(source, name) for source in self._files.sources.values()):
                self._reasoning_names.append(name)

    @property
    def eos_id(self) -> int | None:
        return self.tokenizer.token_to_id(self._files.special.get("eos_token", ""))

    def prompt(self, request: ChatRequest, context: int | None = None) -> Prompt:
        """Return the prompt. Slow if it is long, so call it on a thread.

        Raise ApiError. A prompt that is certain to have at least `context` tokens is refused
        without being tokenised to its end.
        """
        text = self.render(request)
        ids = self._lengths.encode(text, context, request.cache_salt or "")
        if not ids:
            raise ApiError(400, "messages: the prompt is empty", param="messages")
        return Prompt(ids, self._last_turn(text))

    def render(self, request: ChatRequest) -> str:
        options = self._options(request)
        is_continued = bool(request.continue_final_message and request.messages[-1].text)
        opens_turn = request.add_generation_prompt is not False
        options["add_generation_prompt"] = opens_turn and not is_continued
        source = self._files.source(with_tools=bool(options["tools"]))
        is_with_tools = options["tools"] or any(
            message["role"] == "tool" or "tool_calls" in message for message in options["messages"]
        )
        if self._tool_source and is_with_tools:
            options["begun"] = self._begun(request)
            source = self._tool_source
        elif options["tools"] and not self.facts.shows_tools:
            raise ApiError(400, NO_TOOLS, param="tools", code="unsupported_tools")
        as_text = self.facts.arguments_as_text or source == self._tool_source
        task = Task(
            source=source,
            options=options,
            max_s=MAX_RENDER_S,
            arguments_as_text=as_text,
            is_continued=is_continued,
        )
        rendered = self._renderer.render(task)
        if not rendered.error:
            return rendered.text
        if rendered.error == "changed":
            text = "the chat template changes the last message, so that it cannot be continued"
            raise ApiError(400, text, param="continue_final_message", code="template_error")
        field = "chat_template_kwargs" if request.chat_template_kwargs else "messages"
        if request.chat_template_kwargs:  # if it succeeds without them, they are at fault
            self.render(structs.replace(request, chat_template_kwargs=None))
        text = f"{field}: the chat template cannot render them: {rendered.text}"
        raise ApiError(400, text, param=field, code="template_error")

    def _options(self, request: ChatRequest) -> dict[str, Any]:
        """Return the template's variables; later assignments override earlier ones."""
        options: dict[str, Any] = {"documents": None}
        options |= request.chat_template_kwargs or {}
        if request.reasoning_effort is not None:
            options.setdefault("reasoning_effort", request.reasoning_effort)
            options.setdefault("enable_thinking", request.reasoning_effort != "none")
        if "enable_thinking" in options:  # templates of DeepSeek-V3.1 read the other name
            options.setdefault("thinking", options["enable_thinking"])
        options |= self._files.special
        options["messages"] = [self._as_dict(message) for message in request.messages]
        options["tools"] = None if request.tool_choice == "none" else request.tools or None
        return options

    def _begun(self, request: ChatRequest) -> str:
        """Return the beginning of the model's turn in its own template, for use in the tool
        template.
        """
        plain = [ChatMessage("user", "Hello")]
        if request.add_generation_prompt is False or request.continue_final_message:
            return ""
        without_tools = structs.replace(request, messages=plain, tools=None, tool_choice=None)
        return self._last_turn(self.render(without_tools))

    def _as_dict(self, message: ChatMessage) -> dict[str, Any]:
        calls = [_call(call) for call in message.tool_calls or ()]
        role = NEWER_ROLES.get(message.role, message.role)
        shown: dict[str, Any] = {
            "role": role,
            "content": self._content(message, role),
            "tool_calls": calls or None,
            "name": message.name,
            "tool_call_id": message.tool_call_id,
        }
        for name in self._reasoning_names:
            shown[name] = message.reasoning or message.reasoning_content
        return {key: value for key, value in shown.items() if value is not None}

    def _content(self, message: ChatMessage, role: str) -> str | list[dict[str, str]]:
        """Return text, or a list of parts if the template reads these.

        The content of calls without text is empty, since templates would print None.
        """
        parts = message.content
        if isinstance(parts, list) and parts and role in self.facts.reads_parts:
            return [{"type": "text", "text": part.text or part.refusal or ""} for part in parts]
        text = message.text or ""
        if text and role in self.facts.needs_parts:
            return [{"type": "text", "text": text}]
        return text


def _call(call: PastCall) -> dict[str, Any]:
    """Return a past call. The subprocess that renders it parses its arguments."""
    arguments = call.function.arguments or {}
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reads(source: str, name: str) -> bool:
    """Return True if the template reads an attribute or a key of this name."""
    return bool(re.search(rf"""\.{name}\b|\[['"]{name}['"]\]|['"]{name}['"] in\b""", source))
