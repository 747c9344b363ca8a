"""The allowed output of a request, from its first token to its last, as one structural tag.

It has thinking, then calls in the family's syntax, text, or the form that the client requested.

Decision: markers that are single tokens are matched as tokens, and the engine gives added tokens no
text that a grammar could match. So markers never appear inside JSON or prose. The same letters
written with ordinary tokens end nothing, in the grammar as in the parser.

A call in the grammar matches, to the byte, the calls that the family's models and templates write
and its parser reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec

from nanovllm.grammars.automata import PatternError
from nanovllm.grammars.document import SchemaError
from nanovllm.grammars.regexes import vet
from nanovllm.grammars.schema import MAX_SPACE, OBJECT, compiled
from nanovllm.grammars.tags import (
    ANY_TEXT,
    Format,
    Parameters,
    constant,
    either,
    grammar,
    optional,
    sequence,
)
from nanovllm.server.errors import ApiError, bad_value, invalid_field
from nanovllm.server.parsers.base import KEY_NAME, Syntax
from nanovllm.server.parsers.json_types import words_of
from nanovllm.server.parsers.markers import END_THINK, THINK
from nanovllm.server.protocol import STRUCTURES, ChatRequest
from nanovllm.server.served import Served

MAX_TAG_DEPTH = 32
MAX_TAG_SPACE = 64
MAX_BYTES = 1 << 16  # of a client's tag, grammar or expression
MAX_VALUES = 2000  # texts of a choice
MAX_TAG_BYTES = 1 << 20  # of the whole tag, since there may be many tools
MAX_CHOICE_BYTES = 1 << 16  # of all texts of a choice
NO_CALL: Format = {"type": "regex", "pattern": r"[^{\[\s](.|\s)*"}
GAP: Format = {"type": "regex", "pattern": "\n{0,2}"}  # after thinking
Ids = Mapping[str, int]  # ids of the markers that are single tokens


class ToolSchema(NamedTuple):
    """A function's parameters: the request's field, their schema, and whether all is enforced."""

    where: str
    schema: object
    exact: bool


def structural_tag(request: ChatRequest, served: Served, turn: str) -> str:
    """Return the tag as JSON. `turn`: start of the model's turn in the prompt. Raise ApiError."""
    # These fields could leave no allowed token.
    for field in ("min_tokens", "ignore_eos", "bad_words", "allowed_token_ids"):
        if getattr(request, field):
            text = f"must be left out where {request.constrained_by} needs a grammar"
            raise invalid_field(field, text)
    if not served.eos_ids and not request.stop_token_ids:
        text = "needs a token that ends the output, and the model has none: give stop_token_ids"
        raise invalid_field(str(request.constrained_by), text)
    if served.writes_by_chance:
        text = "cannot be enforced by a server with speculate.accept, whose output is not text"
        raise invalid_field(str(request.constrained_by), text)
    try:
        with refusals():
            whole = _Writer(request, served).whole(turn)
        tag = json.dumps({"type": "structural_tag", "format": whole}, separators=(",", ":"))
    except RecursionError:
        raise invalid_field(str(request.constrained_by), "is nested too deeply") from None
    if len(tag) > MAX_TAG_BYTES:
        text = f"needs a grammar of {len(tag)} bytes; it must be at most {MAX_TAG_BYTES}"
        raise invalid_field(str(request.constrained_by), text)
    return tag


def vet_tools(request: ChatRequest, served: Served) -> None:
    """Check the tools of a request with free output. Raise ApiError.

    The errors are those that `structural_tag` raises for a required call. A tool is thus refused
    regardless of the tool choice.
    """
    with refusals():
        _Writer(request, served).vet_functions()


@contextmanager
def refusals() -> Iterator[None]:
    """Refuse a request whose schema is refused. Raise ApiError."""
    try:
        yield
    except SchemaError as error:
        text = str(error)
        raise ApiError(400, text, param=error.field, code="invalid_schema") from None


