"""Small servers on GPUs. Each has a time limit and shows its output after a failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from tests.end_to_end.demo_server import Server, start

log = logging.getLogger("tests")  # shown by pytest --log-cli-level=INFO
START_S = 90.0  # mostly the first compilation of kernels
ANSWER_S = 30.0
TOLD = 400  # lines of a failed server's output
SMALL = ("--device", "cuda", "--set", "cache.pages=400", "--set", "schedule.slots=12",
         "--set", "cache.memory_fraction=0.97",  # others may use much of the device
         "--set", "kernels.mixed_graph_tokens=128")  # fmt: skip


@contextmanager
def serving(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """Start a server. An error inside the block shows its output and the stacks of its threads."""
    began = time.monotonic()
    server = start(*arguments, limit_s=START_S, environment=environment, is_fork=False)
    log.info("%.1f s to start %s", time.monotonic() - began, " ".join(arguments))
    try:
        yield server
    except BaseException as error:
        server.abort()
        server.process.wait(10)
        error.add_note("".join(server.lines[-TOLD:]))
        raise
    finally:
        server.process.kill()
        log.info("%.1f s in all", time.monotonic() - began)


def choices(server: Server, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the choices of questions that are sent at the same time."""
    url = f"{server.url}/v1/chat/completions"
    with httpx.Client(timeout=ANSWER_S) as client, ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: client.post(url, json=question), questions))
    assert [answer.status_code for answer in answers] == [200] * len(answers), answers[-1].text
    return [answer.json()["choices"][0] for answer in answers]


def texts(questions: list[dict[str, Any]], *arguments: str) -> list[str]:
    with serving(*arguments) as server:
        return [choice["message"]["content"] for choice in choices(server, questions)]
