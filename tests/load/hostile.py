"""Hostile load: time to first token of a small request during each kind of abuse.

    python -m tests.load.hostile --results-dir results

Serves RECIPE (default: the demo). For each abuse, measures the small request alone and then during
the abuse, one request after another in both cases. Abusers run in processes of the lowest priority,
because real ones do not share the server's cores. Fails if the small request takes more than twice
as long during 2 MB prompts as alone. Fails, too, if the API processes reach 1 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from nanovllm.bench import record, store
from nanovllm.bench.started import started
from nanovllm.config import load_config
from tests.load.refused import EARLY, HEADS, JSON, PAGES
from tests.load.server_memory import api_mib, num_open_files, watched

log = logging.getLogger("hostile")
CHAT = "/v1/chat/completions"
MOST_RATIO, MOST_MIB = 2.0, 1024.0
PATIENCE_S = 120.0
PROMPTS = "prompts of 2 MB"
SMALL = {
    "messages": [{"role": "user", "content": "What is nanovllm?"}],
    "max_tokens": 4,
    "temperature": 0,
    "stream": True,
    "chat_template_kwargs": {"enable_thinking": False},
}
Address = tuple[str, int]
Abuse = Callable[[Address, int], Awaitable[None]]  # one abuse by the client of that number


# -- abusers: each repeats until the end, from a number of clients at once ---------------------


def chat(text: str = "hello", **more: object) -> bytes:
    """Return a whole request that closes its connection."""
    raw = json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()
    return head(len(raw)) + raw


def many(count: int) -> bytes:
    raw = json.dumps({"messages": [{"role": "user", "content": ""}] * count}).encode()
    return head(len(raw)) + raw


def head(length: int) -> bytes:
    more = f"Host: localhost\r\n{JSON}\r\nConnection: close\r\nContent-Length: {length}"
    return f"POST {CHAT} HTTP/1.1\r\n{more}\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def connected(
    address: Address,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(address: Address, raw: bytes, patience_s: float = 600.0) -> None:
    """Send the request, and read all of the answer or hang up after `patience_s`."""
    async with connected(address) as (reader, writer):
        writer.write(raw)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(-1), patience_s)


async def large_prompts(address: Address, _: int) -> None:
    await ask(address, LARGE)


async def short_messages(address: Address, _: int) -> None:
    await ask(address, MANY)


async def medium_messages(address: Address, _: int) -> None:
    await ask(address, FEWER)


async def medium_prompts(address: Address, _: int) -> None:
    await ask(address, MEDIUM)


async def headers(address: Address, _: int) -> None:
    async with connected(address) as (_, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nbig: ")
        for _ in range(512):
            writer.write(b"x" * 65536)
            await writer.drain()


async def half_open(address: Address, _: int) -> None:
    async with connected(address) as (reader, writer):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConten")
        await reader.read(-1)


async def slow_bodies(address: Address, _: int) -> None:
    async with connected(address) as (_, writer):
        writer.write(head(100_000))
        while not writer.transport.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.1)


def nested(seed: int) -> dict[str, Any]:
    """Return a schema that takes seconds to compile: long strings of different lengths."""
    parts = {f"p{i}": {"type": "string", "maxLength": 1500 + seed % 997 + i} for i in range(40)}
    return {"type": "object", "properties": parts, "required": [], "additionalProperties": False}


def structured(schema: dict[str, Any]) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    return chat("Describe it.", response_format=form, max_tokens=16)


async def heavy_schemas(address: Address, client: int) -> None:
    """Hang up before the grammar is compiled."""
    await ask(address, structured(nested(time.monotonic_ns() + client)), 0.2)


async def distinct_schemas(address: Address, client: int) -> None:
    name = f"a{time.monotonic_ns()}_{client}"
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {name: number}, "required": [name]}
    await ask(address, structured(schema | {"additionalProperties": False}))


async def slow_readers(address: Address, client: int) -> None:
    raw = chat("hi", stream=True, logprobs=True, top_logprobs=20, ignore_eos=True, max_tokens=3000)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        sock.send(raw)
        await asyncio.sleep(600)


async def priorities(address: Address, _: int) -> None:
    await ask(address, chat("hello", priority=-100, max_tokens=8))


async def connect_abort(address: Address, client: int) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        raw = chat("abort me")
        sock.send(raw[: time.monotonic_ns() % (len(raw) + 1)])
    await asyncio.sleep(0.001)


async def malformed(address: Address, client: int) -> None:
    await ask(address, head(60_000) + b'{"messages": ' + b"[" * (60_000 - 13))


async def stops_and_biases(address: Address, client: int) -> None:
    biases = {str(i): (i % 7) - 3.0 for i in range(1000)}
    stops = [f"{client}{i}" + "a" * 1000 for i in range(16)]
    await ask(address, chat("hello", stop=stops, logit_bias=biases, max_tokens=32))


async def foreign_pages(address: Address, _: int) -> None:
    for raw, _ in PAGES:
        await ask(address, raw)


async def forbidden_heads(address: Address, _: int) -> None:
    for raw, _ in HEADS:
        await ask(address, raw)


async def early_refusals(address: Address, client: int) -> None:
    """Send 33 MiB before reading the refusal."""
    await ask(address, EARLY[client % len(EARLY)][0])


LARGE = chat("word " * 400_000)
MEDIUM = chat("word " * 12_000)
MANY, FEWER = many(60_000), many(3_000)
ABUSES: dict[str, tuple[Abuse, int]] = {  # with their number of clients
    PROMPTS: (large_prompts, 4),
    "60,000 messages": (short_messages, 4),
    "prompts of 60 kB": (medium_prompts, 4),
    "3,000 messages": (medium_messages, 4),
    "endless headers": (headers, 4),
    "half-open connections": (half_open, 500),
    "slow bodies": (slow_bodies, 100),
    "heavy schemas, hung up": (heavy_schemas, 12),
    "200 distinct schemas": (distinct_schemas, 4),
    "streams never read": (slow_readers, 4),
    "priority flood": (priorities, 4),
    "connect and abort": (connect_abort, 4),
    "malformed JSON": (malformed, 4),
    "stops and biases": (stops_and_biases, 4),
    "foreign pages": (foreign_pages, 4),
    "forbidden heads": (forbidden_heads, 4),
    "early refusals": (early_refusals, 4),
}


def abuse(name: str, address: Address, is_over: Event) -> None:
    """Run an abuser's process until `is_over` is set."""
    os.nice(19)
    act, num_clients = ABUSES[name]

    async def client(number: int) -> None:
        while True:
            try:
                await act(address, number)
            except OSError:  # refused or reset, which an abuser must expect
                await asyncio.sleep(0.01)

    async def main() -> None:
        clients = [asyncio.create_task(client(number)) for number in range(num_clients)]
        while not is_over.is_set():
            await asyncio.sleep(0.05)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    asyncio.run(main())


