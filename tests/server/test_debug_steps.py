"""GET /debug/steps with an engine whose steps the test sets."""

from __future__ import annotations

import json
from array import array

import pytest

from nanovllm.experts import ExpertLoad
from nanovllm.look import Admitted, Step, Steps
from tests.server.serving import eventually, serving

PATH = "/debug/steps"
SLOTS = array("q", [7, -1]).tobytes()
DECODES = array("i", [0]).tobytes()


def step(number: int, slots: bytes = SLOTS, decodes: bytes = DECODES) -> Step:
    return Step(number, 1.0, "FULL/decode", slots, decodes, 64, 2, 1, [(1, 30)], [], 0)


def test_an_answer_has_the_fields_of_its_steps(api) -> None:
    assert api.http.get(PATH).json() == {
        "engine": 0, "engines": 1, "num_slots": 256, "num_pages": 64, "now_s": 1.0, "oldest": 0,
        "newest": 0, "steps": [], "slots": {}, "queue": [], "waiting": 0, "free": 64, "cached": 0,
        "arriving": [],
    }  # fmt: skip
    first = step(4, decodes=b"")
    first.admitted = [Admitted(0, 7, 40, 40, 16, 0.5, loaded=8, arriving_s=0.6)]
    first.finished = [(3, "stop")]
    moved = array("q", [7, 8]).tobytes()
    told = [first, step(5), step(6), step(7, moved)]
    api.engine.steps = Steps(9.0, 2, 7, told, moved, [(9, 8.5, True)], 1, 60, 11, [(8, 8.75)])
    response = api.http.get(PATH, params={"since": 3, "engine": 0})
    assert response.headers["cache-control"] == "no-store"
    answer = response.json()
    assert (answer["slots"], answer["queue"]) == ({"0": 7, "1": 8}, [[9, 8.5, True]])
    assert answer["arriving"] == [[8, 8.75]]
    steps = answer["steps"]
    assert [one["step"] for one in steps] == [4, 5, 6, 7]
    assert steps[0] == {
        "step": 4, "begun_s": 1.0, "mode": "FULL/decode", "budget": 64, "drafted": 2, "masked": 1,
        "chunks": [[1, 30]], "preempted": 0, "ended_s": 0.0, "host_s": 0.0, "device_s": 0.0,
        "bubble_s": 0.0, "generated": 0, "accepted": 0, "finished": [[3, "stop"]], "running": 0,
        "waiting": 0, "free": 0, "cached": 0, "slots": {"0": 7}, "rows": 0,
        "admitted": [
            {
                "slot": 0, "request": 7, "prompt": 40, "tokens": 40, "cached": 16, "came_s": 0.5,
                "loaded": 8, "arriving_s": 0.6,
            }
        ],
    }  # fmt: skip
    assert [one.get("decodes") for one in steps] == [None, [0], None, None]
    assert [one.get("slots") for one in steps] == [{"0": 7}, None, None, {"0": 7, "1": 8}]
    assert [one["rows"] for one in steps] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "query", ["since=-1", "since=x", "since=", "engine=1", "since=" + "9" * 30]
)
def test_a_field_out_of_range_is_named(api, query) -> None:
    response = api.http.get(f"{PATH}?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]


def test_it_takes_the_key_and_reads_only(tmp_path) -> None:
    with serving(tmp_path, "server.api_key=sesame") as api:
        assert api.http.get(PATH).status_code == 401
        assert api.http.get("/debug/experts").status_code == 401
        known = {"authorization": "Bearer sesame"}
        assert api.http.get(PATH, headers=known).status_code == 200
        assert api.http.post(PATH, headers=known).status_code == 405
        api.engine.die()
        eventually(lambda: api.http.get(PATH, headers=known).status_code == 503)


def test_the_load_of_experts_is_lines_of_layers(api) -> None:
    experts = "/debug/experts"
    refused = api.http.get(experts)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "no_experts"
    assert "the model has none" in refused.json()["error"]["message"]
    tokens = b"".join(count.to_bytes(8, "little") for count in (5, 6, 7, 8))
    api.engine.experts = ExpertLoad([1, 2], tokens, bytes(16))
    api.chat("hello")
    found = api.http.get(experts)
    assert found.headers["content-type"] == "application/x-ndjson"
    lines = found.text.splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == [[5, 6], [7, 8]]
    assert [json.loads(line)["layer"] for line in lines] == [1, 2]
    assert api.http.get(f"{experts}?engine=1").status_code == 400


def test_there_is_none_where_there_is_no_page(tmp_path) -> None:
    with serving(tmp_path, "server.page=false") as api:
        assert [api.http.get(path).status_code for path in (PATH, "/", "/page/main.js")] == [
            404
        ] * 3
        assert api.http.get("/metrics").status_code == 200
