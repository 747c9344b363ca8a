"""results/loading.py: a random checkpoint is written, and its loading is recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.forks import with_server_packages

ROOT = Path(__file__).parents[2]


def test_the_loading_of_a_random_demo(tmp_path: Path) -> None:
    path, folder = tmp_path / "record.json", tmp_path / "checkpoint"
    command = [sys.executable, "results/loading.py", str(folder), "demo", "--json", str(path)]
    command += ["--set", "device=cpu", "--set", "model.num_layers=1"]
    done = with_server_packages().start(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (weights,) = folder.glob("*.safetensors")
    record = json.loads(path.read_text())
    assert record["workload"] == {"name": "loading", "files": 1, "ranks": 1}
    found = record["metrics"]
    assert found.pop("file_gb") == weights.stat().st_size / 1e9
    reads = [f"{how}_{state}" for how in ("plain", "load") for state in ("cold", "warm")]
    assert [*found] == [f"{read}_{unit}" for read in reads for unit in ("s", "gb_per_s")]
    assert all(value > 0 for value in found.values())
