"""Watch: its start, numbers, axes and pictures, for an engine with 16 slots."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.demo_server import Server, start
from tests.page.browser import Page
from tests.page.test_watch import colours, labels, streams, total

RATE = 12  # tokens per second and stream


@pytest.fixture(scope="module")
def paper() -> Iterator[Server]:
    server = start("paper", "--set", f"paper.tokens_per_s={RATE}", "--set", "schedule.slots=16")
    yield server
    assert server.stop() == 0


@pytest.fixture
def idle(paper) -> Iterator[Server]:
    """The server without requests, before and after the test."""
    yield paper
    deadline = time.monotonic() + 20
    while paper.metric("vllm:num_requests_running") + paper.metric("vllm:num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end(page: Page) -> None:
    page.press("Stop them")
    page.until(lambda: total(page, "running") == 0)


def started(server: Server) -> float:
    return server.metric("vllm:request_params_n_sum")


def test_axes_and_columns_have_labels(driver, idle) -> None:
    """It comes first, since lanes of other requests stay in view for 10 s."""
    page = Page(driver, idle.url, "#watch")
    page.until(lambda: page.text(".axis .end") == "now")
    page.until(lambda: labels(page) == [f"{slot} - free" for slot in range(16)])
    ticks = page.each(".axis-labels span")
    assert ticks == ["now", *(f"-{second} s" for second in range(1, 11))]
    page.run(
        "const all = document.getElementById('span'); all.value = '60';"
        "all.dispatchEvent(new Event('change'))"
    )
    page.until(lambda: page.text(".axis .begin") == "-60 s")
    assert page.text(".columns") == "SlotRequestState"
    page.press("16 requests")
    page.until(lambda: all(re.fullmatch(r"\d+ #\d+ decoding", one) for one in labels(page)))
    titles = page.each(".curves figcaption > span")
    assert "Prompt tokens per second" in titles
    assert page.text(".hero figcaption span").startswith("Generated tokens per second")
    ends = page.each(".hero .ends, .curves .ends")
    assert len(ends) == 7 and all(one.endswith("0") for one in ends)
    page.until(lambda: "decode, simulated" in page.text(".curves"))
    page.until(lambda: ", simulated." in page.text("#said"))
    text = page.run("return document.body.textContent")
    assert re.findall(r"(?:NONE|FULL|PIECEWISE|PAPER)/\w+", text) == []
    end(page)


def test_watch_comes_first_and_plays_16_requests_once(driver, idle) -> None:
    before = started(idle)
    page = Page(driver, idle.url, "")
    page.until(lambda: page.one("#watch").is_displayed() and not page.one("#talk").is_displayed())
    page.until(lambda: total(page, "running") == 16)
    assert page.text("#in-flight") == "16 sample requests in flight"
    page.reload()
    page.until(lambda: total(page, "steps") > 0)
    page.until(lambda: idle.metric("vllm:num_requests_running") == 0)
    page.pause(1.5)
    assert total(page, "running") == 0 and page.text("#in-flight") == ""
    assert started(idle) - before in (0, 16)  # counted when they end, if at all
    assert page.complaints() == []


def test_a_link_to_watch_and_a_busy_engine_play_nothing(driver, idle) -> None:
    page = Page(driver, idle.url, "#watch")
    page.until(lambda: total(page, "steps") >= 0 and page.text("#said"))
    page.pause(1.2)
    assert total(page, "running") == 0
    with streams(idle, 2, max_tokens=2000):
        page.until(lambda: idle.metric("vllm:num_requests_running") == 2)
        page = Page(driver, idle.url, "")
        page.until(lambda: total(page, "running") == 2)
        page.pause(1.2)
        assert total(page, "running") == 2 and page.text("#in-flight") == ""


def test_64_requests_while_16_run(driver, idle) -> None:
    page = Page(driver, idle.url, "#watch")
    page.press("16 requests")
    page.until(lambda: total(page, "running") == 16)
    page.press("64 requests")
    page.until(lambda: total(page, "waiting") == 64)
    assert total(page, "running") == 16
    assert page.text("#in-flight") == "80 sample requests in flight"
    page.press("16 requests")  # the browser has no free connection for these
    page.until(lambda: "80 sample requests in flight; 16 more" in page.text("#in-flight"))
    end(page)
    assert page.text("#in-flight") == ""


def test_tiles_legend_and_sentence_agree(driver, idle) -> None:
    page = Page(driver, idle.url, "#watch")
    page.press("64 requests")
    page.driver.execute_script("""
        window.seen = [];
        const number = (css) => Number(document.querySelector(css).textContent.replaceAll(',', ''));
        window.sampler = setInterval(() => {
            const said = document.getElementById('said').textContent;
            const match = /(\\d+) of 16 slots in use, (\\d+) waiting/.exec(said);
            if (!match) return;
            window.seen.push([number("[data-total='running']"), Number(match[1]),
                number("[data-total='waiting']"), Number(match[2])]);
        }, 50);
    """)
    page.until(lambda: total(page, "waiting") == 48)
    page.press("Pause")
    page.pause(0.5)
    assert page.text("#said").startswith("Paused; the engine is at step ")
    assert page.text(".axis .end") == "paused"
    assert "waiting 48" in page.text("#strip-running .legend")
    page.press("Live")
    end(page)
    page.until(lambda: page.text("#said").startswith("Nothing is running. 0 of 16 slots in use, 0"))
    seen = page.run("clearInterval(window.sampler); return window.seen")
    assert len(seen) > 20 and {tuple(one) for one in seen} >= {(16, 16, 48, 48), (0, 0, 0, 0)}
    assert [one for one in seen if one[0] != one[1] or one[2] != one[3]] == []


def test_the_large_number_is_the_rate_of_tokens(driver, idle) -> None:
    page = Page(driver, idle.url, "#watch")
    size = "return parseFloat(getComputedStyle(document.getElementById('speed')).fontSize)"
    assert page.run(size) >= 40
    page.press("16 requests")
    wanted = 16 * RATE
    page.until(lambda: abs(float(page.text("#speed")) - wanted) < 0.15 * wanted)
    assert "tokens per second" in page.text(".speed")
    first = page.until(lambda: re.fullmatch(r"[\d.]+ m?s", page.text("[data-total='first']")))
    time.sleep(1.5)  # the first tokens are older than a second, and still shown
    assert re.fullmatch(r"[\d.]+ m?s", page.text("[data-total='first']")), first
    page.reload()  # also on a page that was opened later
    page.until(lambda: total(page, "running") in (0, 16))
    page.until(lambda: re.fullmatch(r"[\d.]+ m?s", page.text("[data-total='first']")))


def test_bars_of_running_requests_reach_the_right_edge(driver, idle) -> None:
    page = Page(driver, idle.url, "#watch")
    page.press("16 requests")
    page.until(lambda: total(page, "running") == 16)
    script = """
        const canvas = document.getElementById('lanes-picture');
        const ctx = canvas.getContext('2d');
        const style = getComputedStyle(document.documentElement);
        const wanted = style.getPropertyValue('--c-decode').trim();
        const rows = 16, high = canvas.height / rows, found = [];
        for (let row = 0; row < rows; row += 1) {
            const top = Math.round((row + 0.25) * high);
            const data = ctx.getImageData(canvas.width - 1, top, 1, 1).data;
            found.push('#' + [0, 1, 2].map((i) => data[i].toString(16).padStart(2, '0')).join(''));
        }
        return found.filter((one) => one === wanted).length;
    """
    page.until(lambda: page.run(script) == 16)
    assert all(page.run(script) == 16 for _ in range(20))
    end(page)


def test_colours_have_one_meaning(driver, idle) -> None:
    legend = {"wait", "arriving", "prompt", "decode", "cached", "preempted", "finished"}
    page = Page(driver, idle.url, "#watch")
    keys = page.each(".timeline .band:first-child .legend li", "one.className.slice(2)")
    assert set(keys) == legend
    page.press("16 with a shared prefix")
    page.until(lambda: {"wait", "prompt", "cached", "decode"} <= colours(page, "#lanes-picture"))
    assert colours(page, "#lanes-picture") <= legend
    end(page)
    page.until(lambda: "finished" in colours(page, "#lanes-picture"))


def test_a_failure_of_samples_stays_in_sight(driver, idle) -> None:
    page = Page(driver, idle.url, "#watch")
    page.change_requests("{temperature: 9}")
    page.press("1 request")
    page.until(lambda: page.text("#sample-failure").startswith("temperature"))
    page.pause(0.8)
    assert page.one("#sample-failure").is_displayed()


def test_save_picture_and_record(driver, idle, tmp_path) -> None:
    driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )

    def file(endings: tuple[str, ...]) -> Path | None:
        return next((one for one in tmp_path.iterdir() if one.suffix in endings), None)

    page = Page(driver, idle.url, "#watch")
    page.press("16 with a shared prefix")
    page.until(lambda: total(page, "running") == 16)
    page.press("Save picture")
    data = page.until(lambda: file((".png",))).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width == 2400 and 1000 < height < 2400 and len(data) > 50_000
    page.run(
        "const later = window.setTimeout;"  # two seconds in place of eight
        "window.setTimeout = (stop, ms) => later(stop, ms === 8000 ? 2000 : ms)"
    )
    page.press("Record")
    page.until(lambda: page.text("#record").startswith("Recording, "))
    video = page.until(lambda: file((".mp4", ".webm")), timeout_s=40).read_bytes()
    assert len(video) > 20_000 and (video[4:8] == b"ftyp" or video[:4] == b"\x1aE\xdf\xa3")
    assert page.text("#record") == "Record" and page.complaints() == []
    end(page)


@pytest.mark.parametrize(
    "width, height", [(1440, 900), (1024, 768), (768, 1024), (390, 844), (340, 700)]
)
def test_each_size_has_the_number_on_its_first_screen(driver, idle, width, height) -> None:
    page = Page(driver, idle.url, "#watch")
    page.resize(width, height, touch=width < 760)
    page.until(lambda: total(page, "steps") > 0)
    page.press("1 request")
    page.until(lambda: total(page, "running") == 1)
    box = page.run("return document.getElementById('speed').getBoundingClientRect().toJSON()")
    assert 0 < box["top"] < box["bottom"] < 200 and box["right"] <= width
    for view in ("watch", "talk"):
        page.run(f"location.hash = '{view}'")
        page.until(lambda view=view: page.one(f"#{view}").is_displayed())
        wide = "[...document.querySelectorAll('body *')].filter((one) => one.offsetParent &&"
        wider = f"{wide} one.getBoundingClientRect().right > innerWidth + 1).length"
        assert page.run(f"return {wider}") == 0, view
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), view
    page.run("location.hash = 'watch'")
    end(page)


def test_the_chart_of_the_cache_has_the_tiers_of_the_recipe(driver, idle) -> None:
    """A reading with a tier adds one line, also after more readings."""
    page = Page(driver, idle.url, "#watch")
    driver.set_script_timeout(20)
    shown = driver.execute_async_script("""
        const done = arguments[0];
        Promise.all([import("/page/curves.js"), import("/page/metrics.js")]).then(([curves, metrics]) => {
            const board = new curves.CurveBoard();
            const tier = (state, count) => `nanovllm:tier_pages{engine="0",tier="host",state="${state}"} ${count}`;
            const texts = ["", `${tier("capacity", 80)}\\n${tier("used", 20)}`, `${tier("capacity", 80)}\\n${tier("used", 60)}`];
            done(texts.map((text, at) => {
                board.take(new metrics.Reading(text, at, 0), []);
                const figures = [...board.node.querySelectorAll("figure")];
                const cache = figures.find((one) => one.querySelector("figcaption span").textContent === "Cache");
                return [...cache.querySelectorAll("li")].slice(2).map((line) => line.textContent);
            }));
        });
    """)  # noqa: E501
    assert shown == [[], ["host in use 25 %"], ["host in use 75 %"]]
    assert page.complaints() == []


def test_the_table_of_adapters_follows_the_engine_s_adapters(driver, idle) -> None:
    """An adapter that is unloaded loses its row, and without any the table is hidden."""
    page = Page(driver, idle.url, "#watch")
    page.resize(340, 700)
    shown = driver.execute_async_script("""
        const done = arguments[0];
        Promise.all([import("/page/adapters.js"), import("/page/metrics.js")]).then(([adapters, metrics]) => {
            const table = new adapters.AdapterTable();
            document.getElementById("watch").append(table.node);
            const slots = [["capacity", 4], ["loaded", 3], ["in_use", 1]].map(([state, count]) => `nanovllm:adapter_slots{engine="0",state="${state}"} ${count}`);
            const line = (engine, adapter, state, count) => `nanovllm:adapter_requests{engine="${engine}",adapter="${adapter}",state="${state}"} ${count}`;
            const one = [line(0, "a", "running", 1200), line(1, "a", "running", 7), line(0, "a", "waiting", 3)];
            const two = [...one, line(0, "b".repeat(64), "running", 0), line(0, "b".repeat(64), "waiting", 0)];
            done([[], two, one, []].map((lines, at) => {
                table.take(new metrics.Reading([...slots, ...lines].join("\\n"), at, 0));
                const rows = [...table.node.querySelectorAll("tbody tr")];
                const fits = table.node.querySelector("table").getBoundingClientRect().right <= innerWidth;
                return [table.node.hidden, fits, rows.map((row) => [...row.children].map((cell) => cell.textContent))];
            }).concat(table.node.querySelector("p").textContent));
        }).catch((error) => done(String(error)));
    """)  # noqa: E501
    first = ["a", "1,200", "3"]
    assert shown == [
        [True, True, []],
        [False, True, [first, ["b" * 64, "0", "0"]]],
        [False, True, [first]],
        [True, True, []],
        "Requests by adapter. Slots of the device in use: 1 of 4.",
    ]
    assert page.complaints() == []
