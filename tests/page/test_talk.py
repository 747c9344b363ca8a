"""Talk, in a browser, with the demo model."""

from __future__ import annotations

import re

import pytest

from tests.clients.questions import (
    SUM,
    SUM_ANSWER,
)
from tests.page.browser import Page


@pytest.fixture
def page(driver, demo) -> Page:
    return Page(driver, demo.url)


def test_a_streamed_conversation_with_thinking(page) -> None:
    page.run(
        "window.seen = new Set(); new MutationObserver(() => {"
        " const all = document.querySelectorAll('.turn.assistant .content');"
        " if (all.length) window.seen.add(all[all.length - 1].textContent); })"
        ".observe(document.getElementById('messages'), {subtree: true, childList: true})"
    )
    page.say(SUM)
    page.answered()
    assert page.text(".turn.assistant .content") == SUM_ANSWER
    assert len(page.run("return [...window.seen]")) > 3, "it came all at once"
    assert not page.one(".thinking").get_property("open")
    assert re.fullmatch(r"Thought for [\d.]+ (ms|s)", page.text(".thinking summary"))
    assert page.text(".thinking div").startswith("17 + 25: ")
    stats = page.text(".turn.assistant .stats")
    said = r"first token \S+ (ms|s) . \S+ tok/s . \d+ tokens . prompt \d+, \d+ of it cached"
    assert re.fullmatch(rf"{said} . finish: stop", stats), stats
    page.say("and times 2?")
    page.answered(2)
    assert "84" in page.text(".turn.assistant .content")
    assert page.text("#model") == "demo"
    assert page.complaints() == []
