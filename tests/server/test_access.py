"""Access of web pages by the headers Host and Origin, over real HTTP and by itself."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from nanovllm.config import load_config
from nanovllm.server.access import Access
from nanovllm.server.errors import ApiError
from tests.server.serving import Api, body, serving

CHAT = "/v1/chat/completions"
GETS = ("/metrics", "/debug/steps", "/debug/experts", "/", "/page/main.js", "/v1/models",
        "/v1/models/demo", "/health", "/ready", "/version", "/nothing")  # fmt: skip
FOREIGN = ("https://evil.test", "http://evil.test:8000", "null", "file://", "",
           "http://localhost.evil.test", "https://$(reboot).evil.test", "chrome-extension://a",
           "http://10.0.0.5:8000")  # fmt: skip


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> Iterator[Api]:
    settings = "allowed_hosts=[gpu-box.example]", "allowed_origins=[https://Chat.example/]"
    with serving(tmp_path_factory.mktemp("named"), *(f"server.{one}" for one in settings)) as api:
        yield api


def error(answer: httpx.Response) -> dict[str, str]:
    return answer.json()["error"]


def port_of(api: Api) -> int:
    port = httpx.URL(api.url).port
    assert port
    return port


@pytest.mark.parametrize("path", GETS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_a_name_that_was_made_to_resolve_to_this_machine_reads_nothing(api, path, method) -> None:
    for host in (f"rebind.test:{port_of(api)}", "rebind.test", "localhost.evil.test", "", "127.1"):
        answer = api.http.request(method, path, headers={"host": host})
        assert answer.status_code == 403, host
        if method != "HEAD":
            assert error(answer)["code"] == "host_not_allowed"
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_nor_does_it_chat(api) -> None:
    host = f"rebind.test:{port_of(api)}"
    sent = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    answer = api.http.post(CHAT, json=body(), headers=sent)
    assert answer.status_code == 403 and api.engine.generates == []
    asks = {**sent, "access-control-request-method": "POST"}
    assert api.http.options(CHAT, headers=asks).status_code == 403
    line = "start the server with --set 'server.allowed_hosts=[rebind.test]'"
    assert error(answer)["message"].endswith(line)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "localhost.:8000", "[::1]:8000", "[::1]",
     "192.168.1.7:8000", "[fe80::1]:80", "8.8.8.8"],
)  # fmt: skip
def test_addresses_and_localhost_are_served(api, host) -> None:
    assert api.http.get("/health", headers={"host": host}).status_code == 200
    assert api.http.post(CHAT, json=body(), headers={"host": host}).status_code == 200


def test_a_name_that_the_recipe_allows(named) -> None:
    for host in ("gpu-box.example:8000", "GPU-box.Example", "gpu-box.example."):
        assert named.http.get("/metrics", headers={"host": host}).status_code == 200, host
    own = {"host": "gpu-box.example:8000", "origin": "http://gpu-box.example:8000"}
    assert named.http.post(CHAT, json=body(), headers=own).status_code == 200
    answer = named.http.get("/metrics", headers={"host": "evil.gpu-box.example"})
    wanted = "--set 'server.allowed_hosts=[gpu-box.example,evil.gpu-box.example]'"
    assert wanted in error(answer)["message"]


def test_a_client_of_http_1_0_may_leave_it_out(api) -> None:
    with socket.create_connection(("127.0.0.1", port_of(api)), timeout=30) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_the_target_counts_more_than_the_header(api) -> None:
    """The header Host is ignored for `GET http:

    name/` (RFC 9112, 3.2.2).
    """
    for target, host, status in (
        ("http://rebind.test/health", "localhost", 403),
        ("http://[::1]:8000/health", "rebind.test", 200),
        ("http://localhost/health", "rebind.test", 200),
    ):
        with socket.create_connection(("127.0.0.1", port_of(api)), timeout=30) as sock:
            sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert sock.recv(1000).startswith(b"HTTP/1.1 %d " % status), target


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_foreign_page_is_refused(api, origin) -> None:
    sent = {"origin": origin}
    for answer in (
        api.http.post(CHAT, json=body(), headers=sent),
        api.http.post(
            CHAT, content=json.dumps(body()), headers={**sent, "content-type": "text/plain"}
        ),
        api.http.post(CHAT, data={"x": "y"}, headers=sent),
        api.http.options(CHAT, headers={**sent, "access-control-request-method": "POST"}),
        *(api.http.get(path, headers=sent) for path in GETS),
    ):
        assert (answer.status_code, error(answer)["code"]) == (403, "origin_not_allowed")
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert api.engine.generates == []


def test_the_refusal_names_the_line_that_lets_it_in(tmp_path, api) -> None:
    refused = error(api.http.get("/v1/models", headers={"origin": "https://Evil.test:8443"}))
    assert refused["message"] == (
        "pages of the origin 'https://Evil.test:8443' may not use this server; start the server "
        "with --set 'server.allowed_origins=[https://evil.test:8443]'"
    )
    (line,) = re.findall(r"--set '(\S+)'$", refused["message"])
    with serving(tmp_path, line) as other:
        answer = other.http.get("/v1/models", headers={"origin": "https://evil.test:8443"})
        assert answer.headers["access-control-allow-origin"] == "https://evil.test:8443"


def test_a_name_that_a_shell_would_run_is_not_put_into_a_line(api) -> None:
    for name, sent in (("origin", "https://$(reboot).evil.test"), ("host", "$(reboot).evil.test")):
        message = error(api.http.get("/health", headers={name: sent}))["message"]
        assert "--set" not in message and "localhost" in message
    long = error(api.http.get("/health", headers={"origin": "x" * 5000}))["message"]
    assert len(long) < 300


def test_the_line_keeps_what_is_allowed_already(named) -> None:
    refused = error(named.http.get("/v1/models", headers={"origin": "null"}))["message"]
    assert refused.endswith("""--set server.allowed_origins='["https://Chat.example/", "null"]'""")


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://localhost", "http://127.0.0.1:5173", "http://[::1]:8080"],
)
def test_a_page_of_this_machine_may_use_all(api, origin) -> None:
    for answer in (
        api.http.post(CHAT, json=body(), headers={"origin": origin}),
        api.http.get("/metrics", headers={"origin": origin}),
    ):
        allowed = answer.headers["access-control-allow-origin"]
        assert (answer.status_code, allowed) == (200, origin)


def test_an_origin_that_is_named_may_however_it_is_written(named) -> None:
    for origin in ("https://chat.example", "https://chat.example:443"):
        answer = named.http.post(CHAT, json=body(), headers={"origin": origin})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    for origin in ("http://chat.example", "https://chat.example:8443", "https://x.chat.example"):
        assert named.http.get("/health", headers={"origin": origin}).status_code == 403


def test_clients_without_an_origin_and_the_own_page_pass(api) -> None:
    assert api.chat().status_code == 200
    assert api.http.post(CHAT, json=body(), headers={"origin": api.url}).status_code == 200


def checked(headers: dict[str, str], *settings: str, bound: str = "127.0.0.1") -> str:
    """Return the code of the refusal, or the value of Access-Control-Allow-Origin."""
    server = load_config(None, [f"server.{one}" for one in settings]).recipe.server
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    access, scope = Access(server, bound), {"path": "/v1/models", "headers": raw}
    try:
        access.check(scope)
    except ApiError as refusal:
        return str(refusal.code)
    return (access.readable_by(scope) or b"nothing").decode()


REBOUND = {"host": "rebind.test"}
PAGE = {"host": "ai.example", "origin": "https://evil.test"}


@pytest.mark.parametrize(
    ("headers", "settings", "result"),
    [
        (REBOUND, [], "host_not_allowed"),
        (REBOUND, ["host=::1"], "host_not_allowed"),
        (REBOUND, ["host=localhost"], "host_not_allowed"),
        (REBOUND, ["host=127.0.1.1"], "host_not_allowed"),
        (REBOUND, ["host=my-laptop"], "host_not_allowed"),  # which is bound to 127.0.0.1
        ({"host": "my-laptop:8000"}, ["host=my-laptop"], "nothing"),
        (REBOUND, ["api_key=x"], "nothing"),
        (REBOUND, ["host=0.0.0.0"], "nothing"),
        (REBOUND, ["host=0.0.0.0", "api_key=x"], "nothing"),
        (REBOUND, ["allowed_origins=['*']"], "host_not_allowed"),
        (PAGE, ["host=0.0.0.0", "api_key=x"], "origin_not_allowed"),
        (PAGE, ["api_key=x"], "origin_not_allowed"),
        (PAGE, ["api_key=x", "allowed_origins=['*']"], "*"),
        (PAGE, ["host=0.0.0.0", "allowed_origins=[https://evil.test]"], "https://evil.test"),
        ({**PAGE, "origin": "https://ai.example"}, ["host=0.0.0.0"], "https://ai.example"),
        ({"host": "a:80", "origin": "http://a"}, ["host=0.0.0.0"], "http://a"),
        ({"host": "a", "origin": "http://a:8000"}, ["host=0.0.0.0"], "origin_not_allowed"),
        ({"origin": "http://a:8000"}, ["host=0.0.0.0"], "origin_not_allowed"),
    ],
)
def test_by_the_server_s_address_and_key(headers, settings, result) -> None:
    assert checked(headers, *settings) == result


def test_a_name_for_an_address_that_others_reach() -> None:
    assert checked(REBOUND, "host=my-server", bound="10.0.0.5") == "nothing"
