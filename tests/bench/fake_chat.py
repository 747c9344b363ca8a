"""Tiny chat server with fixed timing and token counts: `python fake_chat.py PORT [WORD ...]`.

A prompt has 5 tokens, 4 per message and 2 per word (1 with the word "short"). Messages at the start
of a prompt are cached if an earlier prompt began with them. With the word "ill", the server refuses
every fifth request and drops every seventh in the middle. With "counts" it supports
continuous_usage_stats. Any other word is its API key. Its streams are difficult but valid: a
comment first, an empty chunk, reasoning, and events split over two writes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import takewhile

FIRST_S = 0.03  # from request to first token
GAP_S = 0.004  # between tokens


class FakeChat:
    version = ""

    word_tokens = 2

    def __init__(self, is_ill: bool, api_key: str | None, counts: bool = False) -> None:
        self.is_ill = is_ill
        self.counts = counts
        self.api_key = api_key
        self.num_requests = 0
        self.prompts: list[list[dict]] = []

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await read_head(reader):
            method, path = head.split()[:2]
            length = 0
            for line in head.lower().split("\r\n"):
                if line.startswith("content-length:"):
                    length = int(line.split(":")[1])
            body = json.loads(await reader.readexactly(length)) if length else {}
            if path == "/health":
                reply(writer, 200, {})
            elif self.api_key and f"bearer {self.api_key}" not in head.lower():
                reply(writer, 401, {"error": {"message": "wrong key"}})
            elif (method, path) == ("GET", "/v1/models"):
                reply(writer, 200, {"data": [self.card()]})
            elif (method, path) == ("GET", "/version"):
                reply(writer, 200 if self.version else 404, {"version": self.version})
            elif (method, path) == ("GET", "/metrics"):
                text = "# a comment\nvllm:num_preemptions_total 0\n"
                labels = '{engine="0",mode="FULL",phase="decode"}'
                text += f"nanovllm:graph_steps_total{labels} {self.num_requests}\n"
                for part, count in (("drafts", 2), ("draft_tokens", 6), ("accepted_tokens", 3)):
                    text += f"vllm:spec_decode_num_{part}_total {count * self.num_requests}\n"
                by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                for at, count in enumerate((2, 1, 0)):
                    text += f'{by_position}{{position="{at}"}} {count * self.num_requests}\n'
                text += 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
                reply(writer, 200, text)
            elif path.startswith("/debug/experts?engine="):  # two engines
                each = '{"layer":3,"tokens":[4,1,3,0]}\n', '{"layer":3,"tokens":[5,1,0,4]}\n'
                at = int(path.partition("=")[2])
                reply(writer, 200, each[at]) if at < len(each) else reply(writer, 400, {})
            else:
                await self.chat(body, writer)

    def card(self) -> dict:
        return {"id": "fake", "max_model_len": 4096}

    def prompt_tokens(self, messages: list[dict]) -> int:
        return 5 + sum(4 + self.word_tokens * len(one["content"].split()) for one in messages)

    def cached_tokens(self, messages: list[dict]) -> int:
        """Return the tokens of the messages at the start that an earlier prompt begins with."""
        common = 0
        for earlier in self.prompts:
            pairs = zip(messages, earlier, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            common = max(common, same)
        return self.prompt_tokens(messages[:common]) - 5 if common else 0

    async def chat(self, body: dict, writer: asyncio.StreamWriter) -> None:
        messages = body["messages"]
        usage = {
            "prompt_tokens": self.prompt_tokens(messages),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens(messages)},
        }
        if not body.get("stream"):
            return reply(writer, 200, {"choices": [], "usage": usage})
        self.prompts.append(messages)
        self.num_requests += 1
        if self.is_ill and self.num_requests % 5 == 0:
            return reply(writer, 503, {"error": {"message": "the queue is full"}})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        if self.counts and body["stream_options"].get("continuous_usage_stats"):
            await self.counted(body["max_tokens"], usage, writer)
        else:
            await self.stream(body["max_tokens"], usage, writer)
        chunk(writer, b"data: [DONE]\n\n")
        return writer.write(b"0\r\n\r\n")

    async def stream(self, num_tokens: int, usage: dict, writer: asyncio.StreamWriter) -> None:
        chunk(writer, b": keep-alive\n\n")
        event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(FIRST_S)
        for at in range(num_tokens):
            if at:
                await asyncio.sleep(GAP_S)
            if self.is_ill and self.num_requests % 7 == 0:
                return writer.close()
            delta = {"reasoning": "hm"} if at == 0 else {"content": "a\n\nb"}
            event(writer, {"choices": [{"index": 0, "delta": delta}]})
        event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        return event(writer, {"choices": [], "usage": usage})

    async def counted(self, num_tokens: int, usage: dict, writer: asyncio.StreamWriter) -> None:
        """Stream one token, then three per chunk. Each chunk has the usage so far."""
        await asyncio.sleep(FIRST_S)
        for count in (*range(1, num_tokens, 3), num_tokens):
            sofar = usage | {"completion_tokens": count}
            event(writer, {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": sofar})
            await asyncio.sleep(GAP_S)
        event(writer, {"choices": [], "usage": usage})


async def read_head(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return ""


def reply(writer: asyncio.StreamWriter, status: int, body: object) -> None:
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    writer.write(
        f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    )


def event(writer: asyncio.StreamWriter, body: dict) -> None:
    data = b"data: " + json.dumps({"id": "chatcmpl-1", **body}).encode() + b"\n\n"
    chunk(writer, data[:11])
    chunk(writer, data[11:])


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def main(port: int, chat: FakeChat) -> None:
    server = await asyncio.start_server(chat.connection, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    words = {"ill", "counts", "short"}
    rest = {*sys.argv[2:]}
    (key,) = rest - words or [None]
    chat = FakeChat("ill" in rest, key, "counts" in rest)
    chat.word_tokens = 1 if "short" in rest else 2
    asyncio.run(main(int(sys.argv[1]), chat))
