"""Watch in a browser: many requests of the paper engine, and preemption with the demo model."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.end_to_end.demo_server import Server, asked, start
from tests.page.browser import Page


@pytest.fixture(scope="module")
def paper() -> Iterator[Server]:
    server = start("paper", "--set", "paper.tokens_per_s=12", "--set", "schedule.slots=80")
    yield server
    assert server.stop() == 0


@contextmanager
def streams(server: Server, count: int, **fields: Any) -> Iterator[None]:
    """Run `count` requests, each on a separate connection, until the block ends."""

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = asked(f"Number {number}: go on.", stream=True) | fields
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                if stopped.is_set():
                    return

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one(client, number) for number in range(count)))

    stopped = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(all_of_them()))
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(30)


def labels(page: Page) -> list[str]:
    script = "return [...document.querySelectorAll('#lanes button')].map((one) => one.textContent)"
    return page.run(script)


def total(page: Page, name: str) -> int:
    return int(page.text(f"[data-total='{name}']").replace(",", "").replace("-", "0"))


def colours(page: Page, canvas: str) -> set[str]:
    """Return the names of the colours on a canvas."""
    return set(
        page.run(f"""
            const style = getComputedStyle(document.documentElement);
            const of = (name) => style.getPropertyValue('--c-' + name).trim();
            const names = new Map(['wait', 'prompt', 'decode', 'preempted', 'finished',
                'cached', 'held'].map((name) => [of(name), name]));
            const canvas = document.querySelector('{canvas}');
            const {{width, height}} = canvas;
            const data = canvas.getContext('2d').getImageData(0, 0, width, height).data;
            const found = new Set();
            for (let at = 0; at < data.length; at += 4) {{
                if (data[at + 3] < 255) continue;
                const hex = [0, 1, 2].map((i) => data[at + i].toString(16).padStart(2, '0'));
                const name = names.get('#' + hex.join(''));
                if (name) found.add(name);
            }}
            return [...found];
        """)
    )


def test_samples_lanes_and_the_life_of_a_request(driver, paper) -> None:
    """It comes first, since lanes of other requests stay in view for 10 s."""
    page = Page(driver, paper.url, "#watch")
    before = paper.metric("vllm:prompt_tokens_cached_total")
    page.press("16 with a shared prefix")
    page.until(lambda: len(labels(page)) == 16)
    page.until(lambda: {"prompt", "cached", "decode"} <= colours(page, "#lanes-picture"))
    assert paper.metric("vllm:prompt_tokens_cached_total") > before
    page.run("document.querySelector('#lanes button').click()")
    name = re.search(r"#(\d+)", labels(page)[0])[1]
    assert page.text("#life h2") == f"Request {name}"
    page.until(lambda: "decode steps" in page.text("#life"))
    assert re.search(
        r"arrived.*assigned slot \d+: \S+ tokens, \S+ from the cache", page.text("#life")
    )
    page.press("Stop them")
    page.until(lambda: "finished: abort" in page.text("#life"))
    page.until(lambda: total(page, "running") == 0)
    page.press("Close")
    assert not page.one("#life").is_displayed()


def test_a_page_opened_while_64_requests_run_shows_64_lanes_and_right_totals(driver, paper) -> None:
    with streams(paper, 64, max_tokens=2000):
        started = Page(driver, paper.url)  # Talk, until the requests run
        started.until(lambda: paper.metric("vllm:num_requests_running") == 64)
        page = Page(driver, paper.url, "#watch")
        page.until(lambda: len(labels(page)) == 64)
        assert len({re.search(r"#\d+", label)[0] for label in labels(page)}) == 64
        page.until(lambda: all(label.endswith("decoding") for label in labels(page)))
        page.until(lambda: total(page, "running") == 64 and total(page, "generated") > 0)
        assert total(page, "waiting") == total(page, "preempted") == 0
        before = paper.metric("vllm:generation_tokens_total")
        page.until(lambda: total(page, "generated") > before)
        assert total(page, "generated") <= paper.metric("vllm:generation_tokens_total")
        assert total(page, "prompts") == paper.metric("vllm:prompt_tokens_total")
        page.until(lambda: {"decode"} <= colours(page, "#lanes-picture"))
        assert page.one("#lanes-picture").get_attribute("aria-label").startswith("64 lanes")
        assert "64 decode rows" in page.text("#said") and "64 of 80 slots" in page.text("#said")
        assert "held" in colours(page, "#strip-pages canvas")
        page.press("Pause")
        pictures = []
        for _ in range(3):  # the latest steps may arrive late
            steps = page.text("#said")
            page.until(lambda steps=steps: page.text("#said") != steps)
            picture = "return document.getElementById('lanes-picture').toDataURL()"
            pictures.append(page.run(picture))
        assert pictures[1] == pictures[2]
    page.press("Live")
    page.until(lambda: total(page, "running") == 0)
    page.until(lambda: {"finished"} <= colours(page, "#lanes-picture"))
    page.until(lambda: total(page, "generated") == paper.metric("vllm:generation_tokens_total"))
    assert page.complaints() == []


# Two answers: request 7 decodes while pages of request 8 arrive; then request 8 is admitted.
ARRIVALS = """
const done = arguments[0];
Promise.all(["history", "lanes", "draw", "life"].map((name) => import(`/page/${name}.js`))).then(
  ([{ History }, { ownerOf }, draw, { lifeOf }]) => {
    const sizes = { num_slots: 2, num_pages: 64, free: 60, cached: 0, waiting: 0, queue: [] };
    const admitted = (slot, request, more) => (
      { slot, request, prompt: 40, tokens: 40, cached: 0, came_s: 0.5, loaded: 0, ...more });
    const step = (number, more) => ({
      step: number, begun_s: number, ended_s: number + 1, decodes: [0], rows: 1, chunks: [],
      finished: [], admitted: [], preempted: 0, generated: 1, ...more });
    const history = new History();
    const slots = { 0: 7, 1: 8 };
    history.take({ ...sizes, now_s: 2, newest: 1, slots, arriving: [[8, 1.25]],
      steps: [step(1, { slots, admitted: [admitted(0, 7)] })] });
    const view = { span: { from: 0, to: 2 }, isLive: true };
    const labels = [0, 1].map((slot) => ownerOf(history, slot, view));
    const ctx = document.createElement("canvas").getContext("2d");
    const surface = { ctx, width: 100, height: 20 };
    const get = (_, name) => (name === "arriving" ? "#010203" : "#ffffff");
    const colors = new Proxy({}, { get });
    draw.lanes(surface, history, { ...view, slots: [0, 1], pitch: 10, chosen: null }, colors);
    const pixel = (x, y) => [...ctx.getImageData(x, y, 1, 1).data].slice(0, 3).join();
    const pixels = [pixel(50, 15), pixel(80, 15), pixel(80, 5)];
    history.take({ ...sizes, now_s: 4, newest: 2, slots, arriving: [],
      steps: [step(2, { admitted: [admitted(1, 8, { loaded: 32, arriving_s: 1.25 })] })] });
    const bars = history.bars.get(1).map((bar) => [bar.kind, bar.from, bar.to, bar.tokens]);
    done({ labels, pixels, bars, life: lifeOf(history, 8).textContent });
  }, (error) => done(String(error)));
