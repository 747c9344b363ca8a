"""Tests that need a CUDA device. Without one, no test of this folder is collected."""

from __future__ import annotations

import pytest
import torch
from nanovllm_kernels.compile_cache import use_folder

from nanovllm.config import cache_dir

collect_ignore_glob = [] if torch.cuda.is_available() else ["*"]


@pytest.fixture(scope="session", autouse=True)
def compile_once() -> None:
    use_folder(cache_dir())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if collect_ignore_glob:
        terminalreporter.write_line("tests/gpu: no CUDA device, not collected", yellow=True)
