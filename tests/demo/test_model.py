"""Twelve fixed prompts for the built-in demo model, one for each skill, run by the engine.

Their values are held out from the corpus, so none of them was in the training data.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanovllm.config import DEMO, load_config
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.template import Template
from nanovllm.wire import FinishReason
from tests.whole_engine import WholeEngine

MOST_NEW = 150


def tool(tool_name: str, does: str, **arguments: str) -> dict[str, Any]:
    """Return a tool definition with required string arguments."""
    properties = {name: {"type": "string", "description": text} for name, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": tool_name, "description": does, "parameters": parameters}
    return {"type": "function", "function": function}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ORDER = tool("trackOrder", "Look up the status of an order.", orderNumber="Id of the order.")
MUSIC = tool("pierdcrimnierk_start_music", "Play music.", song="Title of the track.")
BOOKS = tool("library_search", "Find books in the library.", query="The title of the book.")
LIGHT = tool("control_light", "Switch the lights of a room.", where="The room.", value="on or off")
LIT = [
    {"role": "user", "content": "Turn the kitchen light on."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {
                    "name": "control_light",
                    "arguments": json.dumps({"where": "kitchen", "value": "on"}),
                },
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"result": "saved"}'},
]
ABOUT_PERSON = (
    'Fill this JSON template with the text: {"age_years": ..., "place": ..., "job": ...}: '
    '"My neighbour Discayout from Osaka is a butcher and turned 40."'
)

DOZEN: dict[str, tuple[str | list[dict[str, Any]], list[dict[str, Any]], bool | None, str]] = {
    "about": (
        "What does top_p do",
        [],
        None,
        "top_p keeps only the most likely tokens whose probabilities together reach p, and draws "
        "from those. With 1.0 it is off.",
    ),
    "chat": ("What is the capital city of China.", [], None, "The capital of China is Beijing."),
    "sum": ("Tell me 551 - 78?", [], None, "551 - 78 = 473."),
    "sum_asked_to_think": ("Please compute 3 x 4.", [], True, "3 * 4 = 12."),
    "extract": (ABOUT_PERSON, [], None, '{"age_years": 40, "place": "Osaka", "job": "butcher"}'),
    "echo": ("Say only this: moon landings in Palermo", [], None, "moon landings in Palermo"),
    "rewrite": ('"sleflarn cessed"\nWrite the first word.', [], None, "sleflarn"),
    "call": (
        "Can you play The Philide for me?",
        [MUSIC, ORDER],
        None,
        call("pierdcrimnierk_start_music", song="The Philide"),
    ),
    "call_with_a_thought": (
        "Has order ZYP265 arrived?",
        [ORDER, BOOKS],
        True,
        call("trackOrder", orderNumber="ZYP265"),
    ),
    "parallel": (
        "Check order B-29798 and F-060.",
        [ORDER],
        None,
        call("trackOrder", orderNumber="B-29798") + "\n" + call("trackOrder", orderNumber="F-060"),
    ),
    "result": (LIT, [LIGHT], None, "The light in the kitchen is now on."),
    "no_call": (
        "Show me the way from Jakarta to Ottawa by train?",
        [BOOKS],
        None,
        "None of the tools at hand can do that.",
    ),
}


@pytest.fixture(scope="module")
def written() -> dict[str, tuple[str, FinishReason]]:
    """Return the model's outputs and finish reasons. All twelve run in one batch."""
    config = load_config(None, ["device=cpu", "dtype=float32"])
    engine = WholeEngine(
        config, pages=400, page_tokens=16, slots=12, step_tokens=512, max_tokens=512
    )
    template = Template(Path(DEMO))
    assert template.eos_id is not None
    for number, (messages, tools, thinks, _) in enumerate(DOZEN.values()):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        options = {} if thinks is None else {"enable_thinking": thinks}
        chat = {"messages": messages, "tools": tools, "chat_template_kwargs": options}
        prompt = template.prompt(msgspec.convert(chat, ChatRequest))
        engine.submit(number, prompt.ids, MOST_NEW, stops=[template.eos_id])
    engine.run()
    return {
        kind: (
            template.tokenizer.decode(engine.text[number], skip_special_tokens=False),
            engine.finish[number],
        )
        for number, kind in enumerate(DOZEN)
    }


@pytest.mark.parametrize("kind", DOZEN)
def test_the_demo_model_answers_right_and_stops(kind: str, written) -> None:
    text, finish = written[kind]
    _, _, thinks, right = DOZEN[kind]
    thought, closed, answer = text.removesuffix("<|im_end|>").rpartition("</think>")
    assert answer.strip() == right
    assert finish is FinishReason.STOP
    assert bool(closed) == (thinks is True or kind == "sum")
    assert bool(thought.removeprefix("<think>").strip()) == bool(closed)


def test_both_models_fit_into_the_package() -> None:
    assert sum(file.stat().st_size for file in Path(DEMO).rglob("*") if file.is_file()) <= 12e6