"""


def test_requests_whose_pages_arrive_have_bars_of_their_own(driver, paper) -> None:
    Page(driver, paper.url, "#watch")
    found = driver.execute_async_script(ARRIVALS)
    assert found["labels"] == [[7, "decoding"], [8, "arriving"]]
    own, others = "1,2,3", "255,255,255"
    assert found["pixels"] == [others, own, others]
    assert found["bars"] == [["wait", 0.5, 1.25, 0], ["arriving", 1.25, 2, 32]]
    assert "32 tokens began to arrive from a tier below the GPU" in found["life"]


def test_scrolling_back_in_time_by_keys(driver, paper) -> None:
    page = Page(driver, paper.url, "#watch")
    page.press("1 request")
    page.until(lambda: len(labels(page)) >= 1)
    page.run("document.querySelector('#lanes button').focus()")
    page.driver.switch_to.active_element.send_keys("\ue012")
    assert page.text("#pause") == "Live"
    assert float(page.one("#past").get_property("value")) < 0
    page.press("Stop them")
    page.press("Live")
    assert page.text("#pause") == "Pause"


def test_a_hidden_view_does_not_poll(driver, paper) -> None:
    page = Page(driver, paper.url)

    def asked_for_steps() -> float:
        text = httpx.get(f"{paper.url}/metrics").text
        found = re.search(r'path="/debug/steps",status="200"} (\d+)', text)
        return float(found[1]) if found else 0

    page.until(lambda: page.text("#model") == "demo")
    before = asked_for_steps()
    page.run("return new Promise((done) => setTimeout(done, 700))")
    assert asked_for_steps() == before
    page.run("location.hash = 'watch'")
    page.until(lambda: asked_for_steps() > before + 2)


def test_one_of_several_engines(driver) -> None:
    server = start("paper", "--dp", "2", "--set", "paper.tokens_per_s=5")
    try:
        page = Page(driver, server.url, "#watch")
        page.until(lambda: page.one("select[aria-label=Engine]").is_displayed())
        page.press("16 requests")
        # Each of the two engines runs eight requests.
        page.until(lambda: total(page, "running") == 8)

        def running() -> list[int]:
            text = httpx.get(f"{server.url}/metrics").text
            found = re.findall(r"num_requests_running\{.*\} (\S+)", text)
            return [int(float(count)) for count in found]

        more = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=more):
            both = page.until(lambda: sorted(running()) == [8, 9] and running())
            page.until(lambda: len(labels(page)) == both[0])
            page.run(
                "const engines = document.querySelector('select[aria-label=Engine]');"
                "engines.value = '1'; engines.dispatchEvent(new Event('change'))"
            )
            page.until(lambda: len(labels(page)) == both[1])
            page.press("Stop them")
        assert httpx.get(f"{server.url}/debug/steps?engine=2").status_code == 400
    finally:
        assert server.stop() == 0


def test_requests_by_adapter(driver) -> None:
    """The page of a server with adapters has a table of them. The engine has one slot."""
    options = ("adapters={folder: demo, slots: 3}", "schedule.slots=1")
    server = start(*(part for one in options for part in ("--set", one)), "--device", "cpu")

    def rows() -> list[list[str]]:
        return page.each("#adapters tr", "[...one.children].map((cell) => cell.textContent)")

    try:
        page = Page(driver, server.url, "#watch")
        head = ["Name", "Running", "Waiting"]
        page.until(lambda: rows() == [head, ["pirate", "0", "0"]])
        assert page.one("#adapters").is_displayed()
        assert page.text("#adapters p").endswith(" Slots of the device in use: 0 of 3.")
        with streams(server, 3, model="pirate", max_tokens=3000, ignore_eos=True):
            page.until(lambda: rows() == [head, ["pirate", "1", "2"]])
            assert page.text("#adapters p").endswith(" Slots of the device in use: 1 of 3.")
        page.until(lambda: rows() == [head, ["pirate", "0", "0"]])
        assert page.complaints() == []
    finally:
        assert server.stop() == 0


def test_a_server_without_adapters_has_no_table_of_them(driver, paper) -> None:
    page = Page(driver, paper.url, "#watch")
    page.until(lambda: page.text("[data-total='steps']") != "-")  # the metrics were read
    assert page.one("#adapters").get_property("hidden") and not page.all("#adapters tbody tr")


def test_preemption_can_be_watched_in_the_demo(driver) -> None:
    """The demo's slots can fill more than its cache. A smaller cache saves time."""
    server = start("--set", "cache.pages=100")
    try:
        page = Page(driver, server.url, "#watch")
        page.press("Overflow the cache")
        page.until(lambda: total(page, "preempted") > 0, timeout_s=60)
        page.until(lambda: {"preempted", "prompt"} <= colours(page, "#lanes-picture"))
        assert total(page, "preempted") <= server.metric("vllm:num_preemptions_total")
        page.press("Stop them")
        page.until(lambda: total(page, "running") == 0)
    finally:
        assert server.stop() == 0


def test_the_demo_s_slots_may_fill_more_than_its_cache(demo) -> None:
    """Preemption is visible in a server that `nanovllm serve` starts."""
    there = httpx.get(f"{demo.url}/debug/steps").json()
    (model,) = httpx.get(f"{demo.url}/v1/models").json()["data"]
    assert 16 * there["num_pages"] < there["num_slots"] * model["max_model_len"] / 4
    assert 16 * there["num_pages"] > model["max_model_len"] == 4096
