"""results/turns.py: its prompts and its summary."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.forks import with_server_packages

ROOT = Path(__file__).parents[2]


def test_turns_of_the_demo(tmp_path: Path) -> None:
    """A second turn finds the first prompt cached. Its repetition finds all but one token."""
    path = tmp_path / "record.json"
    asked = ["demo", "--set", "cache.page_tokens=16", "--tokens", "100", "--answer", "4"]
    command = [sys.executable, "results/turns.py", *asked, "--rounds", "1", "--json", str(path)]
    done = with_server_packages().start(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert (record["workload"]["name"], record["changed"]) == ("turns", {"cache.page_tokens": 16})
    found = record["metrics"]
    assert found["first_prompt_tokens"] == found["unrelated_prompt_tokens"] == 100
    assert (found["first_cached_tokens"], found["unrelated_cached_tokens"]) == (0, 0)
    assert found["second_prompt_tokens"] > 110 and found["second_cached_tokens"] in (96, 112)
    assert found["again_cached_tokens"] == found["again_prompt_tokens"] - 1
    assert found["second_to_first"] == found["second_ttft_ms"] / found["first_ttft_ms"] > 0
    assert "100 tokens cached" in done.stdout and "second turn to first: " in done.stdout


def test_no_sweep_sends_the_prompts_of_its_widest_load_one_by_one() -> None:
    """By default, bench sends eight prompts per stream."""
    lines = (ROOT / "results" / "measure.sh").read_text().splitlines()
    sweeps = [line for line in lines if "--sweep" in line]
    assert len(sweeps) == 3 and [line for line in sweeps if "--num-prompts" in line] == []
