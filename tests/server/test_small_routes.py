"""Operational routes: probes, version, a model's card, statuses by path."""

from __future__ import annotations

import re

import httpx
import pytest
from msgspec.structs import replace

import nanovllm
from tests.server import fake_engine
from tests.server.serving import Api, body, eventually, serving

CHAT = "/v1/chat/completions"


def test_one_model_by_name(api) -> None:
    (listed,) = api.http.get("/v1/models").json()["data"]
    response = api.http.get("/v1/models/demo")
    assert response.status_code == 200 and response.json() == listed
    for name in ("gpt-9", "demo/x", "Demo", "x" * 5000, "%00", ""):
        response = api.http.get(f"/v1/models/{name}")
        found = response.json()["error"]
        assert (response.status_code, found["code"]) == (404, "model_not_found"), name
        assert found["param"] == "model" and "this server has 'demo'" in found["message"]
    assert api.http.post("/v1/models/demo").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("path", "cure"),
    [
        ("/v1/completions", "this server generates text at POST /v1/chat/completions only"),
        ("/v1/responses", "this server generates text at POST /v1/chat/completions only"),
        ("/v1/load_lora_adapter", "adapters can be changed if adapters.runtime is true"),
        ("/tokenize", "POST /v1/chat/completions/render returns the token ids of a prompt"),
        *(
            (
                path,
                f"use /v1/{route} (a client's base URL ends with /v1, as in http://HOST:PORT/v1)",
            )
            for path, route in (
                ("/chat/completions", "chat/completions"),
                ("/v1/chat/completions/", "chat/completions"),
                ("/v1/v1/chat/completions", "chat/completions"),
                ("/chat/completions/render", "chat/completions/render"),
                ("/models", "models"),
                ("/api//v1/models/", "models"),
            )
        ),
    ],
)
def test_a_route_of_other_servers_is_refused_with_a_remedy(api, path: str, cure: str) -> None:
    response = api.http.post(path, json={})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == f"{path} does not exist; {cure}"
    plain = api.http.get("/nothing").json()["error"]["message"]
    assert plain == "/nothing does not exist"


def test_all_names_of_a_model(tmp_path, monkeypatch) -> None:
    """The metrics' label stays the server's name, by any name that requests use for the model."""
    ready = replace(fake_engine.READY, model="mine")
    monkeypatch.setattr(fake_engine, "READY", ready)
    settings = "load.format=dummy", "server.served_name=mine"
    names = ["Qwen/Qwen3-0.6B", "mine", "Qwen3-0.6B", "qwen3-0.6b"]
    with serving(tmp_path, *settings, recipe="qwen3-0.6b") as api:
        cards = api.http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == names
        assert {card["root"] for card in cards} == {names[0]}
        for path in (*names, "Qwen%2FQwen3-0.6B", "Qwen%2fQwen3-0.6B"):
            found = api.http.get(f"/v1/models/{path}").json()["id"]
            assert found == path.replace("%2F", "/").replace("%2f", "/")
        for name in names:
            assert api.chat(model=name, max_tokens=1).json()["model"] == name
            streamed = api.events(model=name, max_tokens=1)
            assert {event["model"] for event in streamed[:-1]} == {name}
        for given in ({}, {"model": None}, {"model": ""}):  # any of these is the served model
            assert api.chat(**given, max_tokens=1).json()["model"] == "mine"
            assert {event["model"] for event in api.events(**given, max_tokens=1)[:-1]} == {"mine"}
        for asked in (
            api.chat(model="Qwen/Qwen3-8B"),
            api.chat(model="qwen/qwen3-0.6b"),
            api.chat(model=" "),
            api.http.get("/v1/models/Qwen/Qwen3-8B"),
        ):
            found = asked.json()["error"]
            assert (asked.status_code, found["code"]) == (404, "model_not_found")
            listed = "'Qwen/Qwen3-0.6B' or 'mine' or 'Qwen3-0.6B' or 'qwen3-0.6b'"
            assert found["message"].endswith(f"this server has {listed}")
        labels = re.findall(r'model_name="(.*?)"', api.http.get("/metrics").text)
        assert set(labels) == {"mine"}


def test_version(api) -> None:
    assert api.http.get("/version").json() == {"version": nanovllm.__version__}


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/demo", "/v1/x"]
)
def test_head_is_get_without_its_body(api, path) -> None:
    got, head = api.http.get(path), api.http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":  # it counts these requests
        assert head.headers["content-length"] == str(len(got.content))
    assert api.http.head("/health").status_code == 200  # on the same connection


def test_head_of_chat_is_refused(api) -> None:
    response = api.http.head(CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_ready_until_the_engine_is_gone_or_the_server_ends(tmp_path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with serving(tmp_path / "a", "server.api_key=sesame") as api:
        assert api.http.get("/ready").json() == {"status": "ready"}
        assert api.http.head("/ready").status_code == 200
        api.engine.die()
        eventually(lambda: api.http.get("/ready").status_code == 503)
        assert api.http.head("/ready").status_code == 503
    with serving(tmp_path / "b", "server.shutdown_s=20") as api:
        api.engine.step_s = 0.02
        with api.http.stream("POST", CHAT, json=body("word " * 30, stream=True)) as response:
            api.process.terminate()
            eventually(lambda: httpx.get(f"{api.url}/ready", trust_env=False).status_code == 503)
            response.read()


def counts(api: Api) -> dict[tuple[str, int], int]:
    """Return the number of requests by path and status, also those of other tests."""
    pattern = r'^nanovllm:http_requests_total{.*,path="(.*)",status="(\d+)"} (\d+)$'
    found = re.findall(pattern, api.http.get("/metrics").text, re.MULTILINE)
    return {(path, int(status)): int(count) for path, status, count in found}


def test_requests_are_counted_by_path_and_status(api) -> None:
    before = counts(api)
    api.chat("x")
    api.chat("x", stream=True)
    api.chat("x", temperature=9)
    api.http.get("/v1/models/demo")
    api.http.get("/v1/models/other")
    for at in range(20):
        api.http.get(f"/nowhere/{at}")
    after = counts(api)
    gained = {key: after[key] - before.get(key, 0) for key in after}
    assert {key: count for key, count in gained.items() if count} == {
        (CHAT, 200): 2,
        (CHAT, 400): 1,
        ("/v1/models", 200): 1,
        ("/v1/models", 404): 1,
        ("other", 404): 20,
        ("/metrics", 200): 1,
    }


def test_a_prompt_is_rendered_as_it_would_be_computed(api) -> None:
    """Under vLLM's name, for routers that compare prompts with cache events."""
    render = "/v1/chat/completions/render"
    asked = body("What is a page?", chat_template_kwargs={"enable_thinking": True})
    before = counts(api).get((render, 200), 0)
    found = api.http.post(render, json=asked)
    assert found.status_code == 200 and found.headers["x-request-id"]
    computed = api.http.post(CHAT, json=asked | {"return_token_ids": True}).json()
    assert found.json() == {"model": "demo", "token_ids": computed["prompt_token_ids"]}
    long = api.http.post(render, json=body("page " * 20_000))  # by the process of large bodies
    assert long.status_code == 400 and "messages" in long.text
    wrong = api.http.post(render, json={"messages": []})
    assert wrong.status_code == 400 and "messages" in wrong.text
    assert api.http.post(render, content=b"{}").status_code == 415
    assert api.http.get(render).status_code == 405
    assert counts(api)[render, 200] == before + 1
