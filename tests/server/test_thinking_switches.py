"""Each family's thinking switch and calls, from a template with its turns to parsed events.

The templates are reduced to the turns, the calls and the prompt for the answer. The models of a
family differ in the last: R1-0528 has none of R1's <think>, V3 has the same turns without thinking.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanovllm.registry import resolve
from nanovllm.server.detokenize import Vocabulary
from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.base import CallPart, CallStart, Event, Reasoning, Text, joined
from nanovllm.server.parsers.machine import OutputParser
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.template import Template
from tests.server.calls_as_text import FAMILIES
from tests.server.test_probe import CALLS
from tests.server.tiny_tokenizer import write_folder

DEEPSEEK = "<\uff5cAssistant\uff5c>"
TURNS = {  # of a user or of the model, and the prompt for an answer
    "qwen3_coder": (
        "<|im_start|>{{ m.role }}\n",
        "<|im_start|>assistant\n{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and "
        "not enable_thinking else '<think>\n' }}",
    ),
    "glm4_7": (
        "<|{{ m.role }}|>",
        "<|assistant|>{{ '</think>' if enable_thinking is defined and not enable_thinking "
        "else '<think>' }}",
    ),
    "minimax_m2": ("]~b]{{ m.role }}\n", "]~b]ai\n<think>\n"),
    "deepseek_v3_1": (
        "<\uff5c{{ m.role }}\uff5c>",
        DEEPSEEK + "{{ '<think>' if thinking else '</think>' }}",
    ),
    "deepseek_r1": ("<\uff5c{{ m.role }}\uff5c>", DEEPSEEK),
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALLED: list[Event] = [CallStart("add"), CallPart('{"a": "1"}')]


def template_of(folder: Path, name: str) -> Template:
    begin, prompt = TURNS[name]
    source = (
        "{{ tools | tojson if tools }}{% for m in messages %}" + begin + "{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + CALLS[name] + "{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )
    family = resolve(PARSERS, name)
    template = Template(write_folder(folder, source), family.last_turn, family.tool_template)
    assert template.facts.parser == name and template.facts.shows_tools
    return template


@pytest.mark.parametrize(
    ("name", "fields", "turn"),
    [
        ("qwen3_coder", {}, "<think>\n"),
        ("qwen3_coder", {"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
        ("glm4_7", {}, "<think>"),
        ("glm4_7", {"chat_template_kwargs": {"enable_thinking": False}}, "</think>"),
        ("minimax_m2", {"reasoning_effort": "none"}, "<think>\n"),  # it has no switch
        ("deepseek_v3_1", {}, "</think>"),
        ("deepseek_v3_1", {"reasoning_effort": "high"}, "<think>"),
        ("deepseek_v3_1", {"chat_template_kwargs": {"enable_thinking": True}}, "<think>"),
        ("deepseek_v3_1", {"chat_template_kwargs": {"thinking": True}}, "<think>"),
        ("deepseek_r1", {"reasoning_effort": "high"}, ""),
    ],
)
def test_answers_are_read_as_the_prompt_begins_them(
    name: str, fields: dict[str, Any], turn: str, tmp_path: Path
) -> None:
    template, family = template_of(tmp_path, name), resolve(PARSERS, name)
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **fields}
    prompt = template.prompt(msgspec.convert(asked, ChatRequest))
    assert prompt.turn == turn
    marks = Vocabulary(template.tokenizer, family.markers).marks
    call = FAMILIES[name](("add", '{"a": "1"}'))
    thinks, over = "<think>" in turn and "</think>" not in turn, "hm</think>\n\n"
    outputs = {f"{over if thinks else ''}Sure.\n{call}": [Reasoning("hm")] * thinks}
    if not turn:  # R1-0528 writes the opener itself, V3 does not think
        outputs[f"<think>\n{over}Sure.\n{call}"] = [Reasoning("hm")]
    if thinks:  # MiniMax-M2.5 may repeat the opener
        outputs[f"<think>{over}Sure.\n{call}"] = [Reasoning("hm")]
    for output, reasoning in outputs.items():
        parser = OutputParser(family, marks, prompt.turn, {"add": PARAMETERS})
        text = "".join(marks.get(part, part) for part in parts_of(output, marks))
        found = joined([event for one in text for event in parser.feed(one)] + parser.finish())
        assert found == [*reasoning, Text("Sure."), *CALLED], output
    assert json.loads(CALLED[1].text) == {"a": "1"}


@pytest.mark.parametrize(
    ("turn", "state"),
    [
        ("\n", (None, False)),
        ("<think>\n", (True, True)),
        ("Sure. <think>\n", (True, True)),
        ("<think>\nhm", (True, False)),
        ("<think>\n\n</think>\n\n<think>hm", (True, False)),  # Qwen3's template adds the first two
        ("</think>", (False, True)),
        ("<think></think>", (False, True)),
        ("<think>\nhm\n</think>\n\nSure", (False, False)),
        ("</think>Write <think> first", (False, False)),
        ("Write <think> first", (False, False)),
    ],
)
def test_a_turn_that_mentions_a_marker_in_its_text_is_not_in_reasoning(
    turn: str, state: tuple[bool | None, bool]
) -> None:
    assert resolve(PARSERS, "qwen3").begun(turn) == state
    assert resolve(PARSERS, "plain").begun(turn) == (False, False)


def parts_of(text: str, marks: dict[str, str]) -> list[str]:
    """Return the text in parts, of which those that are markers are separate."""
    for mark in marks:
        text = text.replace(mark, f"\0{mark}\0")
    return text.split("\0")


def test_markers_that_a_client_repeats_are_read_once() -> None:
    family = resolve(PARSERS, "qwen3_coder")
    turn = " " + "<think></think>\n" * 200_000
    assert family.begun(turn) == (False, True)
    assert family.begun(turn + "text <think> text") == (False, False)
    assert family.begun(turn + "<think> text") == (True, False)
    assert family.begun("</think></think>\u00a0<think>" + "text") == (True, False)
