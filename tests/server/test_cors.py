"""CORS headers of answers to pages of other origins, and the OPTIONS requests before them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.serving import Api, body, serving

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Api]:
    settings = "server.api_key=secret", 'server.allowed_origins=["*"]'
    with serving(tmp_path_factory.mktemp("all"), *settings) as api:
        yield api


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("one"), f"server.allowed_origins=[{PAGE}]") as api:
        yield api


def asked_before(api: Api, origin: str, headers: str, **more: str) -> httpx.Response:
    """Send the request that a browser sends before a page's own; it never has the page's key."""
    named = {"origin": origin, "access-control-request-method": "POST", **more}
    return api.http.options(CHAT, headers={**named, "access-control-request-headers": headers})


def test_a_browser_may_send_what_the_openai_client_sends(api) -> None:
    headers = "authorization,content-type,x-stainless-lang"
    answer = asked_before(api, PAGE, headers)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["access-control-allow-headers"] == headers
    assert "POST" in answer.headers["access-control-allow-methods"].split(", ")
    assert answer.headers["access-control-max-age"] == "600"
    assert "vary" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_answers_and_errors_may_be_read(api, stream: bool) -> None:
    for key, status in (("secret", 200), ("wrong", 401)):
        sent = {"origin": PAGE, "authorization": f"Bearer {key}"}
        answer = api.http.post(CHAT, json=body(max_tokens=2, stream=stream), headers=sent)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["access-control-expose-headers"] == "x-request-id"
        assert "x-request-id" in answer.headers
        assert len(answer.headers.get_list("access-control-allow-origin")) == 1


def test_who_is_no_page_hears_nothing_of_it(api) -> None:
    answer = api.http.get("/health")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    plain = api.http.options(CHAT, headers={"origin": PAGE})  # not a preflight request
    assert plain.status_code == 401 and plain.headers["access-control-allow-origin"] == "*"


def test_only_those_that_are_named_may(one) -> None:
    allowed = asked_before(one, PAGE, "content-type")
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert allowed.headers["vary"] == "origin"
    other = asked_before(one, "https://other.example", "content-type")
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers
    answer = one.http.get("/v1/models", headers={"origin": PAGE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)


LOOKS = ("/debug/steps", "/debug/experts", "/metrics", "/", "/page/main.js")
STATUSES = {"/debug/experts": 404}  # the fake engine has no experts; other paths: 200


@pytest.mark.parametrize("path", [*LOOKS, "/v1/models", "/health", "/ready", "/version"])
def test_all_origins_may_use_the_api_and_not_look_at_the_server(api, path: str) -> None:
    """A page of any origin may use the API, but not read metrics, steps or the page."""
    key = {"authorization": "Bearer secret"}
    answer = api.http.get(path, headers={"origin": PAGE, **key})
    asks = {"origin": PAGE, "access-control-request-method": "GET"}
    asked = api.http.options(path, headers={**asks, **key})
    told = [one.headers.get("access-control-allow-origin") for one in (answer, asked)]
    assert told == ([None, None] if path in LOOKS else ["*", "*"])
    assert answer.status_code == STATUSES.get(path, 200)


@pytest.mark.parametrize("path", LOOKS)
@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
def test_origins_that_are_named_and_those_of_this_machine_may_look_too(one, path, origin) -> None:
    answer = one.http.get(path, headers={"origin": origin})
    assert answer.status_code == STATUSES.get(path, 200)
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["vary"] == "origin"
    other = one.http.get(path, headers={"origin": "https://other.example"})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


def test_a_page_of_the_internet_may_use_this_network_only_if_it_is_named(one) -> None:
    private = {"access-control-request-private-network": "true"}
    allowed = asked_before(one, PAGE, "content-type", **private)
    assert allowed.headers["access-control-allow-private-network"] == "true"
    other = asked_before(one, "https://other.example", "content-type", **private)
    assert other.status_code == 403
    assert "access-control-allow-private-network" not in other.headers
    plain = asked_before(one, PAGE, "content-type")
    assert "access-control-allow-private-network" not in plain.headers


def test_no_page_may_by_default(tmp_path) -> None:
    with serving(tmp_path) as api:
        assert asked_before(api, PAGE, "content-type").status_code == 403
        local = asked_before(api, "http://127.0.0.1:5173", "content-type")
        assert local.headers["access-control-allow-origin"] == "http://127.0.0.1:5173"
