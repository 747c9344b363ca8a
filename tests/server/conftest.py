"""One API process for all tests that do not change its settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import Api, serving


@pytest.fixture(scope="package")
def shared_api(tmp_path_factory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("api"), "server.max_body_bytes=200000") as api:
        yield api


@pytest.fixture
def api(shared_api) -> Api:
    shared_api.engine.reset()
    return shared_api
