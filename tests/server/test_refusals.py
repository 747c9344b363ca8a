"""Log lines of refused requests: their content and their rate."""

from __future__ import annotations

import json
import logging
import re
import socket

import httpx
import pytest

from nanovllm.log import JsonLine, TextLine
from nanovllm.server.errors import ApiError
from nanovllm.server.refusals import BURST, RefusalLog, address, escaped
from tests.server.serving import Api, body, eventually, serving

CHAT = "/v1/chat/completions"
MISSING = ApiError(404, "it does not exist", code="not_found")


def scope(path: bytes = b"/nothing", **more: object) -> dict[str, object]:
    return {"method": "GET", "raw_path": path, "client": ("10.0.0.7", 5000), **more}


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def refusals(now, caplog) -> RefusalLog:
    caplog.set_level(logging.INFO, "server")
    return RefusalLog(lambda: now[0])


def test_a_line_has_address_method_and_path(refusals, caplog) -> None:
    refusals.request(scope(), MISSING, "id1")
    (record,) = caplog.records
    assert record.getMessage() == (
        "refused address=10.0.0.7:5000 method=GET path=/nothing id=id1 status=404 error=not_found"
    )
    shown = json.loads(JsonLine().format(record))
    assert (shown["address"], shown["method"], shown["path"]) == (
        "10.0.0.7:5000", "GET", "/nothing",
    )  # fmt: skip
    assert shown["status"] == 404


def test_a_flood_leaves_few_lines_and_their_number(refusals, now, caplog) -> None:
    for at in range(100_000):
        now[0] = at / 1000
        refusals.request(scope(), MISSING, "id")
    assert len(caplog.records) == BURST + 99
    last = caplog.records[-1].getMessage()
    assert "left_out=999" in last
    written = [re.search(r"left_out=(\d+)", one.getMessage()) for one in caplog.records]
    assert sum(int(found[1]) for found in written if found) > 98_000
    now[0] += 3600
    caplog.clear()
    for _ in range(BURST + 5):
        refusals.connection(None, MISSING)
    assert len(caplog.records) == BURST and "left_out" in caplog.records[0].getMessage()
    assert "left_out" not in caplog.records[1].getMessage()


def test_no_path_can_forge_a_line_or_a_field(refusals, caplog) -> None:
    forged = b"/\r\n2026 info server ready\x1b[2J \xe2\x80\xae\x00 status=200"
    refusals.request(scope(forged), MISSING, "id")
    text = TextLine().format(caplog.records[0])
    assert text.isascii() and text.isprintable()
    assert (
        r"path=/\r\n2026\x20info\x20server\x20ready\x1b[2J\x20\xe2\x80\xae\x00\x20status=200 "
        in text
    )
    refusals.request(scope(b"/" + b"x" * 5000), MISSING, "id")
    assert len(TextLine().format(caplog.records[1])) < 400


def test_addresses() -> None:
    assert address(("::1", 80)) == "[::1]:80"
    assert address(("10.0.0.7", 80)) == "10.0.0.7:80"
    assert address(None) == "local"
    assert escaped("/a%0Ab?") == "/a%0Ab?" and escaped("\u202e\n") == r"\u202e\n"


def lines(api: Api) -> list[str]:
    return re.findall(r"^\S+ info server (?:refused|connection) .*$", api.log(), re.MULTILINE)


def test_what_a_server_logs(tmp_path) -> None:
    with serving(tmp_path, "server.api_key=sesame") as api:
        port = httpx.URL(api.url).port
        api.http.post(CHAT, json=body(), headers={"authorization": "Bearer guess-1234"})
        api.http.get("/v1/models?key=guess-1234")
        api.http.get("/metrics", headers={"origin": "https://evil.test"})
        api.http.headers["authorization"] = "Bearer sesame"
        api.http.get("/wp-login.php%0aforged%1b[2J?password=guess-1234")
        api.http.post(CHAT, json=body(model="gpt-9"))
        api.http.delete("/v1/models")
        api.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(b"rubbish\x1b[2J\r\n\r\n")
            assert sock.recv(100)
        eventually(lambda: len(lines(api)) == 8)
        found = [
            re.sub(r"^\S+ info server |address=127\.0\.0\.1:\d+ |id=\w+ ", "", one)
            for one in lines(api)
        ]
        assert found[:2] == [
            "refused method=POST path=/v1/chat/completions status=401 error=invalid_api_key",
            "refused method=GET path=/v1/models status=401 error=invalid_api_key",
        ]
        assert found[2].startswith("refused method=GET path=/metrics status=403 error=origin_not_")
        assert found[2].endswith("--set 'server.allowed_origins=[https://evil.test]'")
        assert found[3:] == [
            "refused method=GET path=/wp-login.php%0aforged%1b[2J status=404 error=not_found",
            "refused method=POST path=/v1/chat/completions status=404 error=model_not_found",
            "refused method=DELETE path=/v1/models status=405 error=method_not_allowed",
            "refused method=POST path=/v1/chat/completions status=415 error=invalid_content_type",
            "connection status=400 error=invalid_http",
        ]
        assert all(re.search(r" address=127\.0\.0\.1:\d+ ", one) for one in lines(api))
        assert "guess-1234" not in api.log() and "\x1b" not in api.log()
        before = len(api.log())
        for _ in range(300):
            api.http.get("/flood")
        assert api.http.get("/health").status_code == 200
        assert len(api.log()) - before < 60 * 200
