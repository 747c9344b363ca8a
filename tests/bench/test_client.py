"""Requests of a client process, and its reading of streams."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import Mock

import httpx
import pytest

from nanovllm.bench import client, online
from nanovllm.bench.measure import Sample
from nanovllm.bench.report import samples_of
from nanovllm.bench.workload import Workload
from nanovllm.config import ConfigError
from tests.bench.test_online import fake_chat, measure
from tests.load.pair import silent


def test_a_server_with_drafts_counts_the_tokens_of_each_chunk() -> None:
    """With three tokens per chunk, ITL is a third of the time between chunks."""
    load = Workload(num_prompts=4, input_len=21, output_len=31, concurrency=2)
    with fake_chat("counts") as url:
        found = measure(url, load, warmup=0).record.metrics
    assert (found["output_tokens"], found["output_chunks"]) == (4 * 31, 4 * 11)
    assert 4.0 <= found["icl_mean_ms"] < 40.0
    assert found["itl_mean_ms"] == pytest.approx(found["icl_mean_ms"] / 3)
    assert found["itl_max_ms"] == pytest.approx(found["icl_max_ms"] / 3)


def test_a_server_behind_a_path() -> None:
    connections = client._Connections("http://h:1/at", None)
    assert connections._head.startswith("POST /at/v1/chat/completions HTTP/1.1\r\nHost: h:1\r\n")


def test_the_legs_of_a_prefill_and_a_decode_server() -> None:
    """Those of vLLM's connector, as vllm-router sends them. Without the object, D computes."""
    body = b'{"messages":[],"max_tokens":256,"stream":true,"stream_options":{"include_usage":true}}'
    assert json.loads(client.prefill_leg(body)) == {
        "messages": [], "max_tokens": 1, "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }  # fmt: skip
    params = {"do_remote_prefill": True, "nanovllm_ticket": "t", "remote_host": None}
    answer = json.dumps({"choices": [], "kv_transfer_params": params}).encode()
    assert json.loads(client.decode_leg(body, answer)) == json.loads(body) | {
        "kv_transfer_params": params
    }
    assert json.loads(client.decode_leg(body, b"{}"))["kv_transfer_params"] is None


def sample_of(*events: bytes, done: bytes = b"data: [DONE]\n\n") -> Sample:
    """Return the sample of one stream, which arrives byte by byte."""

    async def ask() -> Sample:
        channel, transport = client.Channel(), Mock()
        channel.connection_made(transport)
        asking = asyncio.create_task(channel.ask(b"GET"))
        await asyncio.sleep(0)
        body = b"".join((*events, done))
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
        for byte in head + body:
            if not transport.abort.called:
                channel.data_received(bytes([byte]))
        return await asking

    return asyncio.run(ask())


TEXT = b'{"choices": [{"index": 0, "delta": {"content": "a"}}]}'
USAGE = b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'


@pytest.mark.parametrize(
    "events",
    [
        (b"data: %b\n\n" % TEXT, b"data: %b\n\n" % USAGE),
        (b"data:%b\n\n" % TEXT, b": quiet\n\ndata:%b\n\n" % USAGE),
        (b"data: %b\r\n\r\n" % TEXT, b"data: %b\r\n\r\n" % USAGE),
        (b"event: message\ndata: %b\nid: 4\n\n" % TEXT, b"retry: 5\ndata: %b\n\n" % USAGE),
    ],
)
def test_all_forms_of_events_are_read(events: tuple[bytes, ...]) -> None:
    sample = sample_of(*events)
    assert (sample.error, len(sample.stamps)) == ("", 1)
    assert (sample.input_tokens, sample.output_tokens) == (7, 3)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b"{nope", "bad response: JSON is malformed"),
        (b"[1, 2]", "bad response: Expected `object`, got `array`"),
        (b'{"choices": [null]}', "bad response: Expected `object`, got `null` - at `$.choices[0]`"),
        (
            b'{"choices": [{"delta": {"content": "\xff"}}]}',
            "bad response: Invalid UTF-8 encoded string",
        ),
        (b'{"usage": {"completion_tokens": 3}}', "bad response: Object missing required field"),
        (USAGE.replace(b"3", b'"x"'), "bad response: Expected `int`, got `str` - at `$.usage"),
        (USAGE.replace(b"3", b"-3"), "bad response: Expected `int` >= 0 - at `$.usage"),
        (b'{"error": "too hot"}', "too hot"),
        (TEXT, "the stream has no usage"),
    ],
)
def test_an_event_of_another_form_is_the_error_of_its_request(event: bytes, error: str) -> None:
    assert sample_of(b"data: %b\n\n" % event).error.startswith(error)
    assert sample_of(b"data: %b\n\n" % USAGE, done=b"").error == "the stream ended early"


