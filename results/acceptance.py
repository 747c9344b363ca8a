"""Acceptance of the demo's drafts over temperature, drawn with the target's noise and by argmax.

    python results/acceptance.py [--draft FOLDER] [--plot FILE.svg] [--json PATH]

The demo is served with its draft model, which proposes three tokens in every step. The first
questions of recipes/demo are asked at each temperature, each with a seed of its own. The share of
a position is that of the steps in which its draft and all before it were accepted.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
import httpx
import msgspec

from nanovllm.bench.record import of_this_machine
from nanovllm.bench.started import started
from nanovllm.bench.store import put
from nanovllm.config import load_config

QUESTIONS = Path(__file__).parents[1] / "recipes/demo/first_questions.txt"
WAYS = "shared", "argmax"
POSITIONS = 3
AT_ONCE = 8  # questions
MOST_TOKENS = 64  # of an answer
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", help="folder of a draft model; default: the shipped one")
    parser.add_argument("--temperatures", default="0,0.5,1,1.5,2")
    parser.add_argument("--questions", type=int, default=100, help="at most")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    temperatures = [float(word) for word in options.temperatures.split(",")]
    began, prompts = datetime.now(UTC), questions()[: options.questions]
    shares_by_way = {way: shares(way, options.draft, temperatures, prompts) for way in WAYS}
    metrics = {
        f"{way}_{temperature:g}_position_{nth}": share
        for way, rows in shares_by_way.items()
        for temperature, row in zip(temperatures, rows, strict=True)
        for nth, share in enumerate(row, 1)
    }
    click.echo(f"temperature: {POSITIONS} positions, {' | '.join(WAYS)}")
    for nth, temperature in enumerate(temperatures):
        texts = [" ".join(f"{share:.2f}" for share in shares_by_way[way][nth]) for way in WAYS]
        click.echo(f"{temperature:4g}: {' | '.join(texts)}")
    if options.plot is not None:
        plot(temperatures, shares_by_way, options.plot)
    if options.json is not None:
        record = of_this_machine(
            kind="demo",
            started_at=began.isoformat(timespec="seconds"),
            duration_s=(datetime.now(UTC) - began).total_seconds(),
            recipe=msgspec.to_builtins(load_config(None).recipe),
            changed={"speculate": {"method": "draft_model", "adapt": False}},
            workload={"name": "acceptance", "questions": len(prompts), "concurrency": AT_ONCE},
            metrics=metrics,
        )
        put(record, options.json)


def questions() -> list[str]:
    """Return the first questions that are neither conversations nor have a system message."""
    lines = [line.split(" => ")[0] for line in QUESTIONS.read_text().splitlines() if " => " in line]
    return [line for line in lines if " | " not in line and not line.startswith(("system:", "#"))]


def shares(
    way: str, draft: str | None, temperatures: Sequence[float], prompts: Sequence[str]
) -> list[list[float]]:
    """Return the shares of accepted drafts by position, for each temperature."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    speculate = {"method": "draft_model", "tokens": POSITIONS, "adapt": False, "drafts_by": way}
    speculate |= {"model": draft} if draft else {}
    changes = [f"speculate={json.dumps(speculate)}", f"server.port={port}"]
    line = [sys.executable, "-m", "nanovllm", "serve"]
    line += [part for each in changes for part in ("--set", each)]
    url, rows = f"http://127.0.0.1:{port}", list[list[float]]()
    with started(line, url), httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        for temperature in temperatures:
            before = counts(client)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                [*pool.map(partial(ask, client, temperature), range(len(prompts)), prompts)]
            steps, *accepted = (
                now - then for now, then in zip(counts(client), before, strict=True)
            )
            rows.append([count / steps for count in accepted])
    return rows


def ask(client: httpx.Client, temperature: float, seed: int, question: str) -> None:
    """Send a question and wait for the answer. Raise httpx.HTTPStatusError if it is refused."""
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "temperature": temperature, "seed": seed}
    answer = client.post("/v1/chat/completions", json={**body, "max_tokens": MOST_TOKENS})
    answer.raise_for_status()


def counts(client: httpx.Client) -> list[float]:
    """Return the number of steps with drafts, then of accepted drafts by position."""
    names = [DRAFTS, *(f'{ACCEPTED}{{position="{nth}"' for nth in range(POSITIONS))]
    lines = client.get("/metrics").text.splitlines()
    totals = []
    for name in names:
        values = [float(line.split()[-1]) for line in lines if like(line, name)]
        totals.append(sum(values))
    return totals


def like(line: str, name: str) -> bool:
    """Return True for a sample of this metric, whatever its further labels."""
    metric, _, label = name.partition("{")
    return line.startswith(metric) and label in line


def plot(
    temperatures: Sequence[float], shares_by_way: dict[str, list[list[float]]], path: Path
) -> None:
    """Draw the share of each position over the temperature, one line a position and way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for way, style in zip(WAYS, ("-", "--"), strict=True):
        for nth in range(POSITIONS):
            label = f"draft {nth + 1}, {way}"
            axes.plot(
                temperatures,
                [row[nth] for row in shares_by_way[way]],
                style,
                c=f"C{nth}",
                label=label,
            )
    axes.set(xlabel="temperature", ylabel="share of steps that accept it", ylim=(0, 1))
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
