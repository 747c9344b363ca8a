"""The cost of the page for streams: gaps between tokens, with the page closed and open.

    python results/watching.py [--rounds N] [--json PATH]

A paper engine (steps at a fixed rate, no model) serves streams. It is measured with the page
closed, with a thread that sends the page's polls, and, if Chromium is installed, with the page
open in it. The browser runs at a low priority, because it shares the cores with the server here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import httpx

from nanovllm.bench.record import of_this_machine
from nanovllm.bench.started import started
from nanovllm.bench.store import put

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

RATE, TOKENS = 50, 200  # tokens of each stream: in a second, and in all
POLL_S = 0.25  # between two polls of steps; every fourth poll also reads metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = datetime.now(UTC)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    flags = ["--port", str(port), "--set", f"paper.tokens_per_s={RATE}"]
    line = [sys.executable, "-m", "nanovllm", "serve", "paper", *flags]
    gaps_ms: dict[str, list[float]] = {}
    with started(line, url):
        asyncio.run(gaps_p99_ms(url, options.streams))  # warm
        for _ in range(options.rounds):
            for name, watcher in {"alone": alone, "polled": polled, "page": page}.items():
                with watcher(url) as is_there:
                    if is_there:
                        p99 = asyncio.run(gaps_p99_ms(url, options.streams))
                        gaps_ms.setdefault(name, []).append(p99)
                        click.echo(f"{name}: p99 {p99:.2f} ms")
    metrics = {f"{name}_p99_ms": statistics.median(each) for name, each in gaps_ms.items()}
    click.echo(", ".join(f"{name} {value:.2f}" for name, value in metrics.items()))
    if options.json is not None:
        record = of_this_machine(
            kind="page",
            started_at=began.isoformat(timespec="seconds"),
            duration_s=(datetime.now(UTC) - began).total_seconds(),
            recipe={"model": "paper"},
            changed={"tokens-per-s": RATE},
            workload={"name": "watching", "streams": options.streams, "rounds": options.rounds},
            metrics=metrics,
        )
        put(record, options.json)


async def gaps_p99_ms(url: str, num_streams: int) -> float:
    gaps: list[float] = []

    async def stream(client: httpx.AsyncClient, nth: int) -> None:
        body = {
            "messages": [{"role": "user", "content": str(nth)}],
            "max_tokens": TOKENS, "stream": True,
        }  # fmt: skip
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            last = None
            async for _ in answer.aiter_bytes():
                now = time.perf_counter()
                gaps.extend([] if last is None else [now - last])
                last = now

    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(stream(client, nth) for nth in range(num_streams)))
    return 1e3 * statistics.quantiles(gaps, n=100)[98]


@contextmanager
def alone(url: str) -> Iterator[bool]:
    yield True


@contextmanager
def polled(url: str) -> Iterator[bool]:
    stop = threading.Event()

    def poll(client: httpx.Client) -> None:
        last_step, times = 0, 0
        while not stop.wait(POLL_S):
            steps = client.get(f"/debug/steps?since={last_step}").json()["steps"]
            last_step = steps[-1]["step"] if steps else last_step
            times += 1
            if times % 4 == 0:
                client.get("/metrics")

    with httpx.Client(base_url=url) as client:
        thread = threading.Thread(target=poll, args=(client,))
        thread.start()
        yield True
        stop.set()
        thread.join()


@contextmanager
def page(url: str) -> Iterator[bool]:
    browser = browser_of()
    if browser is None:
        yield False
        return
    driver = browser()
    driver.get(f"{url}/#watch")
    time.sleep(1)
    yield True
    driver.quit()


def browser_of() -> Callable[[], WebDriver] | None:
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        return None
    if not Path("/usr/bin/chromium").exists():
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(option)

    def start() -> WebDriver:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
        for each in os.listdir("/proc"):
            name = Path("/proc", each, "comm")
            if each.isdigit() and name.exists() and name.read_text().startswith("chrom"):
                os.setpriority(os.PRIO_PROCESS, int(each), before + 15)
        return driver

    return start


if __name__ == "__main__":
    main()
