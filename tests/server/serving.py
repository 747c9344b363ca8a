"""A real API process in front of a fake engine: uvicorn on a loopback port, in a child process."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import Tokenizer

from nanovllm.config import DEMO, load_config
from tests.forks import with_server_packages
from tests.server.api_process import serve
from tests.server.fake_engine import FakeEngine

JSON = {"Content-Type": "application/json"}  # headers for a body that is not given as `json=`


class Api:
    def __init__(self, url: str, engine: FakeEngine, process: BaseProcess, log_path: Path) -> None:
        self.url = url
        self.engine = engine
        self.process = process
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=20)
        self._log_path = log_path
        self.metrics_url = ""  # of the second port, if the recipe asks for it

    def chat(self, text: str = "hello", **more: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=body(text, **more))

    def events(self, text: str = "hello", **more: Any) -> list[Any]:
        """Return the objects of a stream, [DONE] included."""
        response = self.chat(text, stream=True, **more)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        return parsed_events(response.text)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        client = httpx.AsyncClient(trust_env=False, timeout=20)
        options = {"api_key": "x", "max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", http_client=client, **options)

    def log(self) -> str:
        return self._log_path.read_text()


def body(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def parsed_events(text: str) -> list[Any]:
    events = []
    for block in text.split("\n\n")[:-1]:
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def content(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(c["delta"].get("content") or "" for c in choices if c["index"] == index)


@contextlib.contextmanager
def serving(folder: Path, *overrides: str, recipe: str | None = None) -> Iterator[Api]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    engine = FakeEngine(str(folder / "engine.sock"), tokenizer)
    engine.start()
    config = load_config(recipe, overrides)
    sock = socket.create_server(("127.0.0.1", 0))
    metrics = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    log_path = folder / "log"
    socks = [sock, metrics] if config.recipe.server.metrics_port is not None else [sock]
    process = context.Process(target=serve, args=(config, engine.path, socks, theirs, log_path))
    with with_server_packages().starts():
        process.start()
    theirs.close()
    assert ours.poll(60) and ours.recv() == "ready"
    api = Api(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, process, log_path)
    api.metrics_url = f"http://127.0.0.1:{metrics.getsockname()[1]}"
    sock.close()
    metrics.close()
    try:
        yield api
    finally:
        api.http.close()
        process.terminate()
        process.join(20)
        assert process.exitcode == 0


def eventually(check: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
