"""The time to the first token of the second turn of a long conversation, and of the first turn.

    python results/turns.py RECIPE [--set KEY=VALUE ...] [--tokens N] [--rounds N] [--json PATH]

The recipe is served. Each round sends four requests, one after another, with prompts that differ
from those of all other rounds. The first turn has N tokens. The second turn is the first, its
answer and a short question. It is then repeated word for word. The last request is an unrelated
prompt of the same length. Each request has a time to the first text, and the number of cached
tokens in its usage. The output and the record have the medians of all rounds. Templates drop the
reasoning of earlier turns. The second turn therefore differs from the first at the start of its
answer. If a model always reasons, it differs at the end of the first prompt.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
import httpx
import msgspec

from nanovllm.bench.online import wording_of
from nanovllm.bench.record import of_this_machine
from nanovllm.bench.started import started
from nanovllm.bench.store import put
from nanovllm.bench.workload import Wording
from nanovllm.config import load_config

QUESTION = "And why is that so?"
Messages = list[dict[str, str]]


class Reply(NamedTuple):
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    text: str


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument(
        "--tokens", type=int, default=30_000, help="tokens of the first turn's prompt"
    )
    parser.add_argument("--answer", type=int, default=100, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    config, began = load_config(options.recipe, options.changes), datetime.now(UTC)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    changes = [part for each in options.changes for part in ("--set", each)]
    line = [sys.executable, "-m", "nanovllm", "serve", options.recipe, *changes]
    with (
        started([*line, "--set", f"server.port={port}"], url) as server,
        httpx.Client(base_url=url, timeout=600, trust_env=False) as client,
    ):
        click.echo(f"ready after {server.ready_s:.1f} s")
        wording = wording_of(lambda text: send(client, text, 1).prompt_tokens)
        conversation(client, wording, options, "warm-up")
        rounds = [conversation(client, wording, options, nth) for nth in range(options.rounds)]
    metrics = {"ready_s": server.ready_s}
    for kind in rounds[0]:
        for name in Reply._fields[:3]:
            metrics[f"{kind}_{name}"] = statistics.median(getattr(r[kind], name) for r in rounds)
        ms, total, cached = (metrics[f"{kind}_{name}"] for name in Reply._fields[:3])
        click.echo(f"{kind:>9}: {ms:9.1f} ms, {cached:,.0f} of {total:,.0f} tokens cached")
    metrics["second_to_first"] = metrics["second_ttft_ms"] / metrics["first_ttft_ms"]
    click.echo(f"second turn to first: {metrics['second_to_first']:.3f}")
    if options.json is not None:
        load = {"tokens": options.tokens, "answer": options.answer, "rounds": options.rounds}
        record = of_this_machine(
            kind="serve",
            started_at=began.isoformat(timespec="seconds"),
            duration_s=(datetime.now(UTC) - began).total_seconds(),
            recipe=msgspec.to_builtins(config.recipe),
            changed=config.changed,
            workload={"name": "turns", **load},
            metrics=metrics,
        )
        put(record, options.json)


def conversation(
    client: httpx.Client, wording: Wording, options: argparse.Namespace, nth: object
) -> dict[str, Reply]:
    """Send the requests of a round, and return the replies by name."""
    texts = [wording.text(Random(f"{nth} {topic}"), options.tokens) for topic in ("own", "other")]
    first = send(client, texts[0], options.answer)
    messages = [("user", texts[0]), ("assistant", first.text), ("user", QUESTION)]
    turns = [{"role": role, "content": text} for role, text in messages]
    second = send(client, turns, options.answer)
    again = send(client, turns, options.answer)
    unrelated = send(client, texts[1], options.answer)
    return {"first": first, "second": second, "again": again, "unrelated": unrelated}


def send(client: httpx.Client, content: str | Messages, num_tokens: int) -> Reply:
    """Send a request and return its reply, without the reasoning.

    Raise httpx.HTTPStatusError if it is refused.
    """
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    body = {
        "messages": messages, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    text, first, usage = "", 0.0, dict[str, Any]()
    began = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.is_error:
            answer.read()
            raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            deltas = [choice["delta"] for choice in chunk["choices"]]
            if not first and any(d.get("content") or d.get("reasoning") for d in deltas):
                first = time.perf_counter()
            text += "".join(delta.get("content") or "" for delta in deltas)
            usage = chunk.get("usage") or usage
    ttft_ms = 1e3 * ((first or time.perf_counter()) - began)
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return Reply(ttft_ms, usage["prompt_tokens"], cached, text)


if __name__ == "__main__":
    main()
