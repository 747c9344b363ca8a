"""`pytest -m quick`, and a Hypothesis profile: `pytest --hypothesis-profile=quick`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.quick import is_quick

TESTS = Path(__file__).parent

settings.register_profile("quick", max_examples=5)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick` alone, files without a quick test are not even imported."""
    if config.option.markexpr != "quick" or collection_path.suffix != ".py":
        return None
    return not is_quick(str(collection_path.relative_to(TESTS))) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = getattr(item, "originalname", item.name)
        if is_quick(str(item.path.relative_to(TESTS)), name):
            item.add_marker(pytest.mark.quick)
