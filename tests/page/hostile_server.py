"""Server with the real page's files and hostile text in all of its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nanovllm.server.page_files import FOLDER, HEADERS, KINDS

SCRIPT = "<script>window.caught = 1</script><img src=x onerror='window.caught = 2'>"
BIDI = "user\u202etxt.exe\u2066 \u200f\u0000\u2028"
LONG = "W" * 20_000
EVIL = f"{SCRIPT}{BIDI}{LONG}"


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


def logprob(text: str) -> dict[str, Any]:
    top = {"token": EVIL[:200], "logprob": -3.0, "bytes": []}
    return {"token": text, "logprob": -0.7, "bytes": [], "top_logprobs": [top]}


class Hostile(BaseHTTPRequestHandler):
    """Request handler that puts hostile text into each text field of each answer."""

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = "index.html" if path == "/" else path.rpartition("/")[2]
        if path in ("/", f"/page/{name}"):
            file = FOLDER / name
            self._send(200, KINDS[file.suffix].decode(), file.read_bytes())
        elif path == "/v1/models":
            self._send_json({"data": [{"id": EVIL, "max_model_len": 100}]})
        elif path == "/metrics":
            line = f'vllm:num_requests_running{{model_name="{SCRIPT}",engine="0"}} 3\n'
            mode = f'nanovllm:graph_steps_total{{mode="{SCRIPT}",phase="{BIDI[:6]}"}} 3\n'
            self._send(200, "text/plain", (line + mode).encode())
        elif path == "/debug/steps":
            self._send_json(steps())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["messages"][-1]["content"] == "fail":
            error = {"message": EVIL, "code": SCRIPT}
            self._send(418, "application/json", json.dumps({"error": error}).encode())
            return
        call = {"index": 0, "id": SCRIPT, "function": {"name": EVIL, "arguments": EVIL}}
        parts = [
            chunk({"reasoning": EVIL}),
            chunk(
                {"content": EVIL}, logprobs={"content": [logprob(EVIL)]} if "n" in body else None
            ),
            chunk({"content": f"\n```{EVIL}\n{SCRIPT}\n```\n**{SCRIPT}** `{SCRIPT}`"}),
            chunk({"tool_calls": [call]}),
            chunk({}, finish=SCRIPT),
            b"data: [DONE]\n\n",
        ]
        self._send(200, "text/event-stream", b"".join(parts))

    def _send_json(self, body: object) -> None:
        self._send(200, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS:
            self.send_header(name.decode(), value.decode())
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def steps() -> dict[str, Any]:
    """Return steps with hostile modes and reasons."""
    step = {
        "step": 1, "begun_s": 1.0, "ended_s": 1.1, "host_s": 0.0, "device_s": 0.0, "bubble_s": 0.0,
        "mode": SCRIPT, "slots": {"0": 5}, "decodes": [0], "rows": 1, "drafted": 0, "accepted": 0,
        "generated": 1, "masked": 0, "chunks": [[0, 4]], "preempted": 0, "budget": 9,
        "admitted": [{"slot": 0, "request": 5, "prompt": 4, "tokens": 4, "cached": 0, "came_s": 1}],
        "finished": [[5, SCRIPT]], "running": 1, "waiting": 0, "free": 5, "cached": 1,
    }  # fmt: skip
    return {
        "engine": 0, "engines": 1, "num_slots": 4, "num_pages": 10, "now_s": 1.4, "oldest": 1,
        "newest": 1, "steps": [step], "slots": {"0": 5}, "queue": [], "waiting": 0, "free": 5,
        "cached": 1,
    }  # fmt: skip


@contextmanager
def hostile() -> Iterator[str]:
    """Start the server and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
