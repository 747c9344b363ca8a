"""Main function of an API process of tests, in a module that is imported fast."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from pathlib import Path

from nanovllm import log
from nanovllm.config import Config
from nanovllm.server.main import run


def serve(
    config: Config,
    engine_path: str,
    socks: list[socket.socket],
    word: Connection,
    log_path: Path,
) -> None:
    """Serve until SIGTERM, with the log in a file. Send "ready" to `word` first."""
    with log_path.open("w") as file:
        os.dup2(file.fileno(), 1)
    log.setup()
    run(config, [engine_path], 0, socks, lambda: word.send("ready"))
