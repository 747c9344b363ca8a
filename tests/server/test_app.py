"""Routes, refusals, keys and ids around chat, over real HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket

import httpx
import openai
import pytest

from nanovllm.wire import Refusal, RefusalKind
from tests.server.fake_engine import queue_full
from tests.server.serving import JSON, body, content, eventually, serving

CHAT = "/v1/chat/completions"


def error(response: httpx.Response) -> dict[str, object]:
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return found


BAD = {
    "no json": (b"{", 400, None),
    "empty": (b"", 400, None),
    "not utf-8": (b'{"messages": [{"role": "\xff"}]}', 400, None),
    "deep": (b'{"store": ' + b"[" * 50_000, 400, None),
    "no messages": (b"{}", 400, "messages"),
    "empty messages": (b'{"messages": []}', 400, "messages"),
    "a role": (json.dumps({"messages": [{"role": "x"}]}).encode(), 400, "messages[0].role"),
    "an image": (
        json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}).encode(),
        400,
        "messages[0].content[0].type",
    ),
    "a model": (json.dumps(body(model="gpt-9")).encode(), 404, "model"),
    "a format": (
        json.dumps(body(response_format={"type": "json_schema"})).encode(),
        400,
        "response_format.json_schema",
    ),
    "a bias": (json.dumps(body(logit_bias={"4096": 1})).encode(), 400, "logit_bias.4096"),
    "too long": (json.dumps(body("word " * 2000)).encode(), 400, "messages"),
    "too large": (json.dumps(body("x" * 300_000)).encode(), 413, None),
    **{
        f"{field}={value}"[:20]: (json.dumps(body(**{field: value})).encode(), 400, field)
        for field, value in {
            "temperature": 3,
            "top_p": 0,
            "n": 99,
            "max_tokens": 0,
            "stop": "",
            "seed": 2**70,
            "echo": True,
            "top_logprobs": 3,
            "thinking_token_budget": -5,
            "tool_choice": "required",
            "stream_options": {"include_usage": True},
            "cache_salt": "",
            "min_p": "high",
        }.items()
    },
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_never_reach_the_engine(api, name) -> None:
    raw, status, param = BAD[name]
    response = api.http.post(CHAT, content=raw, headers=JSON)
    found = error(response)
    assert (response.status_code, found["param"]) == (status, param)
    assert found["type"] == "invalid_request_error" and len(found["message"]) <= 1000
    if param is not None:
        assert param in found["message"]
    assert response.headers["x-request-id"]
    assert api.engine.generates == []


def test_a_prompt_that_does_not_fit_is_told_the_counts(api) -> None:
    found = error(api.chat("word " * 2000))
    assert found["code"] == "context_length_exceeded"
    assert re.search(r"the prompt has \d{4} tokens.* at most 511 .*512", found["message"])


def test_a_template_error_is_a_bad_request(api) -> None:
    kwargs = {"enable_thinking": {}, "messages": 1}
    assert api.chat(chat_template_kwargs=kwargs).status_code == 200
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    assert api.http.post(CHAT, json={"messages": messages}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (queue_full(), 503, "queue_full"),
        (Refusal(0, RefusalKind.BUSY, "the machine is busy"), 503, "compiler_busy"),
        (Refusal(0, RefusalKind.TOO_LONG, "it can never fit"), 400, "context_length_exceeded"),
        (Refusal(0, RefusalKind.INVALID, "no such bias"), 400, "invalid_value"),
        (Refusal(0, RefusalKind.NO_ADAPTER, "'a' is not loaded"), 404, "model_not_found"),
    ],
)
def test_what_the_engine_refuses_is_a_real_status(api, refusal, status, code, stream) -> None:
    api.engine.refuse = refusal
    response = api.chat(stream=stream, n=2)
    assert (response.status_code, error(response)["code"]) == (status, code)
    assert error(response)["message"] == refusal.message
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)
    api.engine.refuse = None
    assert api.chat("again").status_code == 200


def test_a_body_too_large_is_refused_without_reading_it_all(api) -> None:
    port = httpx.URL(api.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        named = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 999999999"
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\n{named}\r\n\r\n".encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 413 ")

    def chunks():
        for _ in range(30):
            yield b"x" * 10_000

    found = error(api.http.post(CHAT, content=chunks(), headers=JSON))
    assert (found["code"], found["message"]) == (
        "body_too_large",
        "the body must be at most 200000 bytes (server.max_body_bytes)",
    )


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/json;charset=UTF-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/plain; application/json", 415),
        ("application/json-seq", 415),
        ("application/json, text/plain", 415),
    ],
)
def test_a_body_says_that_it_is_json(api, kind, status) -> None:
    raw = json.dumps(body()).encode()
    response = api.http.post(CHAT, content=raw, headers={"Content-Type": kind})
    assert response.status_code == status
    if status == 415:
        found = error(response)
        assert f"must be application/json, not {kind.partition(';')[0]}" in found["message"]
        assert (found["code"], api.engine.generates) == ("invalid_content_type", [])


def test_a_body_without_a_type_is_refused(api) -> None:
    """A body without a content type is refused: a page may send it to any origin."""
    response = api.http.post(CHAT, content=json.dumps(body()).encode())
    assert response.status_code == 415 and api.engine.generates == []
    assert "must be application/json, not missing" in error(response)["message"]


@pytest.mark.parametrize("coding", ["gzip", "BR", "gzip, identity"])
def test_a_compressed_body_is_refused_by_its_header(api, coding) -> None:
    raw = gzip.compress(json.dumps(body()).encode())
    response = api.http.post(
        CHAT, content=raw, headers={"Content-Type": "application/json", "Content-Encoding": coding}
    )
    found = error(response)
    assert (response.status_code, found["code"]) == (400, "invalid_content_encoding")
    assert found["message"].startswith("the body must not be compressed") and coding in str(found)
    plain = {"Content-Type": "application/json", "Content-Encoding": "Identity"}
    assert api.http.post(CHAT, content=json.dumps(body()), headers=plain).status_code == 200


def test_routes(api) -> None:
    assert api.http.get("/health").json() == {"status": "ok"}
    models = api.http.get("/v1/models").json()
    assert models["object"] == "list"
    (card,) = models["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("demo", "model", 512)
    for path in ("/page", "/v1/completions", "/v1/embeddings", "/v1/model", "/docs", "/health/x"):
        response = api.http.get(path)
        assert (response.status_code, error(response)["code"]) == (404, "not_found")
    for method, path in (("GET", CHAT), ("POST", "/v1/models"), ("DELETE", "/health")):
        response = api.http.request(method, path)
        assert (response.status_code, error(response)["code"]) == (405, "method_not_allowed")
        assert response.headers["allow"] == ("POST" if path == CHAT else "GET, HEAD")
    assert api.http.get("/health?verbose=1").status_code == 200


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("abc-1.2_X", True),
        ("a:1_b:2", True),
        ("a b", False),
        ("x" * 257, False),
        ("a/../b", False),
        ("", False),
    ],
)
def test_request_ids(api, given, is_kept) -> None:
    responses = [
        api.http.post(CHAT, json=body(), headers={"X-Request-Id": given}),
        api.http.post(CHAT, json=body(stream=True), headers={"X-Request-Id": given}),
        api.http.get("/v1/models", headers={"X-Request-Id": given}),
        api.http.post(CHAT, json={}, headers={"X-Request-Id": given}),
        api.http.get("/nowhere", headers={"X-Request-Id": given}),
    ]
    for response in responses:
        got = response.headers["x-request-id"]
        assert (got == given) == is_kept
        assert re.fullmatch(r"[A-Za-z0-9._:-]{1,256}", got)
    assert api.chat(request_id="mine").json()["id"] == "chatcmpl-mine"


def test_a_line_in_the_log_for_each_request(api) -> None:
    api.engine.num_cached = 5
    api.chat("some words", request_id="logged-1")
    api.http.post(CHAT, json={}, headers={"X-Request-Id": "logged-2"})
    eventually(lambda: "id=logged-2" in api.log())
    lines = {
        re.search(r"id=(\S+)", line)[1]: line for line in api.log().splitlines() if "id=" in line
    }
    (sent,) = api.engine.generates
    assert re.search(
        rf"info server request id=logged-1 status=200 prompt={len(sent.prompt) // 4} cached=5 "
        rf"completion={len(api.engine.output_of(sent))} ttft=0\.\d+ e2e=0\.\d+ finish=stop$",
        lines["logged-1"],
    )
    assert lines["logged-2"].endswith("id=logged-2 status=400 error=invalid_type")
    assert "Traceback" not in api.log()


def metric(api, name: str, labels: str = "") -> float:
    pattern = rf'^{name}{{model_name="demo",engine="0"{labels}}} (\S+)$'
    found = re.search(pattern, api.http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_metrics_count_requests_and_tokens(api) -> None:
    names = {
        "vllm:request_success_total": ',finished_reason="stop"',
        "vllm:time_to_first_token_seconds_count": "",
        "vllm:inter_token_latency_seconds_count": "",
        "vllm:request_generation_tokens_sum": "",
        "vllm:e2e_request_latency_seconds_count": "",
        "vllm:admission_rejections_total": ',reason="queue_full"',
    }
    before = {name: metric(api, name, labels) for name, labels in names.items()}
    api.chat("one two three")
    num_out = len(api.engine.output_of(api.engine.generates[0]))
    api.engine.refuse = queue_full()
    api.chat()
    gained = {name: metric(api, name, labels) - before[name] for name, labels in names.items()}
    assert 0 <= gained.pop("vllm:inter_token_latency_seconds_count") < num_out
    assert gained == {
        "vllm:request_success_total": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:request_generation_tokens_sum": num_out,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:admission_rejections_total": 1,
    }
    assert metric(api, "vllm:kv_cache_usage_perc") == 0.25
    assert metric(api, "vllm:cache_config_info", ',block_size="16",num_gpu_blocks="64"') == 1


def test_a_key_guards_every_route_but_health(tmp_path) -> None:
    with serving(tmp_path, "server.api_key=sesame") as api:
        assert api.http.get("/health").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer sesam"},
            {"Authorization": "Basic sesame"},
            {"Authorization": "sesame"},
        ):
            for method, path in (
                ("POST", CHAT),
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("GET", "/nowhere"),
            ):
                response = api.http.request(method, path, headers=headers)
                assert (response.status_code, error(response)["code"]) == (401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        assert api.engine.generates == []

        async def main() -> str:
            async with api.openai(api_key="wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            async with api.openai(api_key="sesame") as client:
                answer = await client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": "open"}]
                )
            return answer.choices[0].message.content

        assert asyncio.run(main()) == "open"
        assert "sesame" not in api.log()


def test_a_dead_engine_is_told_to_everyone(tmp_path) -> None:
    with serving(tmp_path) as api:
        api.engine.step_s = 0.02
        request = body("word " * 200, stream=True)
        with api.http.stream("POST", CHAT, json=request) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            api.engine.die()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert response.status_code == 200
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "engine_failed"
        assert content([json.loads(event) for event in events[:-2]] + [None]).startswith("word")
        response = api.http.get("/health")
        assert (response.status_code, error(response)["message"]) == (
            503,
            "the server has lost its engine",
        )
        response = api.chat()
        assert (response.status_code, error(response)["type"]) == (503, "server_error")


def test_a_request_the_engine_dies_under_before_its_first_token_is_a_503(tmp_path) -> None:
    with serving(tmp_path) as api:
        api.engine.is_stuck = True

        async def main() -> list[int]:
            async with httpx.AsyncClient(base_url=api.url, trust_env=False, timeout=10) as http:
                asking = [http.post(CHAT, json=body(stream=s)) for s in (True, False)]
                waiting = asyncio.gather(*asking)
                while len(api.engine.running) < 2:
                    await asyncio.sleep(0.01)
                api.engine.die()
                return [response.status_code for response in await waiting]

        assert asyncio.run(main()) == [503, 503]


def test_sigterm_lets_open_requests_finish_and_turns_new_ones_away(tmp_path) -> None:
    with serving(tmp_path, "server.shutdown_s=20") as api:
        api.engine.step_s = 0.02
        text = "word " * 60
        with api.http.stream("POST", CHAT, json=body(text, stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            api.process.terminate()
            eventually(lambda: httpx.get(f"{api.url}/health", trust_env=False).status_code == 503)
            refused = httpx.post(f"{api.url}{CHAT}", json=body(), trust_env=False)
            assert (refused.status_code, error(refused)["code"]) == (503, "shutting_down")
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert content([*chunks, None]) == text
        api.process.join(5)
        assert api.process.exitcode == 0


def test_sigterm_waits_only_so_long(tmp_path) -> None:
    with serving(tmp_path, "server.shutdown_s=0.3") as api:
        api.engine.step_s = 0.05
        with api.http.stream("POST", CHAT, json=body("word " * 200, stream=True)) as response:
            lines = response.iter_lines()
            events = []
            for line in lines:
                api.process.terminate()  # repeated signals do not move the first one's deadline
                if line:
                    events.append(line.removeprefix("data: "))
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "shutting_down"
        eventually(lambda: len(api.engine.aborts) == 1)
        api.process.join(5)
        assert api.process.exitcode == 0
