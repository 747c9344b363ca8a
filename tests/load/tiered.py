"""A server with tiers below the device's memory, as the measurements of these tiers use it.

Prompts are random words of exact lengths. Metrics of the server give the pages that it stored, and
the tokens that it found in each tier.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from nanovllm.bench import record, store
from nanovllm.bench.client import Channel
from nanovllm.bench.measure import Sample
from nanovllm.bench.online import wording_of
from nanovllm.bench.report import by_label, samples_of
from nanovllm.bench.started import started
from nanovllm.config import Config, ConfigError, load_config

log = logging.getLogger("tiers")
CHAT = "/v1/chat/completions"
STORED_S = 120.0  # timeout for pages to reach a tier
SETTLED_S = 0.5  # without an event, all pages are stored
POLL_S = 0.1


class TieredServer:
    """Client of a running server. `page_tokens` and the sizes of its tiers are read from it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=600, trust_env=False)
        self.model = self._http.get("/v1/models").json()["data"][0]["id"]
        (sizes,) = by_label(
            self.metrics(), "vllm:cache_config_info", "block_size", "num_gpu_blocks"
        )
        self.page_tokens, self.gpu_pages = map(int, sizes.split("/"))
        self._num_fillers = 0
        self._wording = wording_of(self._count)
        if not self.pages("host"):
            raise ConfigError(f"{url} has no tier in host memory; set cache.host_gib")

    def close(self) -> None:
        self._http.close()

    def _count(self, text: str) -> int:
        """Return the prompt tokens of a message."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        reply = self._http.post(CHAT, json=body)
        return int(reply.raise_for_status().json()["usage"]["prompt_tokens"])

    def metrics(self) -> dict[str, float]:
        return samples_of(self._http.get("/metrics").raise_for_status().text)

    def pages(self, tier: str) -> int:
        """Return the capacity of a tier in pages."""
        sizes = by_label(self.metrics(), "nanovllm:tier_pages", "tier", "state")
        return int(sizes.get(f"{tier}/capacity", 0))

    def hit_tokens(self) -> dict[str, float]:
        """Return the prompt tokens found in each tier so far."""
        return by_label(self.metrics(), "nanovllm:tier_hit_tokens_total", "tier")

    def events(self) -> dict[str, float]:
        """Return the events of tiers so far, such as `host/stored`."""
        return by_label(self.metrics(), "nanovllm:tier_events_total", "tier", "event")

    def loaded(self) -> tuple[float, float]:
        """Return the bytes of loads to the device so far, and their seconds."""
        names = ("vllm:kv_offload_load_bytes_total", "vllm:kv_offload_load_time_total")
        found = self.metrics()
        num_bytes, seconds = (by_label(found, name, "tier").get("host", 0.0) for name in names)
        return num_bytes, seconds

    def steps(self) -> list[dict[str, Any]]:
        """Return the latest steps of the engine, 512 at most, oldest first."""
        steps: list[dict[str, Any]] = self._http.get("/debug/steps?since=0").json()["steps"]
        return steps

    def settle(self) -> dict[str, float]:
        """Wait until the tiers have stored what they can. Return their events so far.

        Raise RuntimeError after STORED_S.
        """
        quiet_from, before = time.monotonic(), self.events()
        end = quiet_from + STORED_S
        while (now := time.monotonic()) < end:
            if (after := self.events()) != before:
                quiet_from, before = now, after
            elif now - quiet_from >= SETTLED_S:
                return after
            time.sleep(POLL_S)
        raise RuntimeError(f"pages are still stored after {STORED_S:.0f} s: {before}")

    def check_stored(self, tier: str, before: Mapping[str, float], pages: int) -> None:
        """Raise RuntimeError unless a tier has stored this many pages since the events `before`."""
        after, name = self.settle(), f"{tier}/stored"
        if (found := after[name] - before[name]) < pages:
            raise RuntimeError(f"the {tier} tier has stored {found:.0f} of {pages} pages: {after}")

    # -- requests ---------------------------------------------------------------------------

    def body(self, name: str, num_tokens: int, max_tokens: int = 1) -> bytes:
        """Return a request whose prompt has this many tokens. Its words follow from the name."""
        text = self._wording.text(Random(name), num_tokens)
        return msgspec.json.encode({
            "model": self.model, "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens, "temperature": 0.6, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        })  # fmt: skip

    async def ask(self, body: bytes) -> Sample:
        """Send a request on a connection of its own. Raise RuntimeError if it fails."""
        address = urlsplit(self.url)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(Channel, address.hostname, address.port)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sample = await channel.ask(head.encode() + body)
        if sample.error:
            raise RuntimeError(sample.error)
        return sample

    def push_out(self, num_pages: int, each: int) -> None:
        """Fill this many pages with prompts of `each` tokens that do not return.

        Each is stored before the next one comes. A disk that is slower than the device would drop
        stores, and the tier above it would keep its pages.
        """
        for _ in range(-(-num_pages * self.page_tokens // each)):
            self._num_fillers += 1
            asyncio.run(self.ask(self.body(f"filler {self._num_fillers}", each)))
            self.settle()

    def whole_pages(self, num_tokens: int) -> int:
        """Return a length near `num_tokens` of which one token is not in a full page.

        A request that returns with it computes this token only.
        """
        return num_tokens // self.page_tokens * self.page_tokens + 1


def arguments(about: str) -> argparse.ArgumentParser:
    """Return a parser of the options that the measurements share."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results-dir", type=Path, help="write a record there")
    return parser


def show_progress() -> None:
    """Print this measurement's messages, and warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)


@contextmanager
def serving(recipe: str, sets: Sequence[str]) -> Iterator[tuple[Config, TieredServer]]:
    """Serve a recipe until the block ends."""
    show_progress()
    config = load_config(recipe, sets)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    changes = [word for text in (*sets, f"server.port={port}") for word in ("--set", text)]
    with started([sys.executable, "-m", "nanovllm", "serve", recipe, *changes], url) as process:
        log.info("ready after %.1f s", process.ready_s)
        server = TieredServer(url)
        try:
            yield config, server
        finally:
            server.close()


def conclude(
    options: argparse.Namespace,
    config: Config | None,
    started_at: str,
    metrics: Mapping[str, float],
    load: Mapping[str, Any],
) -> None:
    """Print the metrics, and write a record if asked for.

    `load` describes the requests or copies. Without a `config`, no model took part.
    """
    for name, value in metrics.items():
        log.info("%-36s %12.3f", name, value)
    if options.results_dir is None:
        return
    made = record.of_this_machine(
        kind="load",
        started_at=started_at,
        duration_s=(datetime.now(UTC) - datetime.fromisoformat(started_at)).total_seconds(),
        recipe={"model": "none"} if config is None else msgspec.to_builtins(config.recipe),
        changed={} if config is None else config.changed,
        workload=load,
        metrics={name: float(value) for name, value in metrics.items()},
    )
    argv = ["python", "-m", f"tests.load.{load['name']}", *sys.argv[1:]]
    made = msgspec.structs.replace(made, argv=record.without_secrets(argv))
    log.info("record: %s", store.write(made, options.results_dir))
