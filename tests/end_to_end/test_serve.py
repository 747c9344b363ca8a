"""`nanovllm serve`, started as a user starts it, driven by the official openai client."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from nanovllm.config import DEMO
from tests.end_to_end.demo_server import Server
from tests.forks import with_server_packages
from tests.server.serving import eventually

QUESTION = [{"role": "user", "content": "What is nanovllm, and how do I serve a recipe with it?"}]


def refuse(*arguments: str) -> str:
    """Start a server that must refuse with exit code 2, and return its only line."""
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", *arguments]
    run = with_server_packages().start(command, timeout=120)
    assert run.returncode == 2, run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    (line,) = run.stderr.strip().splitlines()
    return line


def test_the_printed_curl_line_works(server: Server) -> None:
    body = '{"messages": [{"role": "user", "content": "What is nanovllm?"}], "max_tokens": 8}'
    header = ["-H", "Content-Type: application/json"]
    command = ["curl", "-s", f"{server.url}/v1/chat/completions", *header, "-d", body]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert '"finish_reason"' in run.stdout and '"role":"assistant"' in run.stdout


def test_streaming_and_not_give_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=30)
    parts = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in parts:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens <= 30
    assert usage.prompt_tokens_details.cached_tokens > 0  # the first request's pages
    assert client.models.list().data[0].id == "demo"


def test_32_concurrent_clients_get_what_they_get_alone(server: Server) -> None:
    prompts = [f"Repeat after me: {i * 37} blue tigers run" for i in range(32)]

    async def ask(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> str:
        messages = [{"role": "user", "content": prompt}]
        made = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=16, temperature=0, stream=stream
        )
        if not stream:
            return (await made).choices[0].message.content or ""
        return "".join([c.choices[0].delta.content or "" async for c in await made])

    async def everyone() -> tuple[list[str], list[str]]:
        async with server.async_client() as client:
            alone = [await ask(client, prompt, False) for prompt in prompts]
            asked = [ask(client, p, i % 2 == 0) for i, p in enumerate(prompts)]
            return alone, list(await asyncio.gather(*asked))

    alone, together = asyncio.run(everyone())
    assert together == alone
    assert len(set(alone)) > 1


def test_a_disconnect_returns_every_page(server: Server) -> None:
    async def leave() -> None:
        body = {"messages": QUESTION, "stream": True, "max_tokens": 3000, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=60) as client:
            for _ in range(3):
                url = f"{server.url}/v1/chat/completions"
                async with client.stream("POST", url, json=body) as response:
                    async for _ in response.aiter_lines():
                        break

    asyncio.run(leave())
    held = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running")
    eventually(lambda: not any(map(server.metric, held)), 20)


def test_bad_requests_leave_the_server_alone(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=3)
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.chat.completions.create(model="nope", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "long " * 20000}]
        )
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_refusals_are_one_line(tmp_path: Path) -> None:
    assert refuse("--set", "cache.page_token=4") == (
        "error: unknown key cache.page_token; did you mean cache.page_tokens?"
    )
    assert refuse("--set", "schedule.slots=0") == (
        "error: schedule.slots is 0; it must be between 1 and 4096"
    )
    assert "nowhere.yaml" in refuse("nowhere.yaml")
    copy = tmp_path / "broken"
    shutil.copytree(DEMO, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    assert "model.safetensors" in refuse("--set", f"model={copy}")
    (copy / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert "GPT2LMHeadModel" in refuse("--set", f"model={copy}")
