"""No test of transfers may leave a thread or a socket of its engines to the tests after it."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator

import pytest

from tests.kv.disk.stores import eventually


def transfer_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("transfer")}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test after which its threads of transfers go on, or that has left a socket open."""
    earlier = transfer_threads()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        eventually(lambda: transfer_threads() <= earlier)
        gc.collect()
    unclosed = [str(one.message) for one in caught if one.category is ResourceWarning]
    assert not unclosed, unclosed
