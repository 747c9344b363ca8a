"""One complete server for all tests that do not change its settings."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.end_to_end.demo_server import Server, start


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    server = start("--set", "schedule.slots=32", "--set", "cache.cpu_gib=0.5")
    yield server
    assert server.stop() == 0


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()
