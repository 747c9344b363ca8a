"""results/profiled.py on the demo model: operations of the engine's steps."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.forks import with_server_packages

ROOT = Path(__file__).parents[2]


def test_a_profile_tells_what_steps_are_made_of(tmp_path: Path) -> None:
    file = tmp_path / "profiles" / "demo.txt"
    command = "bench --offline recipes/demo.yaml --workload bs1-256 --warmup 0 --results-dir"
    line = [sys.executable, "results/profiled.py", str(file), "20,40", "2", *command.split()]
    code = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = with_server_packages().start(
        [*line, str(tmp_path)], timeout=300, cwd=ROOT, env=os.environ | code
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = file.read_text()
    heads = r"from step (\d+) on:\n2 steps of \d+\.\d us, \d+\.\d launches, \d+\.\d us idle\n"
    assert re.findall(heads, said) == ["20", "40"]
    products = 8 * 4 + 1  # qkv, out, gate and up, down in each layer; the head
    assert re.search(rf" us +{products}\.0 x +\d+\.\d\d us  aten::linear\n", said), said
    assert "in order: start, duration\n     0.00 " in said
