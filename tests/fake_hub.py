"""Stand-in for the Hugging Face Hub on a loopback port, for finding and downloading models.

A repository is a dict of file names to bytes. Files of `gated` repositories are refused, as on the
Hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # sizes to report in place of the real ones
    gated: set[str] = field(default_factory=set)
    status: int = 200  # status of all responses if it is not 200
    asked: list[str] = field(default_factory=list)  # requested paths, in order


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append(path)
        if self.hub.status != 200:
            self.send(self.hub.status, b"")
            return
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        model, rest = "/".join(parts[:2]), parts[2:]
        files = self.hub.repositories.get(model)
        if files is None:
            self.send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif is_api and rest[:1] == ["tree"]:
            self.send_json([{"type": "file", **self.described(files, name)} for name in files])
        elif is_api:
            siblings = [{"rfilename": name, **self.described(files, name)} for name in files]
            info = {"id": model, "modelId": model, "sha": COMMIT, "siblings": siblings}
            self.send_json({**info, "gated": "manual" if model in self.hub.gated else False})
        elif model in self.hub.gated:
            self.send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif (name := "/".join(rest[2:])) in files:
            tag = self.described(files, name)["oid"]
            self.send(200, files[name], {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
        else:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    def described(self, files: dict[str, bytes], name: str) -> dict[str, Any]:
        digest = hashlib.sha1(files[name]).hexdigest()
        size = self.hub.sizes.get(name, len(files[name]))
        return {"path": name, "size": size, "oid": digest, "blobId": digest}

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