class _Writer:
    def __init__(self, request: ChatRequest, served: Served) -> None:
        self._request = request
        self._family = served.family
        self._id_of = served.template.tokenizer.token_to_id
        self._vocab_size = served.vocab_size
        marks = served.vocabulary.marks
        ids = {mark: self._id_of(mark) for mark in marks if marks[mark] != mark}
        self._ids = {
            mark: token_id
            for mark, token_id in ids.items()
            if token_id is not None and token_id < served.vocab_size
        }

    def whole(self, turn: str) -> Format:
        answer = self._answer()
        in_reasoning, _ = self._family.begun(turn)
        if in_reasoning is None:
            return sequence(optional(*spelled(THINK, self._ids), self._thinking(), GAP), answer)
        return sequence(self._thinking(), GAP, answer) if in_reasoning else answer

    def _thinking(self) -> Format:
        budget, end_id = self._request.thinking_token_budget, self._ids.get(END_THINK)
        text = ANY_TEXT if budget in (None, -1) else ANY_TEXT | {"max_tokens": budget}
        end = {"type": "token", "token": end_id}
        return {"type": "tag", "begin": "", "content": text, "end": end if end_id else END_THINK}

    def _answer(self) -> Format:
        choice, syntax = self._request.choice_of_tools, self._family.syntax
        content = self._content()
        if syntax is None and choice.mode == "required":
            raise invalid_field("tool_choice", "needs calls: this model has no syntax of its own")
        if syntax is None or choice.mode == "none":
            return content or ANY_TEXT
        is_single = syntax.is_single or choice.is_named
        once = is_single or self._request.parallel_tool_calls is False
        calling = calls(syntax, self._functions(choice.names), self._ids, once=once)
        if choice.mode == "required":
            return calling
        if content is not None:
            return either(calling, content)
        if self._family.bare:  # a text that begins like a call must be one
            return either(calling, optional(NO_CALL))
        opener = self._family.opener
        before = ANY_TEXT if opener in self._ids else ANY_TEXT | {"excludes": [opener]}
        return sequence(before, optional(calling))

    def vet_functions(self) -> None:
        """Check the tools' schemas without making a grammar."""
        choice, syntax = self._request.choice_of_tools, self._family.syntax
        if syntax is not None and choice.mode != "none":
            for function in self._functions(choice.names).values():
                arguments(syntax, function, {})

    def _functions(self, names: tuple[str, ...]) -> dict[str, ToolSchema]:
        tools: dict[str, ToolSchema] = {}
        for at, function in enumerate(tool["function"] for tool in self._request.tools or ()):
            if function["name"] in names:
                where = f"tools[{at}].function.parameters"
                schema = function.get("parameters") or {"type": "object", "properties": {}}
                exact = function.get("strict") is True
                tools[function["name"]] = ToolSchema(where, schema, exact)
        return tools

    # -- content in the client's form -----------------------------------------------------------

    def _content(self) -> Format | None:
        """Return the format of the content, or None if any text is allowed."""
        response_format, structured = (
            self._request.response_format or {},
            self._request.structured_outputs,
        )
        if structured is not None:
            return self._structured(structured)
        kind, where = response_format.get("type"), "response_format.json_schema.schema"
        if kind == "json_object":
            return grammar(compiled(OBJECT, where, exact=True))
        if kind == "json_schema":
            body, exact = (
                response_format["json_schema"],
                response_format["json_schema"].get("strict") is not False,
            )
            return grammar(compiled(body.get("schema"), where, exact=exact))
        return self._tag(response_format, "response_format") if kind == "structural_tag" else None

    def _structured(self, structured: dict[str, Any]) -> Format:
        kind = next(k for k in STRUCTURES if structured.get(k) not in (None, False))
        value, where = structured[kind], f"structured_outputs.{kind}"
        space = 1 if structured.get("disable_any_whitespace") else MAX_SPACE
        if kind == "json_object":
            return grammar(compiled(OBJECT, where, exact=True, max_space=space))
        if kind == "json":
            schema, exact = _loaded(value, where), structured.get("strict") is not False
            return grammar(compiled(schema, where, exact=exact, max_space=space))
        if kind == "choice":
            is_list = isinstance(value, list) and 0 < len(value) <= MAX_VALUES
            if not is_list or not all(isinstance(text, str) and text for text in value):
                raise bad_value(where, f"a list of 1 to {MAX_VALUES} non-empty strings", value)
            if (size := sum(len(text.encode()) for text in value)) > MAX_CHOICE_BYTES:
                raise bad_value(where, f"at most {MAX_CHOICE_BYTES} bytes in all", size)
            return either(*map(constant, value))
        if kind == "structural_tag":
            return self._tag(_loaded(value, where), where)
        format_ = {"type": kind, "pattern" if kind == "regex" else "grammar": value}
        return dict(self._format(format_, where, 0))

    def _tag(self, tag: Any, where: str) -> Format:  # noqa: ANN401 - any JSON
        if len(json.dumps(tag)) > MAX_BYTES:
            raise bad_value(where, f"at most {MAX_BYTES} bytes of JSON", "more")
        if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
            shown = tag.get("format") if isinstance(tag, dict) else tag
            raise bad_value(f"{where}.format", "an object, the format of the output", shown)
        return dict(self._format(tag["format"], f"{where}.format", 0))

    def _format(self, content: Any, where: str, depth: int) -> Any:  # noqa: ANN401
        """Return a client's format with schemas and expressions checked and tokens as ids."""
        if depth > MAX_TAG_DEPTH:
            raise bad_value(where, f"nested at most {MAX_TAG_DEPTH} deep", "more")
        if isinstance(content, list):
            return [self._format(e, f"{where}[{i}]", depth + 1) for i, e in enumerate(content)]
        if not isinstance(content, dict):
            return content
        kind = content.get("type")
        if kind == "json_schema":
            place, space = f"{where}.json_schema", content.get("max_whitespace_cnt", MAX_SPACE)
            if type(space) is not int or not 0 <= space <= MAX_TAG_SPACE:
                limits = f"an integer from 0 to {MAX_TAG_SPACE}"
                raise bad_value(f"{where}.max_whitespace_cnt", limits, space)
            if content.get("style", "json") != "json":
                raise bad_value(f"{where}.style", "json", content["style"])
            return grammar(compiled(content.get("json_schema"), place, exact=True, max_space=space))
        if kind == "regex":
            try:
                vet(_text(content.get("pattern"), where))
            except PatternError as error:
                raise bad_value(where, f"without {error}", content["pattern"]) from None
        if kind == "grammar":
            _text(content.get("grammar"), where)
        if kind == "token":
            return content | {"token": self._token(content.get("token"), f"{where}.token")}
        return {key: self._format(v, f"{where}.{key}", depth + 1) for key, v in content.items()}

    def _token(self, token: Any, where: str) -> Any:  # noqa: ANN401
        """Return the id of a token that is given as text or id."""
        token_id = self._id_of(token) if isinstance(token, str) else token
        if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
            raise bad_value(where, "a token of this model", token)
        return token_id


