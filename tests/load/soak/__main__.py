"""Soak test: well-behaved clients and abusers at once, then a check that all resources are freed.

    python -m tests.load.soak --minutes 30 --results-dir results

Starts the demo on the CPU. Fails if an answer differs from the one given without load, or if a good
request is refused although the queue has room. Fails, too, if memory, descriptors, threads,
processes, pages, tasks or grammar matchers do not return to their earlier values.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from nanovllm.bench import record, store
from nanovllm.bench.started import stop
from tests.load.soak.run import Soak

log = logging.getLogger("soak")
START_S = 120.0
# A small cache, so that pages run out; a short queue, so that floods fill it.
SETTINGS = {"cache.cpu_gib": 0.125, "schedule.max_queue": 128}
FAULT = re.compile(r"^\S+ (error|critical) .*|^Traceback.*|^\w+(Error|Exception)\b.*", re.MULTILINE)
MOST_FAULTS = 20


@contextmanager
def demo_server() -> Iterator[tuple[str, int, Path]]:
    """Yield address, process id and log. Raise RuntimeError if the server does not start."""
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", "--device", "cpu"]
    with tempfile.NamedTemporaryFile() as output:
        server = subprocess.Popen([*command, *settings], stdout=output, stderr=subprocess.STDOUT)
        try:
            yield announced(server, Path(output.name)), server.pid, Path(output.name)
        finally:
            stop(server)


def announced(server: subprocess.Popen[bytes], output: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"is served at (http://\S+)\n", said(output)):
            return found.group(1)
        time.sleep(0.1)
    raise RuntimeError(f"the server did not come up: {said(output)[-2000:]}")


def said(output: Path) -> str:
    return output.read_text(errors="replace")


def faults(output: Path) -> list[str]:
    """Return the log's lines about errors of the server, as problems."""
    found = [match.group(0)[:300] for match in FAULT.finditer(said(output))]
    return [f"the log says: {line}" for line in found[:MOST_FAULTS]]


def record_of(soak: Soak, started_at: str, args: argparse.Namespace) -> record.Record:
    made = record.of_this_machine(
        kind="demo",
        started_at=started_at,
        duration_s=round(soak.seconds, 1),
        recipe={"model": "demo"},
        changed={} if args.url else dict(SETTINGS),
        workload={"name": "soak", "minutes": args.minutes, "concurrency": args.clients}
        | soak.told(),
        metrics=soak.metrics(),
        notes="; ".join(soak.problems)[:4000],
    )
    return msgspec.structs.replace(made, argv=["python", "-m", "tests.load.soak", *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8, help="well-behaved ones")
    parser.add_argument("--url", help="of a running server: only its metrics are looked at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--results-dir", type=Path, help="write the record there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    if args.url:
        soak = Soak(args.url.removesuffix("/v1"), None, args.clients, args.seed)
        asyncio.run(soak.run(60 * args.minutes))
    else:
        with demo_server() as (url, pid, output):
            soak = Soak(url, pid, args.clients, args.seed)
            asyncio.run(soak.run(60 * args.minutes))
            soak.problems += faults(output)
    for problem in soak.problems:
        log.info("NOT RIGHT: %s", problem)
    log.info("%s", "failed" if soak.problems else "everything returned to where it was")
    made = record_of(soak, started_at, args)
    if args.out is not None:
        record.write_to(args.out, made)
    if args.results_dir is not None:
        log.info("record: %s", store.write(made, args.results_dir))
    sys.exit(bool(soak.problems))


if __name__ == "__main__":
    main()
