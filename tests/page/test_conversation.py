"""Talk: its layout, and the conversation that a tab keeps."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.action_chains import ActionChains

from tests.clients.questions import SUM, SUM_ANSWER, WEATHER, WEATHER_ANSWER, WEATHER_NOW
from tests.end_to_end.demo_server import start
from tests.page.browser import Page

QUESTION = "What is nanovllm?"


@pytest.fixture
def page(driver, demo) -> Page:
    return Page(driver, demo.url)


def box(page: Page, css: str, at: int = -1) -> dict[str, float]:
    """Return the rectangle of a match, by default the last one."""
    boxes = page.each(css, "one.getBoundingClientRect().toJSON()")
    return dict(boxes[at])


def opacity(page: Page, css: str) -> float:
    return float(page.run(f"return getComputedStyle(document.querySelector('{css}')).opacity"))


def test_model_default_fits_its_box(page) -> None:
    page.press("Settings")
    found = page.run("""
        const select = document.getElementById('set-thinking');
        const style = getComputedStyle(select);
        const ctx = document.createElement('canvas').getContext('2d');
        ctx.font = style.font;
        const label = select.selectedOptions[0].textContent;
        const arrow = 20;
        const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
        const room = select.clientWidth - padding - arrow;
        return [label, ctx.measureText(label).width, room];
    """)
    assert found[0] == "Model default" and found[1] <= found[2]
    page.run(
        "document.querySelectorAll('#settings details').forEach((one) => { one.open = true; })"
    )
    lefts = page.each("#settings input[type=number]", "one.getBoundingClientRect().left")
    assert len(lefts) == 10 and len(set(lefts)) == 1
    page.press("Done")
    assert not page.one("#settings").is_displayed()


def test_the_placeholder_and_the_honest_line(page) -> None:
    page.until(lambda: page.text("#model") == "demo")
    assert page.one("#prompt").get_attribute("placeholder") == "Ask anything (Enter to send)"
    assert page.one("#honest").is_displayed()
    assert page.text("#honest") == "This is a tiny demo model; it knows little."


def test_suggestions_have_one_width(page) -> None:
    widths = page.each(".suggestions button", "one.offsetWidth")
    assert len(widths) == 4 and len(set(widths)) == 1


def test_bubbles_hug_their_text_and_pair_with_answers(page) -> None:
    for number in (1, 2):
        page.say(QUESTION)
        page.answered(number)
    column = box(page, ".turn.assistant")
    bubble, text = box(page, ".bubble"), box(page, ".bubble .prose")
    assert bubble["width"] < 220 and bubble["right"] == pytest.approx(column["right"], abs=1)
    assert bubble["width"] - text["width"] < 40 and bubble["height"] < 45
    question, answer = box(page, ".turn.user", 1), box(page, ".turn.assistant", 1)
    before = box(page, ".turn.assistant", 0)
    within, between = answer["top"] - question["bottom"], question["top"] - before["bottom"]
    assert 0 < within < 20 and between > 1.5 * within
    page.say("word " * 200)
    page.answered(3)
    assert 0.8 * column["width"] < box(page, ".bubble")["width"] < 0.9 * column["width"]


def test_actions_appear_on_hover_focus_and_touch(page) -> None:
    page.say(QUESTION)
    page.answered()
    actions = ".turn.assistant .actions"
    assert opacity(page, actions) == 0
    height = box(page, ".turn.assistant")["height"]
    ActionChains(page.driver).move_to_element(page.one(".turn.assistant .content")).perform()
    page.until(lambda: opacity(page, actions) == 1)
    assert box(page, ".turn.assistant")["height"] == height
    ActionChains(page.driver).move_to_element(page.one("h1")).perform()
    page.until(lambda: opacity(page, actions) == 0)
    page.run(f"document.querySelector('{actions} button').focus()")
    page.until(lambda: opacity(page, actions) == 1)
    assert box(page, f"{actions} button", 0)["left"] <= box(page, ".reply")["left"]
    page.run("document.activeElement.blur()")
    page.resize(390, 844, touch=True)
    page.until(lambda: opacity(page, actions) == 1)
    page.press("Copy as curl")
    assert page.text("#copy-title") == "This request as curl"


def test_a_reload_keeps_the_conversation_until_new_chat(page) -> None:
    assert not page.one("#new-chat").is_enabled()
    page.say(SUM)
    page.answered()
    thought, stats = page.text(".thinking summary"), page.text(".stats")
    page.reload()
    page.answered()
    assert page.text(".turn.user .prose") == SUM and page.text(".content") == SUM_ANSWER
    assert (page.text(".thinking summary"), page.text(".stats")) == (thought, stats)
    page.say("and times 2?")
    page.answered(2)
    assert "84" in page.text(".turn.assistant .content")
    page.press("Copy as curl")
    assert SUM_ANSWER in page.one("#copy-text").get_property("value")
    page.press("Close")
    page.driver.get(f"{page.url}/")  # Talk is the first view if there is a conversation
    page.answered(2)
    assert page.one("#talk").is_displayed()
    page.press("New chat")
    assert page.all(".turn") == [] and page.one(".welcome").is_displayed()
    assert page.run("return sessionStorage.getItem('nanovllm-talk')") is None
    page.reload()
    page.until(lambda: page.one("#watch").is_displayed())
    assert page.all(".turn") == []


def test_a_reload_in_the_middle_of_an_answer_keeps_its_text(page) -> None:
    page.change_requests("{ignore_eos: true}")
    page.say(QUESTION)
    page.until(lambda: len(page.text(".turn.assistant .content")) > 20)
    page.reload()
    page.answered()
    assert len(page.text(".turn.assistant .content")) > 20
    assert page.text(".stats").endswith("stopped")


def test_new_chat_stops_a_running_answer(page, demo) -> None:
    page.change_requests("{ignore_eos: true}")
    page.say(QUESTION)
    page.until(lambda: len(page.text(".turn.assistant .content")) > 20)
    page.press("New chat")
    page.until(lambda: demo.metric("vllm:num_requests_running") == 0)
    page.until(lambda: page.one("#send").is_displayed())
    assert page.all(".turn") == []
    page.reload()
    page.until(lambda: page.all(".welcome"))


def test_a_reload_keeps_tools_choices_and_errors(page) -> None:
    page.run("document.getElementById('example-tools').click()")
    page.say(WEATHER)
    page.answered()
    page.one("textarea.result").send_keys(WEATHER_NOW)
    page.reload()
    page.answered()
    assert page.one("textarea.result").get_property("value") == WEATHER_NOW
    page.run("document.getElementById('example-tools').click()")
    page.press("Send the result")
    page.answered(2)
    assert page.text(".turn.assistant .content") == WEATHER_ANSWER
    page.set("tools", "[]")
    page.set("n", "2")
    page.say(SUM)
    page.answered(3)
    page.run("document.querySelectorAll('.several .pick input')[1].click()")
    page.reload()
    page.answered(3)
    chosen = page.each(".several .pick input", "one.checked")
    assert chosen == [False, True]
    page.set("tools", '[{"type": "function", "function": {"name": "<b>x</b>"}}]')
    page.say("hello")
    page.answered(4)
    problem = page.text(".problem")
    page.reload()
    page.answered(4)
    assert page.text(".problem") == problem and "tools[0].function.name" in problem


def test_stored_data_that_cannot_be_read_is_dropped(page) -> None:
    for data in ("{oops", "7", '[{"rule": 1}]', "[null]"):
        page.driver.get(f"{page.url}/page/theme.css")
        page.driver.execute_script("sessionStorage.setItem('nanovllm-talk', arguments[0])", data)
        page.driver.get(f"{page.url}/#talk")
        page.until(lambda: page.all(".welcome"))
        assert page.complaints() == []


def test_an_answer_with_a_leading_blank_is_not_indented(driver) -> None:
    server = start("--device", "cpu", "--set", "engine=paper")
    try:
        page = Page(driver, server.url)
        for number, logprobs in enumerate((False, True), 1):
            page.set("max_tokens", "12")
            page.run(f"document.getElementById('set-logprobs').checked = {str(logprobs).lower()}")
            page.say("hello")
            page.answered(number)
            assert page.text(".turn.assistant .content").startswith("These words")
        lefts = page.run("""
            return [...document.querySelectorAll('.content .prose')].map((prose) => {
                const walker = document.createTreeWalker(prose, NodeFilter.SHOW_TEXT);
                const range = document.createRange();
                const text = walker.nextNode();
                range.setStart(text, 0);
                range.setEnd(text, 1);
                return range.getBoundingClientRect().left - prose.getBoundingClientRect().left;
            });
        """)
        assert len(lefts) == 2 and max(abs(left) for left in lefts) < 1
    finally:
        assert server.stop() == 0
