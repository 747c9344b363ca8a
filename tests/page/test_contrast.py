"""Contrast ratios of the page's colours (WCAG 2): text 4.5:1, marks on canvases 3:1."""

from __future__ import annotations

import re
from itertools import product

import pytest

from nanovllm.server.page_files import FOLDER
from tests.page.browser import Page

THEMES = ("light", "dark")
SURFACES = ("page", "surface", "raised")
# Text colours and their backgrounds.
TEXT = [
    (("ink", "soft"), (*SURFACES, "mine")),
    (("accent", "good", "bad"), SURFACES),
    (("accent-ink",), ("accent",)),
    (("notice-ink",), ("notice",)),
    (("ink",), ("doubt",)),
    (("c-ink", "c-soft", "c-accent"), ("c-surface", "c-page")),
    (("c-on-bar",), ("c-prompt", "c-decode", "c-arriving")),
]
MARKS = (
    *("wait", "arriving", "prompt", "decode", "draft"),
    *("preempted", "finished", "cached", "held", "limit"),
)


def colours(theme: str) -> dict[str, str]:
    """Return the theme's variables. The dark theme overrides those of the light one."""
    text = (FOLDER / "theme.css").read_text()
    blocks = re.findall(r":root(\[.*?\])? \{(.*?)\}", text, re.DOTALL)
    found: dict[str, str] = {}
    for selector, block in blocks:
        if selector in ("", f'[data-theme="{theme}"]'):
            found.update(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    return found


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the contrast ratio of two colours with channels from 0 to 255."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: tuple[float, ...]) -> float:
    shares = [channel / 255 for channel in colour]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def channels(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def test_the_ratio_of_known_colours() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((118, 118, 118), (255, 255, 255)) == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_marks_stand_out(theme) -> None:
    known = colours(theme)
    for inks, backgrounds in TEXT:
        for ink, background in product(inks, backgrounds):
            ratio = contrast(channels(known[ink]), channels(known[background]))
            assert ratio >= 4.5, f"{ink} on {background}: {ratio:.2f}"
    for mark in MARKS:
        ratio = contrast(channels(known[f"c-{mark}"]), channels(known["c-surface"]))
        assert ratio >= 3, f"{mark}: {ratio:.2f}"


def test_all_colours_are_variables_of_both_themes() -> None:
    assert colours("light").keys() == colours("dark").keys()
    assert colours("light") != colours("dark")
    for path in FOLDER.glob("*.css"):
        if path.name != "theme.css":
            assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;, )])", path.read_text()) == [], path.name


# Return [text, colour, background] of each visible text.
MEASURE = r"""
    const parse = (text) => {
        const numbers = text.match(/[\d.]+/g).map(Number);
        const scale = text.startsWith('color(') ? 255 : 1;
        return [...numbers.slice(0, 3).map((one) => one * scale), numbers[3] ?? 1];
    };
    const backgroundOf = (node) => {
        const layers = [];
        for (let at = node; at; at = at.parentElement) {
            const layer = parse(getComputedStyle(at).backgroundColor);
            layers.push(layer);
            if (layer[3] === 1) break;
        }
        return layers.reverse().reduce((below, [r, g, b, a]) =>
            [r, g, b].map((one, at) => one * a + below[at] * (1 - a)), [255, 255, 255]);
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !node.getClientRects().length) continue;
        if (node.closest('script, noscript, .skip')) continue;
        const ink = parse(getComputedStyle(node).color);
        const text = walker.currentNode.data.trim().slice(0, 40);
        found.push([text, ink.slice(0, 3), backgroundOf(node)]);
    }
    return found;
"""


@pytest.mark.parametrize("theme", THEMES)
def test_each_visible_text_stands_out(driver, demo, theme) -> None:
    page = Page(driver, demo.url)
    page.run(f"sessionStorage.setItem('nanovllm-theme', '{theme}')")
    page.reload()
    page.press("Settings")
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.run("document.getElementById('set-logprobs').click()")
    seen = page.run(MEASURE)  # the welcome text
    page.say("What is 17 + 25?")
    page.answered()
    page.set("schema", "{oops")
    page.set("format", "json_schema")
    page.say("and times 2?")
    page.until(lambda: page.all(".problem:not([hidden])"))
    seen += page.run(MEASURE)
    page.run("location.hash = 'watch'")
    page.press("1 request")
    page.until(lambda: "decode row" in page.text("#said"))
    page.run("document.querySelector('#lanes button:not([data-request=\"\"])').click()")
    seen += page.run(MEASURE)
    page.press("Stop them")
    assert {"now", "Running", "State", "Thinking", "Copy as curl"} <= {one[0] for one in seen}
    low = [(text, contrast(ink, ground)) for text, ink, ground in seen]
    assert [one for one in low if one[1] < 4.5] == []
