"""The model's chat template and tokenizer: messages in, prompt ids out.

Knows nothing about requests in flight, and nothing of how ids become text again.

Decision: `tokenizers` and jinja2 alone; transformers would add seconds to every start.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import Node
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct, structs

from nanovllm.config import ConfigError
from nanovllm.server.errors import ApiError
from nanovllm.server.length import Lengths
from nanovllm.server.protocol import ChatMessage, ChatRequest, PastCall
from nanovllm.tokenizer import SETTINGS, read_object, read_tokenizer

NEWER_ROLES = {"developer": "system", "function": "tool"}  # which templates do not know
TEMPLATES = Path(__file__).parent / "templates"
MAX_PROMPT_CHARS = 1 << 26
MAX_RENDER_S = 5.0
END = "\udfff"  # of the message that is continued: half a surrogate pair, as no client can send


class Prompt(Struct, frozen=True):
    ids: list[int]
    turn: str = ""  # what it has already written of the model's turn
    grammar: str = ""  # that the output follows


class Template:
    """Immutable after construction: threads may render at once."""

    def __init__(
        self,
        folder: Path,
        last_turn: Callable[[str], str] = lambda _: "",
        tool_template: str = "",
    ) -> None:
        """`last_turn` finds the model's turn at a prompt's end.

        `tool_template` (a file in templates/) serves requests with tools if the model's own
        template ignores them. Raises ConfigError when the folder's files are missing or broken.
        """
        self._last_turn = last_turn
        settings = read_object(folder / SETTINGS)
        self.tokenizer = read_tokenizer(folder, settings)
        self._lengths = Lengths(self.tokenizer)
        self._special = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(settings.get(name))) is not None
        }
        source = _template_source(folder, settings)
        # Templates that print arguments as they are need the model's own text back; those that
        # serialise or iterate need the object.
        self._arguments_as_text = "arguments is string" in source or "tojson" not in source
        self._opens_thinking = "\uff5c><think>" in source
        self._environment = _Environment()
        self._tool_template: jinja2.Template | None = None
        if tool_template and "tools" not in source:
            own = (TEMPLATES / tool_template).read_text(encoding="utf-8")
            self._tool_template = self._environment.from_string(own)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template in {folder} is broken: {error}") from None

    @property
    def eos_id(self) -> int | None:
        return self.tokenizer.token_to_id(self._special.get("eos_token", ""))

    def prompt(self, request: ChatRequest, context: int | None = None) -> Prompt:
        """Slow for long prompts: call it on a thread. Raises ApiError.

        A prompt that surely has as many tokens as `context`, or more, is refused without being
        tokenised to its end.
        """
        text = self.render(request).encode(errors="replace").decode()  # half pairs of arguments
        ids = self._lengths.encode(text, context)
        if not ids:
            raise ApiError(400, "messages: the prompt is empty", param="messages")
        return Prompt(ids, self._last_turn(text))

    def render(self, request: ChatRequest) -> str:
        options = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            options.setdefault("reasoning_effort", request.reasoning_effort)
            options.setdefault("enable_thinking", request.reasoning_effort != "none")
        options |= self._special
        options["messages"] = [self._as_dict(message) for message in request.messages]
        options["tools"] = None if request.tool_choice == "none" else request.tools or None
        continued = request.messages[-1].text if request.continue_final_message else None
        if continued:
            options["messages"][-1]["content"] += END
        opens_turn = request.add_generation_prompt is not False
        options["add_generation_prompt"] = opens_turn and not continued
        template = self._template
        is_with_tools = options["tools"] or any(
            message["role"] == "tool" or "tool_calls" in message for message in options["messages"]
        )
        if self._tool_template is not None and is_with_tools:
            template = self._tool_template
            options["opens_thinking"] = self._opens_thinking
        self._environment.start_clock()
        try:
            text = _within_limits(template.generate(options))
        except Exception as error:  # whatever a template does with the client's values
            field = "chat_template_kwargs" if request.chat_template_kwargs else "messages"
            if request.chat_template_kwargs:  # refused without them, too? Then it is the messages
                self.render(structs.replace(request, chat_template_kwargs=None))
            text = f"{field}: the chat template refused them: {error}".replace(END, "")
            raise ApiError(400, text, param=field, code="template_error") from None
        return _cut_after(text, continued) if continued else text

    def _as_dict(self, message: ChatMessage) -> dict[str, Any]:
        calls = [self._call(call) for call in message.tool_calls or ()]
        shown: dict[str, Any] = {
            "role": NEWER_ROLES.get(message.role, message.role),
            "content": message.text or "",  # also beside calls: templates would print None
            "tool_calls": calls or None,
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "reasoning_content": message.reasoning or message.reasoning_content,
        }
        return {key: value for key, value in shown.items() if value is not None}

    def _call(self, call: PastCall) -> dict[str, Any]:
        arguments = call.function.arguments or {}
        if self._arguments_as_text:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(arguments)
                arguments = value if isinstance(value, dict) else arguments
        function = {"name": call.function.name, "arguments": arguments}
        return {"id": call.id, "type": "function", "function": function}


def _within_limits(pieces: Iterable[str]) -> str:
    text: list[str] = []
    num_chars = 0
    for piece in pieces:
        text.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_PROMPT_CHARS:
            raise ValueError(f"the prompt has more than {MAX_PROMPT_CHARS} characters")
    return "".join(text)


def _cut_after(prompt: str, last: str) -> str:
    """The prompt up to the end of its last message, which the model is to continue."""
    *before, _ = prompt.split(END)
    if (said := "".join(before)).rstrip().endswith(last.strip()) and before:
        return said
    text = "the chat template changes the last message, so that it cannot be continued"
    raise ApiError(400, text, param="continue_final_message", code="template_error")


class _CodeGenerator(CodeGenerator):
    """Compiled templates look at the clock at the beginning of each block."""

    def blockvisit(self, nodes: Iterable[Node], frame: Frame) -> None:
        self.writeline("environment.check_time()")
        super().blockvisit(nodes, frame)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, which is what templates are written for; with a time limit.

    Decision: the limit is compiled into templates, because a thread cannot be stopped and whatever
    a template does for long, it does in loops and recursions, with output or without.
    """

    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._local = threading.local()

    def start_clock(self) -> None:
        """This thread renders from now on."""
        self._local.deadline = time.monotonic() + MAX_RENDER_S

    def check_time(self) -> None:
        if time.monotonic() > self._local.deadline:
            raise ValueError(f"it takes longer than {MAX_RENDER_S:g} s")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _template_source(folder: Path, settings: dict[str, Any]) -> str:
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, Sequence) and not isinstance(found, str):  # several, each with a name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    if not isinstance(found, str):
        raise ConfigError(
            f"{folder} has no chat template: neither chat_template.jinja "
            "nor chat_template in tokenizer_config.json"
        )
    return found


def _token_text(value: object) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
