"""One API process and one whole server for all tests that do not change their settings."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.demo_server import Server, start
from tests.server.serving import Api, serving


@pytest.fixture(scope="package")
def shared_api(tmp_path_factory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("api"), "server.max_body_bytes=200000") as api:
        yield api


@pytest.fixture
def api(shared_api) -> Api:
    shared_api.engine.reset()
    return shared_api


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    server = start("--set", "schedule.slots=32", "--set", "cache.cpu_gib=0.5")
    yield server
    assert server.stop() == 0


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()
