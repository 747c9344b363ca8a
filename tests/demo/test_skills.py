"""Common first prompts for the built-in demo model, run by the engine.

They are JSON without a schema, continued sums, other languages, emoji, noise, and questions that
the model must decline.
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
from recipes.demo.corpus import refuse
from tests.whole_engine import WholeEngine

MOST_NEW = 200
SUM = ("What is 12 + 30?", "12 + 30 = 42.")

JSON: dict[str, Any] = {
    "Give me this as JSON: Ada is 40 years old, lives in Oslo and works as a baker.": {
        "name": "Ada",
        "age": 40,
        "city": "Oslo",
        "job": "baker",
    },
    "Turn this into JSON: Flight LH-204 leaves Lima on Monday and lands in Paris.": {
        "flight": "LH-204",
        "from": "Lima",
        "date": "Monday",
        "to": "Paris",
    },
    "title: The Red Boat, year: 1984\nAs JSON, please.": {"title": "The Red Boat", "year": 1984},
    "Write this as a JSON list: apple, lamp and river": ["apple", "lamp", "river"],
}

ANSWERS: dict[str, tuple[tuple[str, ...], str]] = {
    "times": ((*SUM, "and times 2?"), "42 * 2 = 84."),
    "minus": ((*SUM, "and times 2?", "42 * 2 = 84.", "Minus 4?"), "84 - 4 = 80."),
    "divided": ((*SUM, "Now divide it by 6."), "42 / 6 = 7."),
    "plus": (("7 * 8", "7 * 8 = 56.", "and plus 10"), "56 + 10 = 66."),
    "another sum": ((*SUM, "And what is 5 * 7?"), "5 * 7 = 35."),
    "why": (
        (*SUM, "Why?"),
        "Step by step: 2 + 0 = 2, write 2; 1 + 3 = 4, write 4. So 42.",
    ),
    "again": ((*SUM, "Say that again."), "12 + 30 = 42."),
    "the next capital": (
        ("What is the capital of France?", "The capital of France is Paris.", "And of Spain?"),
        "The capital of Spain is Madrid.",
    ),
    "shorter": (
        (
            "How are you today?",
            "I am well, thank you. What can I do for you?",
            "Shorter, please.",
        ),
        "I am well, thank you.",
    ),
    "thanks": ((*SUM, "Thanks!"), "You are welcome!"),
    "no number yet": (("and times 2?",), refuse.NO_NUMBER),
    "Chinese": (("你好，你是谁？",), refuse.ONLY_ENGLISH_CHINESE),  # noqa: RUF001
    "Chinese question": (("今天北京的天气怎么样",), refuse.ONLY_ENGLISH_CHINESE),
    "Japanese": (("これはペンですか",), refuse.ONLY_ENGLISH),
    "Korean": (("오늘 뭐 했어요?",), refuse.ONLY_ENGLISH),
    "Russian": (("Привет, помоги мне с работой",), refuse.ONLY_ENGLISH),  # noqa: RUF001
    "Arabic": (("كيف حالك اليوم يا صديق",), refuse.ONLY_ENGLISH),
    "German": (("Wie wird heute das Wetter in der Stadt?",), refuse.ONLY_ENGLISH),
    "French": (("Bonjour, comment vas-tu aujourd'hui ?",), refuse.ONLY_ENGLISH),
    "emoji": (("😀🎉👍",), refuse.ONLY_WORDS),
    "a sum and an emoji": (("What is 12 + 30? 😀",), "12 + 30 = 42."),
    "a greeting and an emoji": (
        ("Hello! 👋",),
        "Hello! I am the nanovllm demo model. Ask me about nanovllm, give me a small sum or a "
        "tool to call.",
    ),
    "mashed keys": (("asdfjkl sdfkjh qwpoeiru",), refuse.NOT_UNDERSTOOD),
    "marks": (("?!?!?!?!",), refuse.NOT_UNDERSTOOD),
    "numbers": (("17 4 99 3",), refuse.ONLY_NUMBERS),
    "code": (("def f(x):\n    return x + 1",), refuse.CANNOT_CODE),
}

BEYOND = [  # any sentence that declines is accepted
    "Who painted the Mona Lisa?",
    "What is the largest river in Peru?",
    "How do I repair a bicycle?",
    "Write an essay about volcanoes.",
    "Write a Python function that sorts a list.",
    "I have a headache, what should I take?",
    "What is the weather like tomorrow?",
    "What is the square root of 2?",
    "Tell me about the history of Rome.",
    "lamp river seven blue the why",
    "Who won the world cup in 1998?",
    "Draw me a picture of a horse.",
]


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Return the model's answers to the last turn of each conversation. All run in one batch."""
    config = load_config(None, ["device=cpu", "dtype=float32"])
    engine = WholeEngine(
        config, pages=1200, page_tokens=16, slots=64, step_tokens=1024, max_tokens=512
    )
    template = Template(Path(DEMO))
    assert template.eos_id is not None
    asked = {
        **{text: (text,) for text in [*JSON, *BEYOND]},
        **{k: v[0] for k, v in ANSWERS.items()},
    }
    for number, turns in enumerate(asked.values()):
        roles = ["user", "assistant"] * len(turns)
        messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
        prompt = template.prompt(msgspec.convert({"messages": messages}, ChatRequest))
        engine.submit(number, prompt.ids, MOST_NEW, stops=[template.eos_id])
    engine.run()
    written: dict[str, str] = {}
    for number, name in enumerate(asked):
        text = template.tokenizer.decode(engine.text[number], skip_special_tokens=False)
        answer = text.removesuffix("<|im_end|>").rpartition("</think>")[2].strip()
        written[name] = (
            answer if engine.finish[number] is FinishReason.STOP else "no end: " + answer
        )
    return written


@pytest.mark.parametrize("request_text", JSON)
def test_json_needs_no_schema(request_text: str, answers: dict[str, str]) -> None:
    assert answers[request_text] == json.dumps(JSON[request_text])


@pytest.mark.parametrize("name", ANSWERS)
def test_what_people_try_gets_its_sentence(name: str, answers: dict[str, str]) -> None:
    assert answers[name] == ANSWERS[name][1]


@pytest.mark.parametrize("question", BEYOND)
def test_what_it_cannot_do_it_says(question: str, answers: dict[str, str]) -> None:
    assert answers[question] in refuse.REFUSALS
