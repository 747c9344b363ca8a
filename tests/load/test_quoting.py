"""The measurement of quoting tasks: questions, metrics, and comparison of answers."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanovllm.bench import store
from nanovllm.config import load_config
from nanovllm.server.protocol import parse_request
from tests.load import quoting
from tests.load.quoting import KINDS, SPECULATE, Asked, Found, questions, record_of
from tests.load.soak.questions import Answer, Choice

DRAFTS = {"acceptance_length": 2.5}


def answered(*texts: str, seconds: float = 1.0) -> Asked:
    """Return answers in which each letter counts as a token."""
    answers = [Answer({0: Choice(text)}, (9, len(text))) for text in texts]
    return Asked(seconds * len(texts), answers, [seconds] * len(texts))


def test_questions_quote_and_have_one_answer_each() -> None:
    made = questions(3, 4)
    assert made == questions(3, 4) and len(made) == 4 * len(KINDS)
    texts = {json.dumps(body["messages"]) for body in made}
    assert len(texts) == len(made) and texts.isdisjoint(
        json.dumps(body["messages"]) for body in questions(4, 4)
    )
    for body in made:
        parse_request(json.dumps(body).encode(), model="demo", vocab_size=2048)
    assert [body["temperature"] for body in made[:: len(KINDS)]] == [0.0, 0.7, 0.0, 0.7]
    assert [bool(body.get("tools")) for body in made[:4]] == [kind == "call" for kind in KINDS]


def test_a_ratio_is_the_median_of_the_rounds_and_of_each_kind() -> None:
    """4 letters per question take 4, 2 and 1 seconds with drafts, and 4 without, in one stream."""
    plain = answered("aaaa", "bbbb", "cccc", "dddd", seconds=4.0)
    rounds = [(plain, answered("aaaa", "bbbb", "cccc", "dddd", seconds=s)) for s in (4.0, 2.0, 1.0)]
    found = Found({1: rounds, 8: rounds[2:]}, {1: DRAFTS, 8: {}})
    metrics = found.metrics()
    assert metrics["ratio_1"] == 2.0 and metrics["ratio_8"] == 4.0
    assert metrics["plain_tokens_per_s_1"] == 1.0 and metrics["drafted_tokens_per_s_1"] == 2.0
    assert [metrics[f"ratio_1_{kind}"] for kind in KINDS] == [2.0] * 4
    assert metrics["acceptance_length_1"] == 2.5
    assert metrics["answers"] == 16 and metrics["different_answers"] == 0


def test_kinds_are_told_apart() -> None:
    plain = Asked(8.0, answered("a", "b", "c", "d", "a", "b", "c", "d").answers, [1.0] * 8)
    faster = Asked(7.0, plain.answers, [0.5, 1.0, 1.0, 1.0] * 2)
    metrics = Found({1: [(plain, faster)]}, {1: DRAFTS}).metrics()
    assert [metrics[f"ratio_1_{kind}"] for kind in KINDS] == [2.0, 1.0, 1.0, 1.0]


def test_an_answer_that_differs_is_told() -> None:
    found = Found({1: [(answered("yes", *"abc"), answered("yse", *"abc"))]}, {1: DRAFTS})
    (difference,) = found.differences
    assert "'yse'" in difference and "'yes'" in difference
    assert found.metrics()["different_answers"] == 1


def test_both_servers_are_asked_the_same_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, list]] = []

    async def ask(url: str, bodies: list, streams: int) -> Asked:
        seen.append((url, streams, bodies))
        return answered(*["a"] * len(bodies), seconds=2.0 if url == "plain" else 1.0)

    counts = iter(range(10, 1000, 10))

    def facts(url: str) -> dict[str, float]:
        assert url == "drafting"
        steps = float(next(counts))
        names = {"drafts": steps, "draft_tokens": 3 * steps, "accepted_tokens": 2 * steps}
        return {f"vllm:spec_decode_num_{name}_total": count for name, count in names.items()}

    monkeypatch.setattr(quoting, "ask", ask)
    monkeypatch.setattr(quoting, "facts", facts)
    found = quoting.measure(("plain", "drafting"), 2, 1)
    told = [(url, streams) for url, streams, _ in seen]
    warm = ["plain", "drafting"]
    assert told == [
        (url, streams) for streams in (1, 8) for url in [*warm, "drafting", "plain", *warm]
    ]
    rounds = [seen[at][2] for at in (2, 4, 8, 10)]
    assert all(seen[at][2] == seen[at + 1][2] for at in (2, 4, 8, 10))
    assert len({json.dumps(bodies) for bodies in rounds}) == 4, "a round asks what one asked before"
    assert found.metrics()["ratio_1"] == found.metrics()["ratio_8"] == 2.0
    assert found.drafts[1]["acceptance_length"] == 3.0


def test_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quoting", "--rounds", "1"])
    found = Found({1: [(answered(*"abcd"), answered(*"abcd"))]}, {1: DRAFTS})
    made = record_of(found, load_config(None, SPECULATE), "2026-11-22T12:00:00+00:00", 3.21, 1)
    assert made.kind == "demo" and made.workload["name"] == "quoting" and made.duration_s == 3.2
    assert made.argv == ["python", "-m", "tests.load.quoting", "--rounds", "1"]
    assert made.recipe["speculate"]["method"] == "ngram"
    assert store.find(str(store.write(made, tmp_path)), tmp_path) == made


def test_it_fails_when_drafts_bring_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second server, and only that, has drafts."""
    commands: list[list[str]] = []

    @contextmanager
    def started(command: list[str], url: str):
        commands.append(command[1:])
        yield

    monkeypatch.setattr(quoting, "started", started)
    monkeypatch.setattr(sys, "argv", ["quoting", "--set", "speculate.method=ngram"])
    drafted = answered(*"abcd")
    slow, fast = ([(answered(*"abcd", seconds=s), drafted)] for s in (1.2, 1.4))
    other = [(answered(*"abce", seconds=1.4), drafted)]
    for rounds, code in ((slow, 1), (fast, 0), (other, 1)):
        found = Found({1: rounds}, {1: DRAFTS})
        monkeypatch.setattr(quoting, "measure", lambda *_, found=found: found)
        with pytest.raises(SystemExit) as ended:
            quoting.main()
        assert ended.value.code == code
    serve = ["-m", "nanovllm", "serve", "--port"]
    assert commands[:2] == [[*serve, "8123"], [*serve, "8124", "--set", "speculate.method=ngram"]]
