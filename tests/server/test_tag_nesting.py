"""Deeply nested values are written in full or refused, and never crash the server."""

from __future__ import annotations

import json

import pytest

from nanovllm.server.errors import ApiError
from tests.server.test_tag import NO_DATE, OVER, allows, matcher


def test_nested_too_deeply() -> None:
    for depth in (30, 300):
        deep = json.loads("[" * depth + "]" * depth)
        assert allows(json.dumps(deep), turn=OVER, structured_outputs={"json": {"const": deep}})
    text = "[" * 100_000 + "]" * 100_000
    with pytest.raises(ApiError, match="must be JSON"):
        matcher(structured_outputs={"json": text})


def test_a_refused_schema_is_a_400_with_its_field() -> None:
    with pytest.raises(ApiError, match="'not'") as refused:
        matcher(structured_outputs={"json": NO_DATE})
    error = refused.value
    assert (error.status, error.code) == (400, "invalid_schema")
    assert error.param == "structured_outputs.json"
