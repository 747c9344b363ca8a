"""Pages of other origins: an empty document under any host name, for scripts to run in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAMES = "*.test"  # the browser resolves all of them to this machine
OPTIONS = (f"--host-resolver-rules=MAP {NAMES} 127.0.0.1", "--no-proxy-server")


class Empty(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        body = b"<!doctype html><title>another page</title>"
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def other_pages() -> Iterator[int]:
    """Serve the pages and yield the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
