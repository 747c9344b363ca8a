"""The real vllm-router in front of our servers: prefill and decode, and two plain ones.

The plain ones run `engine: paper`, which starts fast; their texts are fixed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.end_to_end.demo_server import Server, start
from tests.end_to_end.vllm_router import IS_INSTALLED, Router, free_port, start_router

if not IS_INSTALLED:
    warnings.warn("vllm-router is missing, so nothing tests it: pip install '.[dev]'", stacklevel=1)
pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="vllm-router is not installed")

SMALL = ("--device", "cpu", "--set", "cache.page_tokens=16", "--set", "cache.pages=64")
KEY = "the key of all servers"
SECRET = {"NANOVLLM_TRANSFER_SECRET": "the secret of these servers", "NANOVLLM_API_KEY": KEY}
Pair = tuple[Server, Server, Router]  # prefill, decode


def asked(name: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{name}: tell me all about pages. " * 8}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 16, **more}


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def choices(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def line_of(server: Server, answer: httpx.Response) -> str:
    """Return the server's log line of an answered request. It may come after the answer."""
    name = f"id={answer.json()['id'].removeprefix('chatcmpl-')} "
    deadline = time.monotonic() + 30
    while not (found := [line for line in server.lines if name in line]):
        assert time.monotonic() < deadline, f"no line with {name}"
        time.sleep(0.05)
    return found[0]


def served(server: Server) -> float:
    """Return the number of chat requests that the server has answered."""
    page = httpx.get(f"{server.url}/metrics").text
    pattern = r'nanovllm:http_requests_total.*path="/v1/chat/completions",status="200"} (\d+)'
    return sum(map(int, re.findall(pattern, page)))


@dataclass
class Running:
    """Processes of one test."""

    servers: list[Server] = field(default_factory=list)
    routers: list[Router] = field(default_factory=list)

    def server(self, *arguments: str) -> Server:
        self.servers.append(start("paper", "--set", "paper.tokens_per_s=500", *arguments))
        return self.servers[-1]

    def router(self, *arguments: str) -> Router:
        self.routers.append(start_router(*arguments))
        return self.routers[-1]


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    for router in running.routers:
        router.stop()
    for server in running.servers:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    address = f"127.0.0.1:{free_port()}"
    p = start(
        *SMALL, "--role", "prefill", "--set", f"transfer.listen={address}", environment=SECRET
    )
    d = start(
        *SMALL, "--role", "decode", "--set", f"transfer.peers=[{address}]",
        "--set", "cache.host_gib=0.05", environment=SECRET,
    )  # fmt: skip
    router = start_router(
        "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", p.url,
        "--decode", d.url, key=KEY,
    )  # fmt: skip
    yield p, d, router
    router.stop()
    for server in (p, d):
        assert server.stop() == 0


