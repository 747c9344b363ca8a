"""Speed-up by n-gram drafts where answers quote their prompts: the demo with and without drafts.

    python -m tests.load.quoting --results-dir results

Serves the demo twice, the second time with `speculate`, and sends both the same questions in turn.
They are sentences to repeat, texts to fill into JSON, tool calls, and answers to repeat. Half of
them are greedy; the others have a temperature and a seed. Every round has new questions, so that no
prompt is in the prefix cache. A ratio compares output tokens per second, prompts included, and is
the median of the rounds. Fails if an answer differs, or if drafts speed up a single stream by less
than 1.3 times.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import httpx
import msgspec

from nanovllm.bench import record, store
from nanovllm.bench.report import samples_of, speculation
from nanovllm.bench.started import started
from nanovllm.config import Config, load_config
from recipes.demo.corpus import extract, rewrite, tools, words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Sample, user
from tests.load.soak.questions import Answer, Body, answer

log = logging.getLogger("quoting")
SPECULATE = [  # best of 4 to 7 tokens and matches of 1 or 2 to 3, 4 or 8; two cores
    *("speculate.method=ngram", "speculate.tokens=5"),
    *("speculate.min_match=1", "speculate.max_match=4"),
]
STREAMS = (1, 8)
LEAST_RATIO = 1.3  # speed-up of a single stream
SEED = 41_000
MOST_NEW = 300


# -- questions ----------------------------------------------------------------------------------


def repeated(draw: Draw) -> Sample:
    """Return sentences to repeat."""
    text = " ".join(words.sentence(draw) for _ in range(draw.number(2, 4)))
    return Sample("repeat", [user(rewrite.ask(draw, rewrite.REPEAT, text))], text)


def said_again(draw: Draw) -> Sample:
    """Return a request to repeat an answer that quoted a text."""
    before = extract.extraction(draw)
    request = user(draw.pick(["Say that again.", "Again, please.", "Repeat that."]))
    return Sample("again", [*before.messages, before.turn(), request], before.answer)


KINDS: dict[str, Callable[[Draw], Sample]] = {
    "repeat": repeated,
    "extract": extract.extraction,
    "call": tools.parallel,
    "again": said_again,
}


def questions(turn: int, count: int) -> list[Body]:
    """Return `count` new questions of each kind for this turn, kinds alternating, half greedy."""
    draw = Draw(SEED + turn, held=True)
    return [body(make(draw), number) for number in range(count) for make in KINDS.values()]


def body(sample: Sample, number: int) -> Body:
    made: Body = {
        "messages": sample.messages,
        "max_tokens": MOST_NEW,
        "temperature": 0.7 * (number % 2),
        "seed": number,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    return made | ({"tools": sample.tools} if sample.tools else {})


# -- measuring ----------------------------------------------------------------------------------


@dataclass
class Asked:
    """Answers of one server to the questions of a round."""

    duration_s: float  # of all questions together
    answers: list[Answer]
    seconds: list[float]  # of each question

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return sum(answer.usage[1] for answer in self.answers) / self.duration_s

    def of_kind(self, number: int) -> Asked:
        """Return the questions of one kind. Valid only for a round with one stream."""
        seconds = self.seconds[number :: len(KINDS)]
        return Asked(sum(seconds), self.answers[number :: len(KINDS)], seconds)


Round = tuple[Asked, Asked]  # without drafts, with drafts


@dataclass
class Found:
    rounds: dict[int, list[Round]]  # by number of streams
    drafts: dict[int, dict[str, float]]  # by number of streams; see report.speculation

    @property
    def differences(self) -> list[str]:
        return [
            difference
            for rounds in self.rounds.values()
            for plain, drafted in rounds
            for one, other in zip(drafted.answers, plain.answers, strict=True)
            if (difference := one.differs_from(other))
        ]

    def metrics(self) -> dict[str, float]:
        made: dict[str, float] = {}
        for streams, rounds in self.rounds.items():
            made[f"ratio_{streams}"] = ratio(rounds)
            made[f"plain_tokens_per_s_{streams}"] = median(plain.rate for plain, _ in rounds)
            made[f"drafted_tokens_per_s_{streams}"] = median(drafted.rate for _, drafted in rounds)
            drafts = self.drafts[streams].items()
            made |= {f"{name}_{streams}": value for name, value in drafts}
        for number, kind in enumerate(KINDS):
            of_kind = [(p.of_kind(number), d.of_kind(number)) for p, d in self.rounds[1]]
            made[f"ratio_1_{kind}"] = ratio(of_kind)
        made["answers"] = sum(len(p.answers) for rounds in self.rounds.values() for p, _ in rounds)
        made["different_answers"] = len(self.differences)
        return made


def ratio(rounds: Sequence[Round]) -> float:
    return median(drafted.rate / plain.rate for plain, drafted in rounds)


async def ask(url: str, bodies: Sequence[Body], streams: int) -> Asked:
    """Send the questions, `streams` at once. Raise the exceptions of soak.questions.answer."""
    places, seconds = asyncio.Semaphore(streams), [0.0] * len(bodies)

    async def one(number: int) -> Answer:
        async with places:
            begin = time.perf_counter()
            found = await answer(http, bodies[number])
            seconds[number] = time.perf_counter() - begin
            return found

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600) as http:
        begin = time.perf_counter()
        answers = await asyncio.gather(*map(one, range(len(bodies))))
        return Asked(time.perf_counter() - begin, answers, seconds)


def measure(urls: tuple[str, str], num_rounds: int, count: int) -> Found:
    """Measure all rounds. `urls` are the servers without and with drafts.

    The order of the two servers alternates between rounds. `count` is the number of questions of
    each kind in a round.
    """
    found = Found({}, {})
    for streams in STREAMS:
        first = streams * num_rounds
        for url in urls:  # warm-up: the cost of first requests is not measured
            asyncio.run(ask(url, questions(-streams, 2), streams))
        before, rounds = facts(urls[1]), found.rounds.setdefault(streams, [])
        for turn in range(num_rounds):
            bodies = questions(first + turn, count)
            order = (0, 1) if turn % 2 else (1, 0)
            asked = {side: asyncio.run(ask(urls[side], bodies, streams)) for side in order}
            rounds.append((asked[0], asked[1]))
        found.drafts[streams] = speculation(before, facts(urls[1]))
        log.info("%d at once: %.2f times as fast", streams, ratio(rounds))
    return found


def facts(url: str) -> dict[str, float]:
    page = httpx.get(f"{url}/metrics", trust_env=False, timeout=60)
    return samples_of(page.raise_for_status().text)


def record_of(
    found: Found, config: Config, started_at: str, duration_s: float, count: int
) -> record.Record:
    num_rounds = len(found.rounds[1])
    made = record.of_this_machine(
        kind="demo",
        started_at=started_at,
        duration_s=round(duration_s, 1),
        recipe=msgspec.to_builtins(config.recipe),
        changed=config.changed,
        workload={
            "name": "quoting",
            "streams": list(STREAMS),
            "rounds": num_rounds,
            "questions_of_a_round": count * len(KINDS),
            "kinds": list(KINDS),
            "seed": SEED,
        },
        metrics=found.metrics(),
    )
    argv = ["python", "-m", "tests.load.quoting", *sys.argv[1:]]
    return msgspec.structs.replace(made, argv=argv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--set", action="append", dest="sets", help=f"default: {' '.join(SPECULATE)}"
    )
    parser.add_argument("--rounds", type=int, default=9, help="for each number of streams")
    parser.add_argument("--count", type=int, default=4, help="questions of each kind in a round")
    parser.add_argument("--port", type=int, default=8123, help="this one and the next are used")
    parser.add_argument("--results-dir", type=Path, help="write a record there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    started_at, begun = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    overrides = args.sets or SPECULATE
    config = load_config(None, overrides)
    urls = f"http://127.0.0.1:{args.port}", f"http://127.0.0.1:{args.port + 1}"
    drafting = [word for text in overrides for word in ("--set", text)]
    with ExitStack() as servers:
        for url, more in zip(urls, ([], drafting), strict=True):
            port = url.rpartition(":")[2]
            command = [sys.executable, "-m", "nanovllm", "serve", "--port", port, *more]
            servers.enter_context(started(command, url))
        found = measure(urls, args.rounds, args.count)
    metrics = found.metrics()
    for name, value in metrics.items():
        log.info("%-40s %10.2f", name, value)
    for difference in found.differences[:10]:
        log.info("with drafts: %s", difference)
    if args.results_dir is not None:
        made = record_of(found, config, started_at, time.monotonic() - begun, args.count)
        log.info("record: %s", store.write(made, args.results_dir))
    sys.exit(bool(found.differences) or metrics["ratio_1"] < LEAST_RATIO)


if __name__ == "__main__":
    main()
