"""The page's files as a browser gets them, and their forbidden content."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanovllm.config import Server
from nanovllm.server.page_files import FOLDER, KINDS, is_shown
from tests.server.serving import serving

FILES = sorted(path for path in FOLDER.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_short_and_asks_for_nothing_from_elsewhere(path) -> None:
    text = path.read_text()
    assert path.suffix in KINDS and text.isascii()
    assert text.count("\n") <= 400, "split the file"
    assert max(len(line) for line in text.splitlines()) <= 300
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    refused = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage"
    )
    if path.suffix == ".js":
        assert text.startswith("// "), "say what it owns"
        assert re.findall(refused, text.replace("refuses innerHTML", "")) == []
        for name in re.findall(r'from "(.*?)"', text):
            assert (FOLDER / name).is_file(), name
    if path.suffix == ".html":
        assert re.findall(r"<style|\son\w+=|\sstyle=|<script(?![^>]*\ssrc=)", text) == []
        for name in re.findall(r'(?:src|href)="page/(.*?)"', text):
            assert (FOLDER / name).is_file(), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_served_with_its_type_and_policy(api, path) -> None:
    url = "/" if path.name == "index.html" else f"/page/{path.name}"
    response = api.http.get(url)
    assert (response.status_code, response.content) == (200, path.read_bytes())
    assert response.headers["content-type"].encode() == KINDS[path.suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    known = {"if-none-match": response.headers["etag"]}
    again = api.http.get(url, headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert api.http.get(url, headers={"if-none-match": '"other"'}).status_code == 200
    head = api.http.head(url)
    assert (head.status_code, head.headers["etag"]) == (200, response.headers["etag"])
    assert api.http.post(url).headers["allow"] == "GET, HEAD"


def test_nothing_else_of_the_folder_or_beside_it(api) -> None:
    for path in ("/page", "/page/", "/page/index.html", "/page/../page_files.py", "/index.html"):
        assert api.http.get(path).status_code == 404, path


def test_its_pictures_are_small() -> None:
    results = Path(__file__).parents[2] / "results"
    picture = (results / "page.png").read_bytes()
    assert picture[:4] == b"\x89PNG" and len(picture) < 300_000
    moving = (results / "watch.gif").read_bytes()
    assert moving[:6] == b"GIF89a" and len(moving) < 1_500_000
    assert int.from_bytes(moving[6:8], "little") == 900  # pixels wide
    delays = re.findall(rb"\x21\xf9\x04.(..).\x00", moving, re.DOTALL)
    seconds = sum(int.from_bytes(delay, "little") for delay in delays) / 100
    assert len(delays) >= 30 and 6 <= seconds <= 10


def test_the_files_need_no_key(tmp_path) -> None:
    with serving(tmp_path, "server.api_key=sesame") as api:
        assert api.http.get("/").status_code == api.http.get("/page/main.js").status_code == 200
        assert api.http.get("/v1/models").status_code == 401


def test_by_itself_only_where_nobody_else_can_come() -> None:
    hosts = {"127.0.0.1": True, "127.8.8.8": True, "::1": True, "localhost": True,
             "0.0.0.0": False, "::": False, "192.168.0.2": False, "example.org": False}  # fmt: skip
    assert {host: is_shown(Server(host=host)) for host in hosts} == hosts
    assert is_shown(Server(host="0.0.0.0", page=True)) and not is_shown(Server(page=False))