@contextlib.contextmanager
def abused(name: str, address: Address) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    is_over = context.Event()
    process = context.Process(target=abuse, args=(name, address, is_over), daemon=True)
    process.start()
    try:
        time.sleep(2.0)  # until the abuse is under way
        yield
    finally:
        is_over.set()
        process.join(20)
        process.kill()


# -- the small request ------------------------------------------------------------------------


def first_token_s(http: httpx.Client) -> float:
    """Return the time to the first token. Raise httpx.HTTPError."""
    begun = time.perf_counter()
    with http.stream("POST", CHAT, json=SMALL) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return time.perf_counter() - begun
    raise httpx.ReadError("a stream without content")


def waits_s(url: str, seconds: float) -> list[float]:
    """Return the times of requests sent one after another. A failed one counts as PATIENCE_S."""
    found, end = [], time.monotonic() + seconds
    fresh = httpx.Limits(max_keepalive_connections=0)  # a new connection for each request
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S, limits=fresh) as http:
        while time.monotonic() < end or len(found) < 3:
            try:
                found.append(first_token_s(http))
            except httpx.HTTPError as error:
                log.info("the small request failed: %s", error)
                found.append(PATIENCE_S)
            time.sleep(0.02)
    return found


def measure(url: str, supervisor: int, names: list[str], seconds: float) -> dict[str, float]:
    address = (httpx.URL(url).host, httpx.URL(url).port or 80)
    waits_s(url, 1.0)
    metrics: dict[str, float] = {"open_files_before": num_open_files(supervisor)}
    for name in names:
        quiet = waits_s(url, seconds / 2)
        with watched(supervisor) as peak, abused(name, address):
            beside = waits_s(url, seconds)
        key = "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
        found = {
            "quiet_ttft_p50_ms": 1e3 * float(np.median(quiet)),
            "ttft_p50_ms": 1e3 * float(np.median(beside)),
            "ttft_ratio": float(np.median(beside) / np.median(quiet)),
            "ttft_max_ms": 1e3 * max(beside),
            "peak_rss_mib": peak[0],
        }
        metrics |= {f"{key}_{what}": value for what, value in found.items()}
        log.info(
            "%-24s quiet %6.1f ms, beside %6.1f ms (%.1f times, longest %.0f ms), %4.0f MiB",
            name, *(found[what] for what in list(found)),
        )  # fmt: skip
        time.sleep(2.0)
    metrics["open_files_after"] = num_open_files(supervisor)
    metrics["after_rss_mib"] = api_mib(supervisor)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", help="default: the demo")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--only", help="abuses, parted by semicolons")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each abuse")
    parser.add_argument("--results-dir", type=Path, help="write a record there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    names = args.only.split(";") if args.only else list(ABUSES)
    started_at, begun = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    recipe = [args.recipe] if args.recipe else []
    command = [sys.executable, "-m", "nanovllm", "serve", *recipe, "--port", str(args.port)]
    url = f"http://127.0.0.1:{args.port}"
    with started(command, url) as server:
        metrics = measure(url, server.pid, names, args.seconds)
    if args.results_dir is not None:
        made = record.of_this_machine(
            kind="demo",
            started_at=started_at,
            duration_s=round(time.monotonic() - begun, 1),
            recipe=msgspec.to_builtins(load_config(args.recipe).recipe),
            changed={},
            workload={"name": "hostile", "abuses": names, "seconds": args.seconds},
            metrics=metrics,
        )
        argv = ["python", "-m", "tests.load.hostile", *sys.argv[1:]]
        made = msgspec.structs.replace(made, argv=argv)
        log.info("record: %s", store.write(made, args.results_dir))
    peak = max(value for key, value in metrics.items() if key.endswith("peak_rss_mib"))
    is_slow = metrics.get("prompts_of_2_mb_ttft_ratio", 0.0) > MOST_RATIO
    sys.exit(is_slow or peak >= MOST_MIB)


if __name__ == "__main__":
    main()
