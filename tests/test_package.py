"""nanovllm/__init__.py: a message that the package is a server without a Python API."""

from __future__ import annotations

import pytest

import nanovllm


@pytest.mark.parametrize("name", ["LLM", "SamplingParams", "AsyncLLM", "AsyncLLMEngine"])
def test_classes_of_other_engines_are_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from nanovllm import {name}")
    told = str(caught.value)
    assert told.startswith(
        f"nanovllm has no {name}: it is a server, so start `nanovllm serve MODEL`"
    )
    assert "nano-vllm" in told and "\n" not in told


def test_other_names_are_missing_as_usual() -> None:
    assert not hasattr(nanovllm, "nope") and nanovllm.__version__
    with pytest.raises(ImportError, match="cannot import name 'nope' from 'nanovllm'"):
        exec("from nanovllm import nope")
