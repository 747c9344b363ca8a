"""Tests in Triton's interpreter, run in a separate process.

TRITON_INTERPRET must be set before triton is imported, and other tests may have imported it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import triton
from nanovllm_kernels.interpreter import patch_once

from tests.forks import Forks

INTERPRETED: bool = triton.knobs.runtime.interpret


def in_interpreter(test: Callable) -> Callable:
    """Mark a test that is collected in the child process only."""
    test.__test__ = INTERPRETED
    return test


def in_parent(test: Callable) -> Callable:
    """Mark a test that is not collected in the child process."""
    test.__test__ = not INTERPRETED
    return test


@functools.cache
def forks() -> Forks:
    """Return forks without a GPU, with the imports of most of these tests."""
    packages = "pytest", "hypothesis.strategies", "torch._dynamo", "triton.language", "transformers"
    models = "transformers.models.auto.modeling_auto", "transformers.modeling_utils"
    return Forks(*packages, *models, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


def passes(file: str, count: int, *options: str) -> None:
    """Assert that `count` tests of a file pass in a child process and none fails."""
    quickly = "-p", "no:cacheprovider", "--disable-plugin-autoload"
    done = forks().run(f"{__name__}:run_tests", *quickly, *options, file)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]  # "3 passed, 2 warnings in 1.2s"
    assert last.replace(",", " in").split(" in ")[0] == f"{count} passed", last


def run_tests(*arguments: str) -> int:
    return pytest.main([*arguments])


if INTERPRETED:
    patch_once()
