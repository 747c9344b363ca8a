"""Abuses of a server by clients, each bounded in count and time.

An abuse returns the statuses of its answers, with 0 for a missing answer. No abuse may cause a
status that reports a failure of the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from tests.load.refused import EARLY, HEADS as FORBIDDEN, PAGES
from tests.load.soak.questions import CHAT, NAME, asked, schema, thing

PATIENCE_S = 20.0
WRONG = 599  # stands for any status other than the refusal that a request must get
POST = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode()
NUMBERS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "priority",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "top_logprobs",
    "stream_interval", "thinking_token_budget", "max_completion_tokens",
)  # fmt: skip
EXTREMES = ("0", "-1", "2147483647", "2147483648", "-9223372036854775809", "1e308", "-1e308",
            "1" + "0" * 40, "0.5", "null", "true", '"1"', "[]", "1e-320", "NaN")  # fmt: skip
BODIES = (
    b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"messages": ' + b"[" * 60_000, b'"' * 1000,
    b'{"messages": []}', b'{"messages": [{"role": "x", "content": "y"}]}', b"{}" * 100,
    b'{"messages": [{"role": "user", "content": 7}]}', b'{"messages": {"a": 1}}',
    b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', b"\0" * 4096,
)  # fmt: skip
HEADS = (
    b"\r\n\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nbig: " + b"x" * 200_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nno colon here\r\n\r\n", b"G\0T /health HTTP/1.1\r\n\r\n",
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: 99999999999\r\n\r\n{",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    POST + b"Content-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /%00%ff/../.. HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
)  # fmt: skip


class Target(NamedTuple):
    host: str
    port: int
    draw: random.Random


class Abuse(NamedTuple):
    act: Callable[[Target], Awaitable[list[int]]]
    floods: bool = False  # the queue may be full meanwhile, and others may get a 503


@asynccontextmanager
async def connected(
    target: Target, buffer: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection that is reset at the end. `buffer`: maximum number of unread bytes."""
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (target.host, target.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=buffer or 2**16)
    except BaseException:
        sock.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def post(body: dict[str, Any] | bytes, *more: str) -> bytes:
    """Return a whole request. Its connection stays open."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
        *more,
    )
    head = "".join(f"{line}\r\n" for line in (f"POST {CHAT} HTTP/1.1", *lines))
    return head.encode() + b"\r\n" + raw


async def status_of(reader: asyncio.StreamReader) -> int:
    """Return the status of the next answer, or 0 if the connection ends before."""
    words = (await reader.readline()).split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def ask(target: Target, raw: bytes, patience_s: float = PATIENCE_S) -> int:
    """Send the request and read all of the answer. Give up after `patience_s`."""
    status = 0
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(patience_s), connected(target) as (reader, writer):
            writer.write(raw)
            status = await status_of(reader)
            while await reader.read(2**16):
                pass
    return status


async def ask_all(
    target: Target, raws: list[bytes], most: int = 16, patience_s: float = PATIENCE_S
) -> list[int]:
    """Send all requests, `most` at once."""
    places = asyncio.Semaphore(most)

    async def one(raw: bytes) -> int:
        async with places:
            return await ask(target, raw, patience_s)

    return await asyncio.gather(*map(one, raws))


def once(body: dict[str, Any] | bytes, *more: str) -> bytes:
    """Return a request that closes its connection."""
    return post(body, "Connection: close", *more)


def long(**more: object) -> dict[str, Any]:
    """Return a body that generates 2,000 tokens unless it is aborted."""
    return asked("Hello!", **{"ignore_eos": True, "max_tokens": 2000, **more})


# -- abuses ------------------------------------------------------------------------------------


async def leave_streams(target: Target) -> list[int]:
    """Hang up after a few events."""

    async def one() -> int:
        async with connected(target) as (reader, writer):
            writer.write(post(long(stream=True)))
            status = await status_of(reader)
            for _ in range(target.draw.randint(1, 40)):
                await reader.readline()
            return status

    return await asyncio.gather(*(one() for _ in range(8)))


async def leave_requests(target: Target) -> list[int]:
    """Hang up before the answer, in most cases before the request is complete."""
    raw = post(long())
    cut = [raw[: target.draw.randint(1, len(raw) * 3 // 2)] for _ in range(16)]
    return await ask_all(target, cut, 8, patience_s=target.draw.choice((0.01, 0.1, 0.4)))


async def leave_many_choices(target: Target) -> list[int]:
    raws = [post(long(n=16, stream=stream, temperature=1)) for stream in (True, False)]
    return await ask_all(target, raws, 2, patience_s=target.draw.choice((0.1, 0.5, 1.0)))


async def malformed_bodies(target: Target) -> list[int]:
    kinds = ("text/plain", "", "application/json; charset=" + "x" * 5000)
    raws = [once(body) for body in BODIES]
    raws += [once(asked("Hello!"), f"Content-Type: {kind}") for kind in kinds]
    return await ask_all(target, raws, 4)


async def malformed_heads(target: Target) -> list[int]:
    return await ask_all(target, list(HEADS), 4, patience_s=0.5)


async def half_open(target: Target) -> list[int]:
    """Send the first bytes of a request, and then nothing for a second."""
    raw = post(asked("Hello!"))
    return await ask_all(target, [raw[:at] for at in range(0, 200, 3)], 70, patience_s=1.0)


async def trickle(target: Target) -> list[int]:
    """Send part of a body one byte at a time, and never send the rest."""

    async def one() -> int:
        async with connected(target) as (_, writer):
            raw = post(asked("Hello!"))
            writer.write(raw[:-60])
            for byte in raw[-60:-30]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            return 0

    return await asyncio.gather(*(one() for _ in range(8)))


async def oversized(target: Target) -> list[int]:
    """Send prompts far beyond the context, and a body beyond the limit."""
    number = target.draw.randrange(1000)
    many = [{"role": "user", "content": f"{number}"}] * 20_000
    bodies = [asked(f"{number} word " * 70_000), asked("x" * 300_000), {"messages": many}]
    raws = [once(body) for body in bodies]
    return await ask_all(target, [*raws, once(b" " * 33 * 2**20)], 2)


async def extreme_numbers(target: Target) -> list[int]:
    body = json.dumps({"max_tokens": 4, "messages": asked("Hello!")["messages"]})
    pairs = [(name, value) for name in NUMBERS for value in EXTREMES]
    raws = [
        once(f'{body[:-1]}, "{name}": {value}}}'.encode())
        for name, value in target.draw.sample(pairs, 60)
        if (name, value) != ("max_tokens", "null")
    ]
    ids = {"logit_bias": {"9" * 30: 1}, "stop_token_ids": [-1], "allowed_token_ids": [2**70]}
    raws += [once(asked("Hello!", **{name: value})) for name, value in ids.items()]
    return await ask_all(target, raws, 8)


async def heavy_schemas(target: Target) -> list[int]:
    """Request grammars that take long to compile, and hang up before they are ready."""
    sizes = [target.draw.randint(1500, 3500) for _ in range(8)]
    parts = [
        {f"p{i}": {"type": "string", "maxLength": size + i} for i in range(30)} for size in sizes
    ]
    raws = [post(asked("Describe it.", **schema(thing(**part)))) for part in parts]
    return await ask_all(target, raws, 8, patience_s=target.draw.choice((0.05, 0.3, 1.0)))


async def distinct_schemas(target: Target) -> list[int]:
    names = [f"a{target.draw.getrandbits(60)}" for _ in range(16)]
    bodies = [
        asked("Describe it.", **schema(thing(**{name: NAME})), max_tokens=8) for name in names
    ]
    return await ask_all(target, list(map(once, bodies)), 8)


async def refused_schemas(target: Target) -> list[int]:
    broken: list[dict[str, Any]] = [
        schema({"type": "nothing"}),
        schema({"$ref": "#/$defs/nowhere"}),
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
        {"structured_outputs": {"regex": "(" * 500}},
        {"structured_outputs": {"grammar": "root ::= missing"}},
        {"structured_outputs": {"grammar": 'root ::= "a" root'}},
        {"structured_outputs": {"choice": []}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}],
         "tool_choice": "required"},
    ]  # fmt: skip
    return await ask_all(target, [once(asked("Hello!", max_tokens=4, **one)) for one in broken], 4)


async def slow_readers(target: Target) -> list[int]:
    """Request long streams, and read nothing for three seconds."""

    async def one() -> int:
        async with connected(target, 4096) as (reader, writer):
            writer.write(post(long(stream=True, logprobs=True, top_logprobs=20)))
            status = await status_of(reader)
            await asyncio.sleep(3.0)
            return status

    return await asyncio.gather(*(one() for _ in range(4)))


async def connects(target: Target) -> list[int]:
    """Open 200 connections at once, and send nothing."""

    async def one() -> int:
        async with connected(target):
            await asyncio.sleep(target.draw.random())
            return 0

    return await asyncio.gather(*(one() for _ in range(200)))


async def priority_flood(target: Target) -> list[int]:
    """Send more requests than the queue takes, half of them at the most urgent priority allowed."""
    body = [asked("Hello!", max_tokens=8, priority=(0, 2**31 - 1)[n % 2]) for n in range(160)]
    return await ask_all(target, [once(one) for one in body], 160)


async def tiny(target: Target) -> list[int]:
    return await ask_all(target, [once(asked(f"{n}", max_tokens=1)) for n in range(60)], 16)


async def same_request_id(target: Target) -> list[int]:
    body = asked("Hello!", max_tokens=8, request_id="the-same")
    return await ask_all(target, [once(body, "X-Request-Id: the-same")] * 12, 12)


async def pipelines(target: Target) -> list[int]:
    """Pipeline requests. In two of three cases, hang up halfway."""
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    chat = post(asked("Hello!", max_tokens=4, stream=True))
    return [
        await ask(target, (health + chat) * 5 + health[:-2] + b"Connection: close\r\n\r\n"),
        await ask(target, chat * 10, 0.3),
        await ask(target, (chat + post(b"{")) * 5, 0.3),
    ]


async def wrong_methods(target: Target) -> list[int]:
    methods = ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD", "TRACE", "CONNECT", "POST")
    paths = (CHAT, "/metrics", "/health", "/v1/models", "/nowhere", "/" + "x" * 3000)
    close = "HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    raws = [f"{method} {path} {close}".encode() for method in methods for path in paths]
    return await ask_all(target, raws, 8, patience_s=2.0)


async def foreign_pages(target: Target) -> list[int]:
    return await ask_for_refusals(target, PAGES)


async def forbidden_heads(target: Target) -> list[int]:
    return await ask_for_refusals(target, FORBIDDEN)


async def early_refusals(target: Target) -> list[int]:
    """Send bodies of 33 MiB completely before reading the answer."""
    return await ask_for_refusals(target, EARLY)


async def ask_for_refusals(target: Target, wanted: list[tuple[bytes, int]]) -> list[int]:
    """Return the statuses, WRONG for one that is neither the right one nor missing."""
    found = await ask_all(target, [raw for raw, _ in wanted], 2)
    pairs = zip(found, wanted, strict=True)
    return [status if status in (0, right) else WRONG for status, (_, right) in pairs]


ABUSES: dict[str, Abuse] = {
    act.__name__: Abuse(act, floods=act is priority_flood)
    for act in (
        leave_streams, leave_requests, leave_many_choices, malformed_bodies, malformed_heads,
        half_open, trickle, oversized, extreme_numbers, heavy_schemas, distinct_schemas,
        refused_schemas, slow_readers, connects, priority_flood, tiny, same_request_id, pipelines,
        wrong_methods, foreign_pages, forbidden_heads, early_refusals,
    )
}  # fmt: skip
