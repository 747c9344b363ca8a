"""A real server with its engine process, and every number of a request at its extremes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.end_to_end.demo_server import Server
from tests.server.test_ranges import EXTREMES, FIELDS, as_written

QUESTION = '{"role": "user", "content": "What is 2 + 3?"}'


@pytest.fixture(scope="module")
def http(server: Server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        yield http


def sent(http: httpx.Client, fields: dict[str, str]) -> httpx.Response:
    """Send a request for a short answer, unless `fields` sets another length."""
    fields = {"max_tokens": "3", **fields}
    if "max_completion_tokens" in fields:
        del fields["max_tokens"]
    given = "".join(f', "{name}": {text}' for name, text in fields.items())
    return http.post(
        "/v1/chat/completions",
        content=f'{{"messages": [{QUESTION}]{given}}}'.encode(),
        headers={"content-type": "application/json"},
    )


def check(response: httpx.Response, fields: dict[str, str]) -> None:
    answer = response.json()
    if response.status_code == 400:
        error = answer["error"]
        named = [field for field in fields if (error["param"] or "").startswith(field)]
        assert named or error["code"] == "invalid_json", error
        assert error["type"] == "invalid_request_error" and len(error["message"]) <= 1000
        return
    assert response.status_code == 200, answer
    usage = answer["usage"]
    limit = fields.get("max_completion_tokens", fields.get("max_tokens", "3"))
    count = len(answer["choices"]) * (30_000 if limit == "null" else int(limit))
    assert int(fields.get("min_tokens", "0")) <= usage["completion_tokens"] <= count
    for choice in answer["choices"]:
        assert isinstance(choice["message"]["content"], str)
        assert choice["finish_reason"] in ("stop", "length")


def quiet(http: httpx.Client) -> str:
    response = sent(http, {"max_tokens": "12", "temperature": "0"})
    assert response.status_code == 200
    return str(response.json()["choices"][0]["message"]["content"])


def test_each_alone(http, server) -> None:
    expected = quiet(http)
    asked = [{field: as_written(field, text)} for field in FIELDS for text in EXTREMES]
    asked = [a | {"logprobs": "true"} if "top_logprobs" in a else a for a in asked]
    with ThreadPoolExecutor(12) as threads:
        responses = list(threads.map(lambda fields: sent(http, fields), asked))
    for response, fields in zip(responses, asked, strict=True):
        check(response, fields)
    num_served = sum(response.status_code == 200 for response in responses)
    assert num_served > 100
    assert quiet(http) == expected
    assert server.metric("vllm:num_requests_running") == 0
    assert http.get("/health").status_code == 200


numbers = st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(EXTREMES[:11]), max_size=5)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(numbers, st.booleans())
def test_together(http, fields, logprobs) -> None:
    written = {name: as_written(name, text) for name, text in fields.items()}
    check(sent(http, {**written, "logprobs": json.dumps(logprobs)}), written)
