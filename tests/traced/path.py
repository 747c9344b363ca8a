"""The path of one chat request through the server: `python -m tests.traced.path` prints it.

A server of the demo model (one API process, one engine, CPU) runs under a recorder. Warm-up
requests come first, so that lazy imports and caches do not count. Then one streaming request of 24
tokens is recorded: its functions in the order of their first call, and their code lines.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tests.end_to_end.demo_server import Server, start
from tests.test_shape_of_code import code_line_numbers

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"
NUM_WARM = 3
SETTLE_S = 1.0  # after an answer, so that the last bookkeeping of its requests is over


@dataclass(frozen=True)
class Trace:
    """Functions that one process entered, and their code lines as (file below nanovllm/, line)."""

    process: str
    functions: list[str]
    lines: set[tuple[str, int]]

    @property
    def files(self) -> set[str]:
        return {function.partition(":")[0] for function in self.functions}


def ask(server: Server) -> str:
    """Return the text of one streamed answer."""
    body = {
        "messages": [{"role": "user", "content": "What is nanovllm?"}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
    }
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


def traced_request() -> tuple[str, list[Trace]]:
    """Return the answer's text, and the traces of the API process and of the engine."""
    with TemporaryDirectory() as folder:
        window = Path(folder, "window")
        window.write_bytes(b"\0")
        added = {"TRACED_FOLDER": folder, "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"}
        server = start(
            "--set", "server.workers=1", "--device", "cpu", environment=added, is_fork=False
        )
        try:
            for _ in range(NUM_WARM):
                ask(server)
            time.sleep(SETTLE_S)
            set_window(window, b"\1")
            text = ask(server)
            time.sleep(SETTLE_S)
            set_window(window, b"\0")
        finally:
            assert server.stop() == 0, "".join(server.lines)
        records = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        records = [one for one in records if one["process"].startswith("nanovllm-")]
    return text, sorted(map(trace_of, records), key=lambda trace: trace.process)


def set_window(window: Path, value: bytes) -> None:
    """Open or close the window in place: other processes have mapped this file."""
    with open(window, "r+b") as file:
        file.write(value)


def trace_of(record: dict[str, Any]) -> Trace:
    """Add the code lines of the functions: a reader of the path reads each of them whole."""
    names: dict[str, set[str]] = {}
    for function in record["functions"]:
        file, _, name = function.partition(":")
        names.setdefault(file, set()).add(name)
    lines = set()
    for file, entered in names.items():
        text = (ROOT / "nanovllm" / file).read_text()
        spans = function_spans(ast.parse(text))
        read = set().union(*(spans[name] for name in entered if name in spans))
        lines |= {(file, line) for line in read & code_line_numbers(text)}
    return Trace(record["process"], record["functions"], lines)


def function_spans(node: ast.AST, prefix: str = "") -> dict[str, set[int]]:
    """Return the line numbers of each function, by its qualified name."""
    spans: dict[str, set[int]] = {}
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{child.name}"
            spans[name] = {*range(child.lineno, (child.end_lineno or child.lineno) + 1)}
            spans |= function_spans(child, f"{name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            spans |= function_spans(child, f"{prefix}{child.name}.")
        else:
            spans |= function_spans(child, prefix)
    return spans


def totals(traces: list[Trace]) -> tuple[int, int, int]:
    """Return the numbers of files, functions and code lines, each counted once."""
    files = set().union(*(trace.files for trace in traces))
    functions = {function for trace in traces for function in trace.functions}
    lines = set().union(*(trace.lines for trace in traces))
    return len(files), len(functions), len(lines)


def main() -> None:
    text, traces = traced_request()
    for trace in traces:
        sizes = f"{len(trace.functions)} functions, {len(trace.lines)} code lines"
        sys.stdout.write("\n".join(["", f"{trace.process}: {sizes}", *trace.functions, ""]))
    files, functions, lines = totals(traces)
    sys.stdout.write(f"\n{text!r}\n{files} files, {functions} functions, {lines} code lines\n")


if __name__ == "__main__":
    main()
