"""Checks of real tokenizers and chat templates, without their models. Each prints a line:

    python -m tests.clients.tokenizers FOLDER

FOLDER has a folder for each of TOKENIZERS, and the chat templates of llama.cpp in `templates`.
`tests.clients.run tokenizers` downloads them. transformers is the reference for prompts, and the
tokenizer's own `decode` for text.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import xgrammar
from transformers import PreTrainedTokenizerFast

from nanovllm.config import DEMO, load_config
from nanovllm.grammars.runtime.compiler import token_table
from nanovllm.registry import resolve
from nanovllm.server.detokenize import Detokenizer, Vocabulary
from nanovllm.server.errors import ApiError
from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.base import (
    CallPart,
    CallStart,
    Event,
    Family,
    Reasoning,
    Syntax,
    Text,
    joined,
)
from nanovllm.server.parsers.machine import OutputParser
from nanovllm.server.probe import TemplateFacts, facts_of
from nanovllm.server.protocol import ChatRequest, parse_request
from nanovllm.server.renderer import Renderer
from nanovllm.server.served import Served
from nanovllm.server.tag import structural_tag
from nanovllm.server.template import Template
from nanovllm.server.template_files import template_files
from nanovllm.wire import Ready

TOKENIZERS = ("qwen3", "deepseek_v3", "llama3_1")
# Templates of supported models, with their tokenizer and the expected parser.
MODELS = {
    "Qwen-Qwen3-0.6B": ("qwen3", "qwen3"),
    "Qwen-QwQ-32B": ("qwen3", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("qwen3", "qwen3"),
    "Qwen3-Coder": ("qwen3", "qwen3_coder"),
    "Qwen3.5-4B": ("qwen3", "qwen3_coder"),
    "GLM-4.6": ("qwen3", "glm4_7"),
    "GLM-4.7-Flash": ("qwen3", "glm4_7"),
    "MiniMax-M2": ("qwen3", "minimax_m2"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("qwen3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("llama3_1", "deepseek_r1"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v3", "deepseek_v3_1"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_1", "llama3"),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_1", "llama3"),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_1", "llama3"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("llama3_1", "qwen3"),
}
TEXTS = (
    "The quick brown fox jumps over the lazy dog. 12345 + 67890 = 80235\n\n\tdone",
    "Größe, naïve café, Straße; 日本語のテキスト と 中文; العربية; हिन्दी; ไทย",
    "emoji 😀😃🚀 and 👩‍👩‍👧 and 🏳️‍🌈, e\u0301, \u200b, \ufeff",
    "def function(argument):\n    return {'key': [1, 2, 3]}  # <b>&amp;</b>\r\n",
    "<think>typed</think> <tool_call> <|im_end|> <|eot_id|> <\uff5cUser\uff5c> , . ! ' n't",
)
NUM_RANDOM = 300  # outputs of random tokens
ARGUMENTS = {"city": 'Zürich, "old" town\n😀', "days": 3, "exact": True, "tags": ["a", {"b": None}]}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array"},
    },
    "required": ["city", "days", "exact", "tags"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": PARAMETERS,
        "strict": True,
    },
}
ENDS = "<|im_end|>", "<|eot_id|>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"
RENDER, READY = Renderer(), {"worker": 0, "num_pages": 4, "page_tokens": 16, "num_slots": 4}


class Model:
    """A tokenizer's folder, with its own template or that of another checkpoint."""

    def __init__(self, folder: Path, source: str | None = None) -> None:
        self.folder = folder
        if source is not None:
            (folder / "chat_template.jinja").write_text(source)
        config = json.loads((DEMO / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config))

    @property
    def source(self) -> str:
        return (self.folder / "chat_template.jinja").read_text()

    @cached_property
    def facts(self) -> TemplateFacts:
        return facts_of(template_files(self.folder), RENDER)

    @cached_property
    def family(self) -> Family:
        family: Family = resolve(PARSERS, self.facts.parser)
        return family

    @cached_property
    def template(self) -> Template:
        return Template(self.folder, self.family.last_turn, self.family.tool_template, RENDER)

    @cached_property
    def reference(self) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast.from_pretrained(self.folder)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.template.tokenizer, self.family.markers)

    @cached_property
    def served(self) -> Served:
        config = load_config(str(self.folder), ["load.format=dummy"])
        ready = Ready(model="x", max_model_tokens=4000, vocab_size=self.vocabulary.size, **READY)
        return Served(config, ready)

    @cached_property
    def compiler(self) -> xgrammar.GrammarCompiler:
        table = token_table(self.folder, self.vocabulary.size, [self.end_id])
        return xgrammar.GrammarCompiler(table, max_threads=1, cache_enabled=False)

    @property
    def end_id(self) -> int:
        found = self.template.eos_id
        assert found is not None
        return found

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.template.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def events(self, ids: list[int], turn: str = "</think>") -> list[Event]:
        """Return the events of an answer that is fed token by token.

        `turn` is the beginning of the model's turn in the prompt.
        """
        parser = OutputParser(self.family, self.vocabulary.marks, turn, {"get_weather": PARAMETERS})
        detokenizer = Detokenizer(self.vocabulary, skip_special=True)
        found = [event for i in ids for event in parser.feed(detokenizer.feed(i))]
        return joined(found + parser.feed(detokenizer.finish()) + parser.finish())