# -- calls of a family --------------------------------------------------------------------------


def spelled(text: str, ids: Ids) -> list[Format]:
    """Return the text as formats, with each marker as its single token."""
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    return [{"type": "token", "token": ids[x]} if x in ids else constant(x) for x in parts if x]


def calls(syntax: Syntax, functions: Mapping[str, ToolSchema], ids: Ids, *, once: bool) -> Format:
    """Return the format of one or more calls of functions, given by name.

    Each call is written once in the grammar, because 512 tools would otherwise make it too long.
    Calls with a separator are tags; other calls repeat. The content of a tag cannot contain the
    tag's end, but raw text parameters may.
    """
    each = [_call(syntax, name, function, ids) for name, function in functions.items()]
    one = either(*(sequence(*call) for call in each))
    several: Format = {"type": "repeat", "min": 1, "max": 1 if once else -1, "content": one}
    if syntax.between and not once:
        tag = {"type": "tag", "begin": ""}
        tags = [tag | {"content": sequence(*x), "end": end.get("value", end)} for *x, end in each]
        several = {"type": "tags_with_separator", "tags": tags, "separator": syntax.between}
        several["at_least_one"] = True
    begin, end = (spelled(text, ids) for text in syntax.block)
    return sequence(*begin, several, *end)


def _call(syntax: Syntax, name: str, function: ToolSchema, ids: Ids) -> list[Format]:
    names = {"NAME": name, "QUOTED": json.dumps(name, ensure_ascii=False)}
    filled = [re.sub("NAME|QUOTED", lambda found: names[found[0]], t) for t in syntax.call]
    before, after = (spelled(text, ids) for text in filled)
    return [*before, arguments(syntax, function, ids), *after]


def arguments(syntax: Syntax, function: ToolSchema, ids: Ids) -> Format:
    """Return the format of a function's arguments. Raise SchemaError."""
    if syntax.style == "json":
        text = compiled(function.schema, function.where, exact=function.exact, is_object=True)
        return grammar(text)
    return Parameters(
        syntax.parameter,
        KEY_NAME,
        **function._asdict(),
        spell=partial(spelled, ids=ids),
        words_of=partial(words_of, function.schema) if syntax.has_words else lambda _: {},
    ).form()


def _text(value: Any, where: str) -> str:  # noqa: ANN401
    if not isinstance(value, str) or not 0 < len(value) <= MAX_BYTES:
        raise bad_value(where, f"a string of 1 to {MAX_BYTES} characters", value)
    return value


def _loaded(value: Any, where: str) -> Any:  # noqa: ANN401
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise bad_value(where, f"JSON ({error})", value) from None
