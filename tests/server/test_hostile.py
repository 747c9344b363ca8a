"""Each abuse of the hostile load, once, against a real API process."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from recipes.demo.hostile import ABUSES, first_token_s, waits_s
from tests.server.serving import eventually


@pytest.mark.parametrize("name", ABUSES)
def test_others_are_served_after(api, name) -> None:
    act, _ = ABUSES[name]

    async def once() -> None:
        with contextlib.suppress(OSError, TimeoutError):
            address = ("127.0.0.1", httpx.URL(api.url).port or 0)
            await asyncio.wait_for(act(address, 0), 0.3)

    asyncio.run(once())
    assert 0 < first_token_s(api.http) < 2
    eventually(lambda: api.engine.running == {})
    assert "Traceback" not in api.log()


def test_waits_are_measured_until_the_time_is_over(api) -> None:
    found = waits_s(api.url, 0.2)
    assert len(found) >= 3 and max(found) < 1
