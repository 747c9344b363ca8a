"""Processes import every module before they are ready.

A late import in the engine's first median delayed the first request by 60 ms.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench.test_online import free_port
from tests.end_to_end.test_operation import ROOT, answers
from tests.server.serving import eventually

COMMAND = [sys.executable, "-m", "tests.end_to_end.late_imports"]
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True},
    {"temperature": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2},
    {"logprobs": True, "top_logprobs": 3},
    {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.2},
    {"logit_bias": {"5": 3}, "bad_words": ["x"], "stop": ["a"], "min_tokens": 2},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[a-z]{3}"}},
    {"structured_outputs": {"json": {"type": "string", "format": "email"}}},
)


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        ("recipes/demo.yaml", KINDS + GRAMMARS),
        ("paper", KINDS),  # this engine imports xgrammar, and torch with it, for the first grammar
    ],
)
def test_nothing_is_imported_while_it_serves(
    recipe: str, kinds: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    port = free_port()
    command = [*COMMAND, str(tmp_path), "serve", recipe, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        eventually(lambda: answers(port), 90)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for more in kinds:
                body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **more}
                answer = client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
            for path in ("/metrics", "/v1/models", "/", "/debug/steps"):
                assert client.get(path).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
    found = {
        name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("engine", "api")
    }
    assert found == {"engine": [], "api": []}
