"""An answer with NaN logits ends with status 500, or with an error event in a stream."""

from __future__ import annotations

import httpx
import openai
import pytest

from nanovllm.wire import Refusal, RefusalKind
from tests.server.serving import body, content, eventually

ERROR = {
    "message": "the model produced NaN or infinite logits; this answer is invalid",
    "type": "server_error",
    "param": None,
    "code": "corrupted_output",
}


def counted(api) -> float:
    name = "nanovllm:corrupted_requests_total"
    (line,) = [x for x in api.http.get("/metrics").text.splitlines() if x.startswith(name)]
    return float(line.split()[-1])


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_whole_answer_is_a_500(api, num_tokens) -> None:
    before = counted(api)
    api.engine.corrupt_after = num_tokens
    response = api.chat("one two three four five")
    assert (response.status_code, response.json()) == (500, {"error": ERROR})
    assert response.headers["x-request-id"]
    assert counted(api) == before + 1
    assert api.engine.aborts == [] and not api.engine.running


def test_a_stream_without_a_token_is_a_500(api) -> None:
    api.engine.corrupt_after = 0
    response = api.chat("one two", stream=True)
    assert (response.status_code, response.json()) == (500, {"error": ERROR})


def test_a_stream_ends_with_an_event(api) -> None:
    before = counted(api)
    api.engine.corrupt_after, api.engine.step_s = 3, 0.01
    *chunks, error, done = api.events(
        "one two three four five", stream_options={"include_usage": True}
    )
    assert done == "[DONE]" and error == {"error": ERROR}
    assert "one two three four five".startswith(content([*chunks, done]))
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert counted(api) == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_others_go_on(api, stream) -> None:
    api.engine.answer, api.engine.step_s = "word " * 30, 0.005
    with (
        httpx.Client(base_url=api.url, trust_env=False, timeout=20) as client,
        client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as other,
    ):
        lines = other.iter_lines()
        next(lines)
        api.engine.corrupt_after = 0
        response = api.chat(n=3, stream=stream)
        api.engine.corrupt_after = -1
        assert (response.status_code, response.json()) == (500, {"error": ERROR})
        text = "".join(lines)
    assert text.endswith("data: [DONE]") and "error" not in text
    eventually(lambda: not api.engine.running)
    assert api.engine.generates[0].request_id not in api.engine.aborts


def test_the_openai_client_raises(api) -> None:
    api.engine.corrupt_after, api.engine.step_s = 2, 0.01
    client = openai.OpenAI(
        base_url=f"{api.url}/v1",
        api_key="x",
        max_retries=0,
        http_client=httpx.Client(trust_env=False, timeout=20),
    )
    with client:
        asked = {"model": "demo", "messages": body("one two three four")["messages"]}
        with pytest.raises(openai.InternalServerError, match="this answer is invalid"):
            client.chat.completions.create(**asked)
        with pytest.raises(openai.APIError, match="this answer is invalid") as caught:
            list(client.chat.completions.create(stream=True, **asked))
    assert caught.value.code == "corrupted_output"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_could_not_be_admitted_is_a_500_too(api, stream) -> None:
    api.engine.refuse = Refusal(0, RefusalKind.FAILED, "its log says why")
    response = api.chat(stream=stream, n=2)
    assert response.status_code == 500 and response.headers["x-request-id"]
    error = {"message": "its log says why", "code": "admission_failed"}
    assert response.json() == {"error": ERROR | error}


def test_the_log_says_so(api) -> None:
    api.engine.corrupt_after = 1
    request_id = "corrupted-1"
    api.http.post(
        "/v1/chat/completions", json=body("one two"), headers={"x-request-id": request_id}
    )
    eventually(lambda: f"id={request_id}" in api.log())
    (line,) = [line for line in api.log().splitlines() if f"id={request_id}" in line]
    assert "status=500" in line and "finish=error" in line