@pytest.mark.parametrize(
    ("path", "answer", "error"),
    [
        ("models", [1, 2], "Expected `object`, got `array`"),
        ("models", "<html>hello</html>", "JSON is malformed"),
        ("models", {"data": [{"name": "m"}]}, "Object missing required field `id`"),
        ("chat/completions", {"choices": []}, "Object missing required field `usage`"),
        ("chat/completions", {"usage": None}, "Expected `object`, got `null` - at `$.usage`"),
    ],
)
def test_a_server_of_another_kind_is_named(path: str, answer: object, error: str) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith(path):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return httpx.Response(200, text=text)

    api = online._Api("http://h:1", None)
    api.http = httpx.Client(base_url="http://h:1", transport=httpx.MockTransport(handle))
    load = Workload(num_prompts=1, input_len=21, output_len=2, concurrency=1)
    with pytest.raises(ConfigError) as refused:
        online.ask_server(api, load)
    where = f"http://h:1/v1/{path} does not answer as OpenAI's API does ({error}"
    assert str(refused.value).startswith(where) and "The answer begins with b" in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["h:1", "http://", "ftp://h:1", "http://[::1", "http://h:99999", "http://h:0", "http://h:x"],
)
def test_an_address_of_no_server_is_refused(url: str) -> None:
    for option, urls in (("--url", (url,)), ("--prefill-url", ("http://h:1", url))):
        with pytest.raises(ConfigError) as refused:
            online._Api(urls[0], None, *urls[1:])
        assert str(refused.value) == f"{option} {url}: write it as http://host:port"


def test_pages_of_another_kind_are_no_metrics() -> None:
    page = '<html>\na page\n# HELP x y\nup 1\nname{a="b c"} 2.5\n\nlast +Inf\n</html>'
    assert samples_of(page) == {"up": 1.0, 'name{a="b c"}': 2.5, "last": float("inf")}
    assert [online.is_load(page) for page in ("", page, '{"layer":3}\n')] == [False, False, True]


def test_an_answer_of_the_prefill_server_that_is_no_json_fails_its_request() -> None:
    class Ended:
        async def ask(self, body: bytes) -> tuple[Sample, client.Channel]:
            channel = client.PrefillChannel()
            channel._rest = b"<html>"
            return Sample(0.0, []), channel

    share = client.Share(
        url="http://h:1",
        api_key=None,
        conversations=[],
        due_s=[],
        num_lanes=0,
        prefill_url="http://h:2",
    )
    driver = client._Driver(share, Mock())
    driver._prefill = Ended()  # type: ignore[assignment]
    sample = asyncio.run(driver._send(b'{"messages":[]}'))
    assert sample.error.startswith("prefill server: bad response: JSON is malformed")


def test_an_error_of_the_prefill_server_is_that_of_the_request() -> None:
    load = Workload(num_prompts=2, input_len=21, output_len=4, concurrency=1)
    with fake_chat() as url, fake_chat("a-key-that-the-client-has-not") as prefill_url:
        found = online.measure_server(
            load, None, url=url, api_key=None, goals_ms={}, warmup=0, processes=1, bar=silent,
            prefill_url=prefill_url,
        )  # fmt: skip
    assert found.record.metrics["failed"] == 2
    (error,) = found.errors
    assert error.startswith("prefill server: HTTP 401: ") and "wrong key" in error
