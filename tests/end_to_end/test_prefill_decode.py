"""A prefill and a decode server, driven as vllm-router does: P first, then D with P's object.

In each case the text equals that of one server, and faults cost at most some seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from nanovllm.adapters.folder import DEMO
from tests.end_to_end.demo_server import Server, name_of, start

SECRET = {"NANOVLLM_TRANSFER_SECRET": "the secret of these servers"}
SMALL = ("--device", "cpu", "--set", "cache.page_tokens=16", "--set", "cache.pages=64")
CHAT = "/v1/chat/completions"
ID = "___prefill_addr_10.0.0.1:8000___decode_addr_10.0.0.2:8000_0a"
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


def question(name: str) -> dict[str, Any]:
    """Return a body whose prompt has some full pages."""
    messages = [{"role": "user", "content": f"{name}: tell me all about pages. " * 8}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 16}


@dataclass
class Servers:
    p: Server
    d: Server

    def prefill(self, body: dict[str, Any]) -> dict[str, Any] | None:
        leg = body | {"stream": False, "max_tokens": 1, "min_tokens": 1}
        found = post(self.p, leg | {"kv_transfer_params": ASKED})
        params: dict[str, Any] | None = found.get("kv_transfer_params")
        return params

    def decode(self, body: dict[str, Any], params: object) -> tuple[str, int]:
        """Return the text and the number of tokens that were not computed."""
        return answer_of(post(self.d, body | {"kv_transfer_params": params}))

    def connections(self) -> int:
        return sum("is engine" in line for line in self.d.lines)

    def warnings(self) -> list[str]:
        return [line for line in self.d.lines if "computes its prompt here" in line]


def started(ranks: tuple[int, int]) -> Servers:
    """Start P and D, with these numbers of ranks, at the same time."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    p = (*SMALL, "--role", "prefill", "--set", f"transfer.listen={address}")
    d = (*SMALL, "--role", "decode", "--set", f"transfer.peers=[{address}]")
    d = (*d, "--set", "cache.host_gib=0.05")
    with ThreadPoolExecutor(2) as threads:
        begun = [
            threads.submit(start, *arguments, "--tp", str(count), environment=SECRET)
            for arguments, count in zip((p, d), ranks, strict=True)
        ]
        return Servers(*[one.result() for one in begun])


def post(server: Server, body: dict[str, Any]) -> Any:
    found = httpx.post(server.url + CHAT, json=body, headers={"x-request-id": ID}, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def answer_of(found: Any) -> tuple[str, int]:
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], cached


def alone(servers: Servers, body: dict[str, Any]) -> str:
    """Return the text that D computes without any cached page."""
    text, cached = answer_of(post(servers.d, body | {"cache_salt": "alone"}))
    assert cached == 0
    return text


