"""Talk in a browser, with the demo model."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.clients.questions import (
    EXTRACT,
    SUM,
    SUM_ANSWER,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_NOW,
)
from tests.end_to_end.demo_server import start
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
    said = r"first token \S+ (ms|s) . \S+ tok/s . \d+ tokens . prompt \d+, \d+ cached"
    assert re.fullmatch(rf"{said} . finish: stop", stats), stats
    page.say("and times 2?")
    page.answered(2)
    assert "84" in page.text(".turn.assistant .content")
    assert page.text("#model") == "demo"
    assert page.complaints() == []


def test_edit_and_again(page) -> None:
    page.say("What is 2 + 2?")
    page.answered()
    page.press("Edit")
    area = page.one(".turn.user textarea")
    area.clear()
    area.send_keys(SUM)
    page.press("Send again")
    page.answered()
    assert page.text(".turn.assistant .content") == SUM_ANSWER
    before = page.one(".turn.assistant")
    page.press("Again")
    page.until(lambda: page.all(".turn.assistant") != [before])
    page.answered()
    assert page.text(".turn.assistant .content") == SUM_ANSWER
    assert [one.text.split("\n")[0] for one in page.all(".turn.user")] == [SUM]


def test_a_tool_round_trip(page) -> None:
    page.run("document.getElementById('example-tools').click()")
    page.say(WEATHER)
    page.answered()
    assert page.text(".call .name") == "get_weather"
    assert json.loads(page.text(".call pre")) == {"city": "Oslo"}
    assert "finish: tool_calls" in page.text(".turn.assistant .stats")
    page.one("textarea.result").send_keys(WEATHER_NOW)
    page.press("Send the result")
    page.answered(2)
    assert page.text(".turn.assistant .content") == WEATHER_ANSWER


def test_an_answer_that_follows_a_schema_and_one_that_does_not(page) -> None:
    page.run("document.getElementById('example-schema').click()")
    page.say(EXTRACT)
    page.answered()
    assert json.loads(page.text(".content")) == {"name": "Maria", "age": 34, "city": "Lima"}
    assert page.text(".verdict") == "Follows the schema"
    page.set("max_tokens", "8")
    page.press("Again")
    page.until(lambda: "finish: length" in page.text(".turn.assistant .stats"))
    assert page.text(".verdict.bad").startswith("Does not follow the schema: ")
    page.set("schema", "{oops")
    page.press("Again")
    page.until(lambda: page.all(".problem") and page.text(".problem").startswith("Schema: "))


def test_the_page_s_own_judgement_of_schemas(page) -> None:
    pairs = [
        ({"type": "integer"}, 3, True), ({"type": "integer"}, 3.5, False),
        ({"type": ["string", "null"]}, None, True), ({"enum": [1, "a"]}, "b", False),
        ({"required": ["a"]}, {}, False), ({"properties": {"a": {"minimum": 2}}}, {"a": 1}, False),
        ({"additionalProperties": False}, {"x": 1}, False), ({"items": {"const": 1}}, [1, 1], True),
        ({"prefixItems": [{"type": "null"}], "items": False}, [None, 1], False),
        ({"anyOf": [{"type": "null"}, {"maxLength": 2}]}, "abc", False),
        ({"oneOf": [{"minimum": 1}, {"minimum": 2}]}, 3, False),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"pattern": "^a+$"}}}, "aab", False),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"pattern": "^a+$"}}}, "aa", True),
        ({"allOf": [{"exclusiveMaximum": 3}, True]}, 3, False), (False, 1, False),
    ]  # fmt: skip
    script = """
        const [pairs, done] = arguments;
        import('/page/schema.js').then(
            (schema) => done(pairs.map(([rule, value]) => schema.complaint(value, rule))));
    """
    found = page.driver.execute_async_script(script, [pair[:2] for pair in pairs])
    assert [complaint is None for complaint in found] == [pair[2] for pair in pairs], found


def test_stop_keeps_what_was_said(page, demo) -> None:
    page.run("document.getElementById('set-stop').value = 'never said'")
    page.change_requests("{ignore_eos: true}")
    page.say("What is nanovllm?")
    page.until(lambda: len(page.text(".turn.assistant .content")) > 20)
    page.press("Stop")
    page.answered()
    assert page.text(".turn.assistant .stats").endswith("stopped")
    assert len(page.text(".turn.assistant .content")) > 20 and not page.one("#stop").is_displayed()
    assert not page.one(".problem").is_displayed()
    page.until(lambda: demo.metric("vllm:num_requests_running") == 0)


def test_an_error_of_the_server_is_shown_as_text(page) -> None:
    page.set("tools", '[{"type": "function", "function": {"name": "<b>x</b>"}}]')
    page.say("hello")
    page.answered()
    said = page.text(".problem")
    assert said.startswith("400 invalid_value: tools[0].function.name") and "<b>x</b>" in said
    assert page.all(".problem b") == []
    page.set("tools", "")
    page.press("Again")
    page.until(
        lambda: page.text(".turn.assistant .content") and not page.one(".problem").is_displayed()
    )


def test_several_answers_and_likelihoods(page) -> None:
    page.set("n", "3")
    page.run("document.getElementById('set-logprobs').click()")
    page.say(SUM)
    page.answered()
    assert len(page.all(".turn.assistant .choice")) == 3
    tokens = page.all(".choice[data-choice='0'] .token")
    assert "".join(str(one.get_property("textContent")) for one in tokens) == SUM_ANSWER
    titles = [str(one.get_attribute("title")) for one in tokens]
    assert all(len(re.findall(r"[\d.]+ %", title)) == 6 for title in titles)
    page.run("document.querySelectorAll('.pick input')[2].click()")
    page.set("n", "")
    page.say("and times 2?")
    page.answered(2)
    assert "84" in page.text(".turn.assistant .content")


@pytest.mark.parametrize("kind", ["curl", "openai-python"])
def test_a_request_as_a_command_that_runs(page, kind, tmp_path) -> None:
    page.set("temperature", "0")
    page.set("top_k", "5")
    page.set("system", 'It\'s "quoted" \\ and\nbroken')
    page.say("What is nanovllm? It's a question.")
    page.answered()
    page.press(f"Copy as {kind}")
    script = page.one("#copy-text").get_property("value")
    command = ["bash", "-c", script] if kind == "curl" else [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if kind == "curl":
        events = [json.loads(line[6:]) for line in ran.stdout.splitlines() if line[:7] == "data: {"]
        choices = [choice for event in events for choice in event["choices"]]
        said = "".join(choice["delta"].get("content", "") for choice in choices)
    else:
        said = ran.stdout
    assert said == page.text(".turn.assistant .content"), ran.stderr


def test_keyboard_alone(page) -> None:
    page.run("document.getElementById('tab-talk').focus()")
    keys = page.driver.switch_to
    keys.active_element.send_keys("\ue014")  # the right arrow
    page.until(lambda: page.one("#watch").is_displayed() and not page.one("#talk").is_displayed())
    assert keys.active_element.get_attribute("id") == "tab-watch"
    keys.active_element.send_keys("\ue012")
    page.until(lambda: page.one("#talk").is_displayed())
    unnamed = page.run(
        "return [...document.querySelectorAll('button, input, textarea, select, canvas')]"
        ".filter((one) => !one.closest('[hidden]') && !one.textContent.trim() && !one.ariaLabel"
        " && !one.labels?.length && !one.getAttribute('aria-labelledby'))"
        ".map((one) => one.outerHTML)"
    )
    assert unnamed == []


def test_the_key_is_asked_for_and_kept_by_the_tab_alone(driver) -> None:
    server = start("--device", "cpu", "--api-key", "sesame", "--set", "engine=paper")
    try:
        page = Page(driver, server.url)
        page.until(lambda: page.one("#key-dialog").is_displayed())
        page.one("#key-value").send_keys("wrong")
        page.press("Use it")
        page.until(lambda: "rejected" in page.text("#key-title"))
        page.until(lambda: page.one("#key-value").is_displayed())
        page.one("#key-value").send_keys("sesame")
        page.press("Use it")
        page.until(lambda: page.text("#model") == "demo")
        page.set("max_tokens", "12")
        page.say("hello")
        page.answered()
        assert page.text(".turn.assistant .content").startswith("These words")
        page.run("location.hash = 'watch'")
        page.until(lambda: " slots in use" in page.text("#said"))
        kept = "Object.values(sessionStorage).includes('sesame')"
        stored = f"return [{kept}, localStorage.length, document.cookie]"
        assert page.run(stored) == [True, 0, ""]
    finally:
        assert server.stop() == 0