def call(*, as_text: bool) -> dict[str, Any]:
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False) if as_text else ARGUMENTS
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "call12345", "type": "function", "function": function}


def conversations(*, as_text: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and arguments for both renderers: messages, sometimes tools and variables."""
    system, user = {"role": "system", "content": "Be kind. é"}, {"role": "user", "content": " Hi\n"}
    assistant = {"role": "assistant", "content": "Hello. <b>"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call(as_text=as_text)]}
    result = {
        "role": "tool",
        "content": "7 degrees",
        "name": "get_weather",
        "tool_call_id": "call12345",
    }
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
    yield "one message", {"messages": [user]}
    yield "a system message", {"messages": [system, user]}
    yield "several turns", {"messages": [system, user, assistant, user, assistant, user]}
    yield "a thought", {"messages": [user, thought, user]}
    yield "no new turn", {"messages": [user, assistant], "add_generation_prompt": False}
    yield "to think", {"messages": [user], "enable_thinking": True, "thinking": True}
    yield "not to think", {"messages": [user], "enable_thinking": False}
    yield "tools", {"messages": [system, user], "tools": [TOOL]}
    yield "a call", {"messages": [user, calling, result], "tools": [TOOL]}
    yield "a call and an answer", {"messages": [user, calling, result, assistant, user],
                                   "tools": [TOOL]}  # fmt: skip
    yield "two results", {"messages": [user, calling, result, calling, result], "tools": [TOOL]}


# -- rendering ------------------------------------------------------------------------------------


def check_rendering(model: Model) -> int:
    """Return the number of equal prompts and equal ids. Both renderers must refuse the same."""
    count = 0
    for name, given in conversations(as_text=model.facts.arguments_as_text):
        if "tools" in given and not model.facts.shows_tools:
            count += check_unshown_tools(model, given)
            continue
        options = {"add_generation_prompt": True, **given}
        messages = options.pop("messages")
        try:
            expected = model.reference.apply_chat_template(messages, tokenize=False, **options)
        except Exception:
            expected = None
        try:
            request = asked(given)
            found = model.template.render(request)
            ids = model.template.prompt(request).ids
        except ApiError:
            found, ids = None, []
        assert found == expected, (name, found, expected)
        if expected is not None:
            reference = model.reference(expected, add_special_tokens=False)["input_ids"]
            assert ids == reference, name
            count += 1
    return count


def check_unshown_tools(model: Model, given: dict[str, Any]) -> int:
    """If a template does not show tools, nanovllm's template does, or the request is refused."""
    try:
        text = model.template.render(asked(given))
    except ApiError as error:
        assert error.code == "unsupported_tools" and not model.family.tool_template
    else:
        assert model.family.tool_template and '"city": {"type": "string"}' in text, text
    return 1


def asked(given: dict[str, Any]) -> ChatRequest:
    fields = {k: v for k, v in given.items() if k not in ("enable_thinking", "thinking")}
    kwargs = {k: v for k, v in given.items() if k not in fields}
    return msgspec.convert({**fields, "chat_template_kwargs": kwargs}, ChatRequest)


# -- detokenising ---------------------------------------------------------------------------------


def check_detokenising(model: Model) -> int:
    rng, tokenizer = Random(0), model.template.tokenizer
    outputs = [model.encode(text) for text in TEXTS]
    outputs += [model.encode("".join(rng.sample(TEXTS, 3))) for _ in range(20)]
    known = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    outputs += [rng.choices(known, k=40) for _ in range(NUM_RANDOM)]
    vocabulary = Vocabulary(tokenizer)
    for ids in outputs:
        for skip in (False, True):
            detokenizer = Detokenizer(vocabulary, skip_special=skip)
            text = "".join(map(detokenizer.feed, ids)) + detokenizer.finish()
            assert text == tokenizer.decode(ids, skip_special_tokens=skip), (ids, skip)
            reference = model.reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert text == reference, (ids, skip)
    return 2 * len(outputs)


# -- parsers --------------------------------------------------------------------------------------


def written_call(model: Model) -> str:
    """Return the template's text of a call, up to the end of the turn."""
    messages = [{"role": "user", "content": "Hi"}]
    calling = {"role": "assistant", "content": "", "tool_calls": [call(as_text=False)]}
    given: dict[str, Any] = {"tools": [TOOL], "add_generation_prompt": False}
    begin = model.template.render(asked({**given, "messages": messages}))
    whole = model.template.render(asked({**given, "messages": [*messages, calling]}))
    turn = whole[len(begin) :] if whole.startswith(begin) else whole
    syntax = model.family.syntax
    assert syntax is not None
    opening = (syntax.block[0] or syntax.call[0]).partition("NAME")[0].partition("QUOTED")[0]
    text = turn[turn.rindex(opening.rstrip("\n")) :]
    for end in ENDS:
        text = text.partition(end)[0]
    return text


def check_parser(model: Model, parser: str) -> int:
    assert model.facts.parser == parser, model.facts.parser
    text = written_call(model)
    ids = model.encode(text)
    events = model.events(ids)
    assert [type(event) for event in events] == [CallStart, CallPart], (text, events)
    assert json.loads(events[1].text) == ARGUMENTS, events  # type: ignore[union-attr]
    count = 1
    for end in range(1, len(ids)):  # a truncated call is complete or still open
        for event in model.events(ids[:end]):
            if isinstance(event, CallPart):
                assert is_open(event.text) or json.loads(event.text) == ARGUMENTS, event
        count += 1
    plain = [Text("Hi there. {x} <b>")]
    assert model.events(model.encode("Hi there. {x} <b>")) == plain
    return count


def check_round_trip(model: Model) -> int:
    """Return 1 if the template's text of a turn is parsed as its reasoning, text and call.

    Templates without reasoning show a call only, after a thought that the prompt has closed.
    """
    thinks, thought, text = "reasoning_content" in model.source, "It may rain. <b>", "I look."
    turn = {"role": "assistant", "content": text, "tool_calls": [call(as_text=False)]}
    turn |= {"reasoning_content": thought} if thinks else {}
    given: dict[str, Any] = {"tools": [TOOL], "enable_thinking": thinks}
    messages = [{"role": "user", "content": "Hi"}]
    prompt = model.template.render(asked({**given, "messages": messages}))
    ended = {**given, "messages": [*messages, turn], "add_generation_prompt": False}
    whole = model.template.render(asked(ended))
    begun = model.family.last_turn(prompt)
    if not whole.startswith(prompt):  # the template writes another beginning into the prompt
        prompt, begun = prompt.removesuffix(begun), ""
    assert whole.startswith(prompt), (prompt, whole)
    answer = whole[len(prompt) :]
    for end in ENDS:
        answer = answer.partition(end)[0]
    if not thinks:
        answer, begun = answer.removeprefix("</think>"), "</think>"
    events = model.events(model.encode(answer), begun)
    expected: list[Event] = [Reasoning(thought)] if thinks else []
    expected += [Text(text)] if text in whole else []  # some show no text next to a call
    assert events[:-2] == expected, (begun, answer, events)
    assert isinstance(events[-2], CallStart) and isinstance(events[-1], CallPart), events
    assert json.loads(events[-1].text) == ARGUMENTS, events
    return 1


def is_open(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except ValueError:
        return True
    return False


# -- schemas --------------------------------------------------------------------------------------


def allows(model: Model, ids: list[int], **fields: Any) -> bool:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    request = parse_request(msgspec.json.encode(body), model="x", vocab_size=model.vocabulary.size)
    tag = structural_tag(request, model.served, "</think>\n\n")
    matcher = xgrammar.GrammarMatcher(model.compiler.compile_structural_tag(tag))
    return all(matcher.accept_token(token) for token in [*ids, model.end_id])


def as_written(syntax: Syntax, arguments: dict[str, Any]) -> str:
    """Return the text of a call, exactly as the grammar requires."""
    before, after = (part.replace("NAME", "get_weather") for part in syntax.call)
    before = before.replace("QUOTED", '"get_weather"')
    shown = json.dumps(arguments, ensure_ascii=False)
    if syntax.style != "json":
        begin, end = syntax.parameter
        shown = "".join(
            begin.replace("NAME", name) + (v if isinstance(v, str) else json.dumps(v)) + end
            for name, v in arguments.items()
        )
    return syntax.block[0] + before + shown + after + syntax.block[1]


def check_schemas(model: Model) -> int:
    """Check that a required call and a schema allow valid text, for any tokens."""
    fields = {"tools": [TOOL], "tool_choice": "required"}
    syntax = model.family.syntax
    assert syntax is not None
    count = 0
    for arguments, fits in ((ARGUMENTS, True), ({**ARGUMENTS, "days": "three"}, False)):
        text = as_written(syntax, arguments)
        assert allows(model, model.encode(text), **fields) == fits, text
        count += 1
    assert not allows(model, model.encode("Hello"), **fields)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    for indent in (None, 1):
        text = json.dumps(ARGUMENTS, ensure_ascii=False, indent=indent)
        assert allows(model, model.encode(text), response_format=schema), text
        assert not allows(model, model.encode(text[:-1]), response_format=schema)
        count += 2
    return count + 1


# -- all models -----------------------------------------------------------------------------------


def models(base: Path) -> Iterator[tuple[str, Model, str]]:
    """Yield the name, a folder and the parser of each template of a supported model."""
    for name, (tokenizer, parser) in MODELS.items():
        folder = base / "models" / name
        folder.mkdir(parents=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((base / tokenizer / file).read_bytes())
        yield name, Model(folder, (base / "templates" / f"{name}.jinja").read_text()), parser


def report(counts: Counter[str], name: str, check: Callable[..., int], *args: Any) -> bool:
    """Run a check and print its line. `counts` sums the comparisons by kind of check."""
    try:
        count = check(*args)
    except Exception as error:
        traceback.print_exc()
        sys.stdout.write(f"FAILED {name} - {type(error).__name__}\n")
        return False
    counts[name.partition(":")[0]] += count
    sys.stdout.write(f"PASSED {name} - {count}\n")
    sys.stdout.flush()
    return True


def main(base: Path) -> int:
    passed: list[bool] = []
    counts = Counter[str]()
    for name in TOKENIZERS:
        model = Model(base / name)
        passed.append(report(counts, f"rendering: tokenizer {name}", check_rendering, model))
        passed.append(report(counts, f"detokenising: {name}", check_detokenising, model))
    for name, model, parser in models(base):
        passed.append(report(counts, f"rendering: {name}", check_rendering, model))
        passed.append(report(counts, f"parser: {name}", check_parser, model, parser))
        passed.append(report(counts, f"round trip: {name}", check_round_trip, model))
        passed.append(report(counts, f"schemas: {name}", check_schemas, model))
    others = [path for path in sorted((base / "templates").glob("*.jinja"))
              if path.stem not in MODELS]  # fmt: skip
    for path in others:
        model = Model(base / "qwen3", path.read_text())
        passed.append(report(counts, f"rendering: {path.stem}", check_rendering, model))
    RENDER.close()
    sys.stdout.write(", ".join(f"{kind} {count}" for kind, count in counts.items()) + "\n")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