def test_pages_pass_through_the_router(pair: Pair) -> None:
    """The text is that of one server, and one id finds both requests."""
    p, d, router = pair
    body = asked("Ada")
    found = post(router.url, body)
    usage = found.json()["usage"]
    alone = post(d.url, body | {"cache_salt": "alone"})
    assert choices(found)[0]["message"] == choices(alone)[0]["message"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0  # of P, which computed all
    assert "___prefill_addr_" in found.json()["id"]
    assert "completion=1 " in line_of(p, found) and "loaded=112 " in line_of(d, found)


def test_a_stream_a_forced_call_and_a_schema(pair: Pair) -> None:
    _, d, router = pair
    stream = post(router.url, asked("Grace", stream=True, stream_options={"include_usage": True}))
    events = [line[6:] for line in stream.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(c["delta"].get("content") or "" for one in chunks for c in one["choices"])
    assert text == choices(post(d.url, asked("Grace")))[0]["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    called = post(
        router.url, asked("Tim", tools=tools, tool_choice="required", n=2, max_tokens=200)
    )
    assert [one["message"]["tool_calls"][0]["function"]["name"] for one in choices(called)] == [
        "f",
        "f",
    ]
    assert "loaded=" in line_of(d, called)
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    formed = post(router.url, asked("Alan", response_format=form, max_tokens=200))
    (only,) = choices(formed)
    assert json.loads(only["message"]["content"])["a"] == 7, formed.text
    assert "loaded=" in line_of(d, formed)


def test_errors_of_the_servers_reach_the_client(pair: Pair) -> None:
    _, _, router = pair
    refused = post(router.url, asked("Edsger", temperature=9))
    assert refused.status_code == 400 and "temperature" in refused.text


def test_p_is_full_and_d_computes(pair: Pair) -> None:
    """P answers without the object while half of its pages are lent."""
    p, d, router = pair
    leg = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    lent = [post(p.url, asked(f"Nr {i}") | leg).json() for i in range(6)]
    assert lent[0].get("kv_transfer_params") and not lent[5].get("kv_transfer_params")
    found = post(router.url, asked("Emmy"))
    assert choices(found)[0]["finish_reason"] == "length"
    assert "loaded=" not in line_of(d, found)


def test_two_plain_servers_share_the_requests(running: Running) -> None:
    """With one killed, the other one answers all of them."""
    servers = [running.server() for _ in range(2)]
    urls = [server.url for server in servers]
    router = running.router("--worker-urls", *urls, "--policy", "round_robin")
    body = asked("Barbara") | {"model": "paper"}
    texts = {choices(post(router.url, body))[0]["message"]["content"] for _ in range(6)}
    assert len(texts) == 1
    assert [served(server) for server in servers] == [3, 3]
    models = httpx.get(f"{router.url}/v1/models")
    assert "paper" in [card["id"] for card in models.json()["data"]]
    for pid in [*servers[0].children(), servers[0].process.pid]:
        os.kill(pid, signal.SIGKILL)
    for _ in range(4):
        assert choices(post(router.url, body))[0]["message"]["content"] in texts
    assert servers[1].stop() == 0


def test_events_lead_requests_to_the_server_that_has_their_prefix(running: Running) -> None:
    """The router's policy kv_aware reads cache events, and prompts by the route `render`.

    Each server has the prefix of one question, from before the router's start. The next event shows
    the router that it has missed some, and it asks for a replay.
    """
    ports = [free_port() for _ in range(4)]
    servers = [
        running.server(
            "--set", "cache.page_tokens=16", "--set", "kv_events.topic=''",
            "--set", f"kv_events.endpoint=tcp://127.0.0.1:{ports[at]}",
            "--set", f"kv_events.replay=tcp://127.0.0.1:{ports[at + 2]}",
        )
        for at in (0, 1)
    ]  # fmt: skip
    bodies = [asked(name) | {"model": "paper"} for name in ("Ada", "Grace")]
    for server, body in zip(servers, bodies, strict=True):
        choices(post(server.url, body))
    sources = [
        flag
        for at, server in enumerate(servers)
        for flag in (
            "--kv-event-source", f"{server.url}=tcp://127.0.0.1:{ports[at]}",
            "--kv-event-replay-source", f"{server.url}=tcp://127.0.0.1:{ports[at + 2]}",
        )
    ]  # fmt: skip
    router = running.router(
        "--worker-urls", *[server.url for server in servers], "--policy", "kv_aware",
        "--kv-event-block-size", "16", "--kv-event-model", "paper", "--log-level", "debug",
        *sources,
    )  # fmt: skip
    for number in range(20):  # until the subscriptions have arrived, and the replays too
        for server in servers:
            choices(post(server.url, asked(f"Nr {number}") | {"model": "paper"}))
        time.sleep(0.2)
        if sum("replay sequence advanced" in line for line in router.lines) >= 6:
            break
    before = [served(server) for server in servers]
    for body in bodies * 3:
        choices(post(router.url, body))
    now = [served(server) for server in servers]
    assert now == [before[0] + 3, before[1] + 3], "".join(router.lines)
    assert [server.stop() for server in servers] == [0, 0]
