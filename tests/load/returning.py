"""Time to the first token of a returning conversation, by the tier that has its pages.

    python -m tests.load.returning RECIPE --tokens 30000 --set cache.host_gib=16 [--disk-gib 30]

Serves the recipe. In each round, a new prompt is computed, and then comes again: from the device,
and from host memory after other prompts have taken its place on the device. With a disk, it comes
a fourth time after other prompts have taken its place in host memory, too. Prints and records
medians, and the prompt tokens that each tier had. A load that would take longer than computing is
declined by the server; the time is then that of computing.

The disk is a new folder in `--disk-folder`, which is removed at the end. After the server has
ended, the files in it are read once more, to record the disk's own rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from nanovllm.bench.measure import Sample, now
from nanovllm.config import ConfigError
from tests.load.disk_tier import read_rate
from tests.load.tiered import TieredServer, arguments, conclude, log, serving

SPARE = 2  # pages of a request besides its prompt's


def check(server: TieredServer, num_tokens: int) -> None:
    """Raise ConfigError if the tiers are too small to tell them apart."""
    own = num_tokens // server.page_tokens + SPARE
    gpu, host = server.gpu_pages, server.pages("host")
    # While the device is filled, host memory keeps the prompt: it was used before the others.
    least = 2 * own + gpu
    if own > gpu or host < least:
        raise ConfigError(
            f"a prompt takes {own} pages; the device has {gpu}, and host memory {host}; "
            f"--tokens must fit into the device, and cache.host_gib needs {least} pages"
        )


def returns(server: TieredServer, name: str, num_tokens: int, has_disk: bool) -> dict[str, Sample]:
    """Return the samples of a prompt that returns, by the tier expected to have it."""
    body, pages = server.body(name, num_tokens), num_tokens // server.page_tokens
    before = server.settle()
    found = {"computed": asyncio.run(server.ask(body))}
    if num_cached := found["computed"].cached_tokens:
        raise RuntimeError(f"{num_cached} tokens of a new prompt were cached; use an empty disk")
    found["gpu"] = asyncio.run(server.ask(body))
    if has_disk:  # without one, pages are stored when others take their place
        server.check_stored("disk", before, pages)
    server.push_out(server.gpu_pages, num_tokens)
    server.check_stored("host", before, pages)
    found["host"] = hit(server, body)
    if has_disk:
        server.push_out(server.pages("host"), num_tokens)
        found["disk"] = hit(server, body)
    return found


def hit(server: TieredServer, body: bytes) -> Sample:
    """Send a prompt that the tiers have, and log the number of tokens that each of them had."""
    before = server.hit_tokens()
    sample = asyncio.run(server.ask(body))
    gains = {tier: int(n - before.get(tier, 0.0)) for tier, n in server.hit_tokens().items()}
    log.info("%d tokens: %.1f ms, %s", sample.input_tokens, 1e3 * sample.ttft_s, gains)
    return sample


def metrics_of(rounds: Sequence[dict[str, Sample]]) -> dict[str, float]:
    """Return medians by tier, and ratios to the computed prompt."""
    found: dict[str, float] = {}
    for tier in rounds[0]:
        samples = [each[tier] for each in rounds]
        found[f"{tier}_ttft_ms"] = median(1e3 * one.ttft_s for one in samples)
        found[f"{tier}_cached_tokens"] = median(one.cached_tokens for one in samples)
        found[f"{tier}_to_computed"] = found[f"{tier}_ttft_ms"] / found["computed_ttft_ms"]
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=30_000, help="of the prompt")
    parser.add_argument("--disk-gib", type=float, default=0.0, help="size of the disk; 0: none")
    parser.add_argument("--disk-folder", type=Path, default=Path(tempfile.gettempdir()))
    options: argparse.Namespace = parser.parse_args(words)
    with ExitStack() as stack:
        folder, sets = None, [*options.sets]
        if options.disk_gib:
            made = tempfile.TemporaryDirectory(dir=options.disk_folder)
            folder = Path(stack.enter_context(made))
            disk = {"path": str(folder), "gib": options.disk_gib}
            sets.append(f"cache.disk={json.dumps(disk)}")
        measure(options, sets, folder)


def measure(options: argparse.Namespace, sets: Sequence[str], folder: Path | None) -> None:
    """Measure and record the times of a recipe whose disk is in `folder`, if there is one."""
    started_at = now()
    with serving(options.recipe, sets) as (config, server):
        num_tokens = server.whole_pages(options.tokens)
        check(server, num_tokens)
        # The first round is a warm-up: the server measures the costs of loads and of tokens.
        rounds = [
            returns(server, f"round {nth}", num_tokens, folder is not None)
            for nth in range(options.rounds + 1)
        ][1:]
        num_bytes, seconds = server.loaded()
        events, hits = server.events(), server.hit_tokens()
    metrics = metrics_of(rounds) | {
        "load_gb_per_s": num_bytes / seconds / 1e9 if seconds else 0.0,
        "tokens_from_disk": hits.get("disk", 0.0),  # with the warm-up; 0 if the disk is too slow
        "declined_loads": events.get("host/declined", 0.0),
        "failed_loads": events.get("host/failed", 0.0) + events.get("disk/failed", 0.0),
    }
    if folder is not None:
        metrics |= read_rate(folder)
    conclude(
        options,
        config,
        started_at,
        metrics,
        {"name": "returning", "tokens": num_tokens, "rounds": options.rounds},
    )


if __name__ == "__main__":
    main()
