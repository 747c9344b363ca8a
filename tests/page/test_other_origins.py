"""Requests of pages of other origins to a server on this machine, in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from selenium import webdriver

from tests.end_to_end.demo_server import Server, start
from tests.page.browser import Page, start_browser
from tests.page.other_pages import OPTIONS, other_pages
from tests.server.serving import eventually

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3})
SECRETS = ("/metrics", "/debug/steps", "/v1/models", "/health")
FETCH = """
    const [url, options, done] = arguments;
    fetch(url, options).then(
        async (answer) => done([answer.type, answer.status, await answer.text()]),
        () => done(["failed", 0, ""]));
"""
FORM = """
    const [url, kind, name, value] = arguments;
    const frame = Object.assign(document.createElement("iframe"), {name: "sink"});
    const form = Object.assign(document.createElement("form"),
        {action: url, method: "POST", enctype: kind, target: "sink"});
    form.append(Object.assign(document.createElement("input"), {name, value, type: "hidden"}));
    document.body.append(frame, form);
    form.submit();
"""
SANDBOX = """
    const [url, options, done] = arguments;
    window.onmessage = (event) => done([event.origin, event.data]);
    const frame = Object.assign(document.createElement("iframe"), {sandbox: "allow-scripts"});
    frame.srcdoc = `<script>fetch(${JSON.stringify(url)}, ${JSON.stringify(options)}).then(
        (answer) => parent.postMessage(answer.type, "*"),
        () => parent.postMessage("failed", "*"))</${"script"}>`;
    document.body.append(frame);
"""
BEACON = "return navigator.sendBeacon(arguments[0], arguments[1])"


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    driver = start_browser(*OPTIONS)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with other_pages() as port:
        yield port


@pytest.fixture(scope="module")
def closed() -> Iterator[Server]:
    server = start("paper", "--set", "paper.tokens_per_s=1000")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def opened(port) -> Iterator[Server]:
    """A server with a host name that allows one other origin."""
    settings = (
        f"server.allowed_origins=[http://chat.test:{port}]",
        "server.allowed_hosts=[box.test]",
    )
    server = start("paper", *(word for one in settings for word in ("--set", one)))
    yield server
    assert server.stop() == 0


def counts(server: Server, path: str = CHAT) -> dict[int, int]:
    """Return the number of responses of a path by status."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    found = re.findall(rf'http_requests_total{{.*,path="{path}",status="(\d+)"}} (\d+)', text)
    return {int(status): int(count) for status, count in found}


def fetched(driver: webdriver.Chrome, url: str, **options: Any) -> list[Any]:
    """Return the response's type, status and text, if the page may read them."""
    return driver.execute_async_script(FETCH, url, options)


def post(kind: str | None, **more: str) -> dict[str, Any]:
    headers = {} if kind is None else {"Content-Type": kind}
    return {"method": "POST", "body": BODY, "headers": headers, **more}


def test_a_foreign_page_can_neither_chat_nor_read(browser, closed, port) -> None:
    browser.get(f"http://evil.test:{port}/")
    chat = closed.url + CHAT
    assert counts(closed) == {}
    for options in (post("application/json"), post("text/plain"), post(None)):
        assert fetched(browser, chat, **options) == ["failed", 0, ""]
    assert fetched(browser, chat, **post("text/plain", mode="no-cors")) == ["opaque", 0, ""]
    assert fetched(browser, chat, **post(None, mode="no-cors")) == ["opaque", 0, ""]
    for path in SECRETS:
        assert fetched(browser, closed.url + path) == ["failed", 0, ""]
    assert browser.execute_script(BEACON, chat, BODY)
    origin, kind = browser.execute_async_script(SANDBOX, chat, post("text/plain"))
    assert (origin, kind) == ("null", "failed")
    eventually(lambda: counts(closed).get(403) == 7)  # including the OPTIONS request for JSON
    assert counts(closed) == {403: 7}
    refused = [line for line in closed.lines if "error=origin_not_allowed" in line]
    line = f"--set 'server.allowed_origins=[http://evil.test:{port}]'"
    assert refused[0].rstrip().endswith(line) and "path=/v1/chat/completions" in refused[0]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_form_of_a_foreign_page_does_not_chat(browser, closed, port, kind) -> None:
    browser.get(f"http://evil.test:{port}/")
    before = counts(closed)
    name, value = BODY[:-1] + ', "user": "', '"}'  # JSON, once a text form joins them with "="
    browser.execute_script(FORM, closed.url + CHAT, kind, name, value)
    eventually(lambda: counts(closed).get(403, 0) == before.get(403, 0) + 1)
    assert 200 not in counts(closed)


def test_a_name_that_resolves_to_this_machine_reads_nothing(browser, closed) -> None:
    """DNS rebinding: the browser regards both as one origin."""
    rebound = closed.url.replace("127.0.0.1", "rebind.test")
    before = counts(closed)
    browser.get(f"{rebound}/")
    assert "host_not_allowed" in browser.page_source
    for path in (*SECRETS, "/", "/page/main.js"):
        kind, status, text = fetched(browser, rebound + path)
        assert (kind, status) == ("basic", 403) and "server.allowed_hosts=[rebind.test]" in text
    kind, status, _ = fetched(browser, rebound + CHAT, **post("application/json"))
    assert (kind, status) == ("basic", 403)
    assert counts(closed).get(403, 0) == before.get(403, 0) + 1 and 200 not in counts(closed)


def test_a_page_of_this_machine_may(browser, closed, port) -> None:
    browser.get(f"http://localhost:{port}/")
    kind, status, text = fetched(browser, closed.url + CHAT, **post("application/json"))
    assert (kind, status) == ("cors", 200)
    assert json.loads(text)["usage"]["completion_tokens"] == 3
    assert fetched(browser, f"{closed.url}/metrics")[:2] == ["cors", 200]


def test_a_page_that_is_named_may(browser, opened, port) -> None:
    """The request is that of the openai client in a browser, with a key and its own headers."""
    browser.get(f"http://chat.test:{port}/")
    sent = post("application/json")
    sent["headers"] |= {"Authorization": "Bearer x", "X-Stainless-Lang": "js"}
    sent["body"] = json.dumps({**json.loads(BODY), "stream": True})
    kind, status, text = fetched(browser, opened.url + CHAT, **sent)
    assert (kind, status) == ("cors", 200) and text.endswith("data: [DONE]\n\n")
    assert fetched(browser, f"{opened.url}/v1/models")[:2] == ["cors", 200]
    browser.get(f"http://evil.test:{port}/")
    assert fetched(browser, opened.url + CHAT, **sent) == ["failed", 0, ""]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "box.test"])
def test_the_server_s_own_page_works_under_each_name(browser, opened, host) -> None:
    page = Page(browser, opened.url.replace("127.0.0.1", host))
    page.set("max_tokens", "12")
    page.say("hello")
    page.answered()
    assert page.text(".turn.assistant .content").startswith("These words")
    page.run("location.hash = 'watch'")
    page.until(lambda: " slots in use" in page.text("#said"))
    assert page.complaints() == []
