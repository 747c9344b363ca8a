"""Text of a model, of tools or of a server stays text, and stays within its element."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.page.browser import Page
from tests.page.hostile_server import BIDI, EVIL, LONG, SCRIPT, hostile

SHOWN = BIDI.translate({c: f"\\u{c:04x}" for c in (0x202E, 0x2066, 0x200F, 0, 0x2028)})


@pytest.fixture
def page(driver) -> Iterator[Page]:
    with hostile() as url:
        yield Page(driver, url)


def is_harmless(page: Page) -> None:
    """Assert that no text became an element or ran, and that no element is too wide."""
    assert page.run("return window.caught ?? null") is None
    assert page.all("main script, main img, #notice img") == []
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.run(f"return {width}") == 0
    wide = "[...document.querySelectorAll('.turn, .prose, .call, pre, #model, .problem, .stats')]"
    wider = f"{wide}.filter((one) => one.getBoundingClientRect().right > innerWidth + 1).length"
    assert page.run(f"return {wider}") == 0
    refused = [line for line in page.complaints() if "418" not in line and "404" not in line]
    assert refused == []


@pytest.mark.parametrize("logprobs", [False, True])
def test_words_tool_names_and_arguments(page, logprobs) -> None:
    if logprobs:
        page.set("n", "1")
    page.say(SCRIPT)
    page.answered()
    content = page.text(".turn.assistant .content")
    assert content.startswith(EVIL) and content.count(SCRIPT) >= 4
    assert page.text(".thinking div") == EVIL.strip()
    assert page.text(".call .name") == f"{SCRIPT}{SHOWN}{LONG}"
    assert page.text(".results .name") == f"{SCRIPT}{SHOWN}{LONG}"
    assert page.text(".call pre") == EVIL
    assert page.text(".turn.user .prose") == SCRIPT
    assert SCRIPT in page.text(".stats")
    isolated = "return getComputedStyle(document.querySelector('.content .prose')).unicodeBidi"
    assert page.run(isolated) in ("isolate", "plaintext")
    is_harmless(page)


def test_errors_and_names_of_models(page) -> None:
    page.until(lambda: page.text("#model"))
    assert page.text("#model") == f"{SCRIPT}{SHOWN}{LONG}"
    page.say("fail")
    page.answered()
    assert page.text(".problem") == f"418 {SCRIPT}: {EVIL}"
    is_harmless(page)


def test_modes_and_reasons_of_steps(page) -> None:
    page.run("location.hash = 'watch'")
    page.until(lambda: SCRIPT in page.text("#said"))
    page.until(lambda: page.all("#lanes button"))
    page.run("document.querySelector('#lanes button').click()")
    page.until(lambda: f"finished: {SCRIPT}" in page.text("#life"))
    page.until(lambda: SCRIPT in page.text(".curves"))
    is_harmless(page)


def test_a_restored_conversation_is_as_harmless(page) -> None:
    page.say(SCRIPT)
    page.answered()
    page.reload()
    page.answered()
    assert page.text(".turn.assistant .content").startswith(EVIL)
    assert page.text(".call .name") == page.text(".results .name") == f"{SCRIPT}{SHOWN}{LONG}"
    is_harmless(page)


def test_only_the_demo_model_is_called_tiny(page) -> None:
    page.until(lambda: page.text("#model"))
    assert not page.one("#honest").is_displayed()
