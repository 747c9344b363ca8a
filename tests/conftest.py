"""`pytest -m quick`, Hypothesis profiles, one thread per process of tests, and one SSL context.

`--hypothesis-profile=quick` runs few examples and few random engines, `thorough` four times as many
as usual.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import ssl
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.quick import LONG, is_quick

TESTS = Path(__file__).parent

# Torch reads it when it is imported, here and in the processes that tests start. Models of tests
# are tiny, so more threads only wait for each other, while another worker of xdist has the core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# HTTP clients of tests share one context. Otherwise each of them, and each `httpx.get`, reads all
# certificates, which takes 50 ms of CPU time, although tests use no TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Examples are the same each time, so that a failure belongs to the commit. There is no deadline,
# since the machine may be shared. `--hypothesis-profile=random` runs other examples each time.
slow = [HealthCheck.too_slow]
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=slow)
settings.register_profile("random", settings.get_profile("fixed"), derandomize=False)
settings.register_profile("quick", settings.get_profile("fixed"), max_examples=5)
settings.register_profile("thorough", settings.get_profile("fixed"), max_examples=400)
settings.load_profile("fixed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a quick test if the marker is `quick`, so they are not imported."""
    if config.option.markexpr != "quick" or collection_path.suffix != ".py":
        return None
    return not is_quick(str(collection_path.relative_to(TESTS))) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt all modules and tests from garbage collection.

    A full collection would scan them for a second. Each test of transfers runs one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise packages report them as leaks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Exempt what a file of tests leaves, for example compiled functions, from collection too."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first, so that workers finish at about the same time."""
    items.sort(key=lambda item: str(item.path.relative_to(TESTS)) not in LONG)
    for item in items:
        name = getattr(item, "originalname", item.name)
        if is_quick(str(item.path.relative_to(TESTS)), name):
            item.add_marker(pytest.mark.quick)
