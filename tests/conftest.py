"""`pytest -m quick`, and Hypothesis profiles: `--hypothesis-profile=quick` takes few examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.quick import LONG, is_quick

TESTS = Path(__file__).parent

# The same examples each time, so that a failure is the commit's; how long one takes says nothing on
# a machine that others use as well. `--hypothesis-profile=random` takes other examples each time.
slow = [HealthCheck.too_slow]
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=slow)
settings.register_profile("random", settings.get_profile("fixed"), derandomize=False)
settings.register_profile("quick", settings.get_profile("fixed"), max_examples=5)
settings.load_profile("fixed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick` alone, files without a quick test are not even imported."""
    if config.option.markexpr != "quick" or collection_path.suffix != ".py":
        return None
    return not is_quick(str(collection_path.relative_to(TESTS))) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first, so that no worker begins one when the others are done."""
    items.sort(key=lambda item: str(item.path.relative_to(TESTS)) not in LONG)
    for item in items:
        name = getattr(item, "originalname", item.name)
        if is_quick(str(item.path.relative_to(TESTS)), name):
            item.add_marker(pytest.mark.quick)