def eventually(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Yield P and D. Both have the adapter "same", and "other" with different settings."""
    folders = [tmp_path_factory.mktemp(role) for role in "pd"]
    for folder, alpha in zip(folders, (8, 64), strict=True):
        for name in ("same", "other"):
            shutil.copytree(DEMO / "pirate", folder / name)
        config = folder / "other" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": alpha}))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    address = f"127.0.0.1:{port}"
    p = start(
        *SMALL, "--role", "prefill", "--set", f"transfer.listen={address}",
        "--set", f"adapters.folder={folders[0]}", environment=SECRET,
    )  # fmt: skip
    d = start(
        *SMALL, "--role", "decode", "--set", f"transfer.peers=[{address}]",
        "--set", "cache.host_gib=0.05", "--set", f"adapters.folder={folders[1]}",
        environment=SECRET,
    )  # fmt: skip
    servers = Servers(p, d)
    eventually(lambda: servers.connections() == 1)
    yield servers
    for server in (p, d):
        if server.process.poll() is None:
            server.process.kill()


def test_pages_pass_from_p_to_d(servers: Servers) -> None:
    """Also with a forced call and n, and with an id that both logs contain."""
    body = question("Ada")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    forced = servers.prefill(question("Tim") | {"tools": tools, "tool_choice": "required", "n": 2})
    assert forced is not None
    params = servers.prefill(body)
    assert params is not None and params["do_remote_prefill"] and params["remote_host"] is None
    text, cached = servers.decode(body, params)
    assert cached == params["remote_num_tokens"] >= 112 and text == alone(servers, body)
    assert not servers.warnings()
    page = httpx.get(servers.d.url + "/metrics").text
    assert re.search(rf'nanovllm:tier_hit_tokens_total{{.*tier="peer".*}} {cached}\b', page), page
    assert re.search(r"vllm:nixl_bytes_transferred_count{.*} 1\b", page), page
    assert servers.p.metric("nanovllm:transfer_leases") == 1  # that of Tim's prompt
    assert any("sent its first" in line for line in servers.d.lines)
    refused = {"temperature": -1, "kv_transfer_params": forced}
    assert httpx.post(servers.d.url + CHAT, json=body | refused).status_code == 400
    eventually(lambda: servers.p.metric("nanovllm:transfer_leases") == 0)
    servers.decode(body, forced)  # its prompt differs, and its lease has ended
    for server in (servers.p, servers.d):
        assert any(f"id={ID}" in line for line in server.lines)


def test_an_adapter_is_known_by_its_files(servers: Servers) -> None:
    same, other = (question("Alonzo") | {"model": name} for name in ("same", "other"))
    params = servers.prefill(same)
    assert params is not None
    text, cached = servers.decode(same, params)
    assert cached == params["remote_num_tokens"] >= 112 and text == alone(servers, same)
    assert text != alone(servers, question("Alonzo"))
    count, params = len(servers.warnings()), servers.prefill(other)
    assert params is not None and servers.decode(other, params) == (alone(servers, other), 0)
    eventually(lambda: len(servers.warnings()) == count + 1)
    assert "for another prompt, cache_salt or adapter" in servers.warnings()[-1]


def test_a_ticket_of_another_prompt_or_a_forged_one(servers: Servers) -> None:
    first, other = question("Grace"), question("Edsger")
    params = servers.prefill(first)
    assert params is not None
    count = len(servers.warnings())
    assert servers.decode(other, params) == (alone(servers, other), 0)
    ticket = params["nanovllm_ticket"]
    forged = params | {"nanovllm_ticket": ticket[:-4] + "AAAA", "remote_host": "127.0.0.2"}
    assert servers.decode(first, forged) == (alone(servers, first), 0)
    eventually(lambda: len(servers.warnings()) == count + 2)


def test_d_has_everything_and_p_gets_its_pages_back(servers: Servers) -> None:
    """D declines what it has. With many leases, P answers without the object."""
    body = question("Barbara")
    text, _ = answer_of(post(servers.d, body))
    params = servers.prefill(body)
    assert params is not None and servers.decode(body, params)[0] == text
    bodies = [question(f"Nr {i}") for i in range(6)]
    lent = [servers.prefill(body) for body in bodies]
    assert lent[0] is not None and lent[5] is None
    assert servers.decode(bodies[5], None)[0] == alone(servers, bodies[5])
    for body, params in zip(bodies, lent, strict=True):
        servers.decode(body, params)
    again = question("again")
    assert servers.decode(again, servers.prefill(again))[1] >= 112


def test_an_abort_while_pages_arrive_and_a_frozen_p(servers: Servers) -> None:
    first, second = question("Alan"), question("John")
    params, more = servers.prefill(first), servers.prefill(second)
    assert params is not None and more is not None
    os.kill(servers.p.engine_pid(), signal.SIGSTOP)
    try:
        with pytest.raises(httpx.ReadTimeout):
            body = first | {"kv_transfer_params": params}
            httpx.post(servers.d.url + CHAT, json=body, timeout=0.5)
        began = time.monotonic()
        text, cached = servers.decode(second, more)
        assert time.monotonic() - began < 20 and cached == 0
    finally:
        os.kill(servers.p.engine_pid(), signal.SIGCONT)
    assert text == alone(servers, second)
    eventually(lambda: servers.d.metric("vllm:kv_cache_usage_perc") == 0)
    eventually(lambda: servers.connections() == 2)  # leases of before the fault end by themselves
    third = question("Kurt")
    params = servers.prefill(third)
    text, cached = servers.decode(third, params)
    assert text == alone(servers, third) and cached >= 112


def test_p_is_killed(servers: Servers) -> None:
    """Runs last. D computes, and has no pages left in use."""
    body = question("Emmy")
    params = servers.prefill(body)
    assert params is not None
    for pid in [*servers.p.children(), servers.p.process.pid]:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    text, cached = servers.decode(body, params)
    assert cached == 0 and time.monotonic() - began < 20 and text == alone(servers, body)
    assert servers.d.metric("vllm:kv_cache_usage_perc") == 0
    assert servers.d.stop() == 0


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_servers_with_other_numbers_of_ranks(ranks: tuple[int, int]) -> None:
    """The text is that of D alone, also with a forged ticket, and with a frozen rank of P."""
    servers = started(ranks)
    try:
        eventually(lambda: servers.connections() == ranks[1])
        body, other, third = question("Ada"), question("Alan"), question("Grace")
        params = servers.prefill(body)
        assert params is not None
        text, cached = servers.decode(body, params)
        assert cached == params["remote_num_tokens"] >= 112 and not servers.warnings()
        assert text == alone(servers, body)
        params = servers.prefill(other)
        assert params is not None
        forged = params | {"nanovllm_ticket": params["nanovllm_ticket"][:-4] + "AAAA"}
        assert servers.decode(other, forged) == (alone(servers, other), 0)
        params = servers.prefill(third)
        assert params is not None
        name = "nanovllm-rank1" if ranks[0] == 2 else "nanovllm-engine"
        frozen = next(pid for pid in servers.p.children() if name_of(pid) == name)
        os.kill(frozen, signal.SIGSTOP)
        began = time.monotonic()
        text, cached = servers.decode(third, params)
        assert cached == 0 and time.monotonic() - began < 20 and text == alone(servers, third)
        eventually(lambda: servers.d.metric("vllm:kv_cache_usage_perc") == 0)
        assert servers.d.stop() == 0
    finally:
        for server in (servers.p, servers.d):
            if server.process.poll() is None:
                for pid in [*server.children(), server.process.pid]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def test_servers_with_several_engines() -> None:
    """Each engine of D reads from each of P. A lost engine of P costs no request."""
    listen, peers = pair_of_ports()
    p = start(
        *SMALL, "--dp", "2", "--role", "prefill", "--set", f"transfer.listen={listen}",
        environment=SECRET,
    )  # fmt: skip
    d = start(
        *SMALL, "--dp", "2", "--role", "decode", "--set", f"transfer.peers=[{','.join(peers)}]",
        "--set", "cache.host_gib=0.05", environment=SECRET,
    )  # fmt: skip
    servers = Servers(p, d)
    try:
        eventually(lambda: servers.connections() == 4)
        engines = set()
        for number in range(6):
            body = question(f"Nr {number}") | {"cache_salt": f"salt {number}"}
            params = servers.prefill(body)
            assert params is not None
            engines.add(params["remote_engine_id"])
            text, cached = servers.decode(body, params)
            assert cached == params["remote_num_tokens"] >= 112 and text == alone(servers, body)
        assert len(engines) == 2 and not servers.warnings()
        last = question("last")
        params = servers.prefill(last)
        os.kill(
            next(pid for pid in p.children() if name_of(pid).startswith("nanovllm-engin")),
            signal.SIGKILL,
        )
        for number in range(4):
            body = question(f"after {number}")
            assert servers.decode(body, servers.prefill(body))[0] == alone(servers, body)
        assert servers.decode(last, params)[0] == alone(servers, last)
    finally:
        for server in (p, d):
            server.stop()


def test_a_long_prompt_is_read_while_it_is_computed() -> None:
    """P answers after its first chunk. An abort of D ends the prompt at P, too."""
    listen, (peer, _) = pair_of_ports()
    few = ("--set", "schedule.step_tokens=32")
    more = (*SMALL[:-1], "cache.pages=400")
    p = start(*more, *few, "--role", "prefill", "--set", f"transfer.listen={listen}",
              environment=SECRET)  # fmt: skip
    d = start(*more, "--role", "decode", "--set", f"transfer.peers=[{peer}]",
              "--set", "cache.host_gib=0.05", environment=SECRET)  # fmt: skip
    servers = Servers(p, d)
    try:
        eventually(lambda: servers.connections() == 1)
        body = question("Ada " * 90)
        leg = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": ASKED}
        found = post(p, leg)
        params, usage = found["kv_transfer_params"], found["usage"]
        assert usage["completion_tokens"] == 0 and usage["prompt_tokens"] > 700
        assert found["choices"][0]["finish_reason"] == "length"
        text, cached = servers.decode(body, params)
        assert cached == params["remote_num_tokens"] > 700 and text == alone(servers, body)
        eventually(lambda: p.metric("nanovllm:transfer_leases") == 0)
        other = question("Tim " * 90)
        params = servers.prefill(other)
        with pytest.raises(httpx.ReadTimeout):
            late = other | {"kv_transfer_params": params}
            httpx.post(d.url + CHAT, json=late, timeout=0.05)
        for server in (p, d):
            eventually(lambda server=server: server.metric("vllm:kv_cache_usage_perc") == 0)
            assert server.metric("vllm:num_requests_running") == 0
        assert servers.decode(other, servers.prefill(other))[0] == alone(servers, other)
        assert not servers.warnings()
    finally:
        for server in (p, d):
            server.stop()


def pair_of_ports() -> tuple[str, list[str]]:
    """Return the address of the first of two free ports, and both addresses."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
            with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return f"127.0.0.1:{port}", [f"127.0.0.1:{port + at}" for at in range(2)]
