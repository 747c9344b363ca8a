"""A lost rank ends `bench --offline`, like a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.forks import with_server_packages

ENDED_S = 60.0  # seconds; detection takes about 4


def children(pid: int) -> dict[str, int]:
    """Return the process ids of its children, by name."""
    asked = ["ps", "-o", "pid=,comm=", "--ppid", str(pid)]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: int(number) for number, name in map(str.split, lines)}


def test_a_rank_that_hangs_ends_the_measurement(tmp_path: Path) -> None:
    """Rank 0 would otherwise wait for it without limit on a GPU."""
    command = [sys.executable, "-m", "nanovllm", "bench", "--offline", "--tp", "2"]
    command += ["--device", "cpu", "--workload", "bs64", "--warmup", "0"]
    with with_server_packages().popen(
        [*command, "--results-dir", str(tmp_path)], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as bench:
        assert bench.stderr is not None and bench.stdout is not None
        said = b""
        while b"bs64" not in said:  # the progress bar of the measurement
            more = os.read(bench.stderr.fileno(), 4096)
            assert more, said.decode()
            said += more
        os.kill(children(bench.pid)["nanovllm-rank1"], signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            _, more = bench.communicate(timeout=ENDED_S)
        finally:
            bench.kill()
    said += more
    assert b"error: nanovllm-rank1 has been silent for 3 s\n" in said, said.decode()
    assert bench.returncode == 1 and time.monotonic() - stopped < ENDED_S
    assert not list(tmp_path.rglob("*.jsonl"))
