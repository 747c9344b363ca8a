"""The load "agents": its sizes, its order, its pauses, and its numbers on scripted servers."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from nanovllm.bench import client, store
from nanovllm.bench.agents import AgentLoad, agent_facts
from nanovllm.bench.measure import Sample
from nanovllm.bench.online import digest_of
from nanovllm.bench.workload import WORDS, Conversation, Message, Turn, Wording
from nanovllm.config import ConfigError
from tests.bench.test_online import ROOT, fake_chat, free_port, measure
from tests.forks import with_server_packages

WORDING = Wording(10, dict.fromkeys(WORDS, 1))
SMALL = AgentLoad(
    sessions=3, turns=4, shared_len=211, growth=(120, 240), answers=(20, 40), longest=900,
    pauses=(0.02, 0.04), concurrency=3,
)  # fmt: skip


def count(messages: list[Message]) -> int:
    """Return the tokens that fake_chat counts, with words of one token."""
    return 5 + sum(4 + len(one["content"].split()) for one in messages)


def fitted(load: AgentLoad) -> AgentLoad:
    return load.fitted(WORDING, count, "http://h:1")


def test_the_default_shape_reuses_95_percent() -> None:
    """Computed from the turns: a prompt repeats the previous one, which has all but its end."""
    load, reused, total = AgentLoad(), 0, 0
    for session in range(8):
        turns = [*load.planned(session)]
        assert turns[0].reusable == (8000 if session else 0)
        assert 8150 <= turns[0].prompt <= 8000 + 2500
        reused += 8000 if session else 0
        total += turns[0].prompt
        for before, turn in pairwise(turns):
            assert turn.prompt == before.prompt + before.answer + turn.result
            assert 200 <= turn.prompt - before.prompt <= 4000 and 50 <= before.answer <= 1500
            assert 0.5 <= turn.pause_s <= 20.0 and turn.prompt <= 85_000
            reused, total = reused + before.prompt, total + turn.prompt
        assert len(turns) == 40 or turns[-1].prompt > 85_000 - 4000
    assert 100 * reused / total == pytest.approx(95.0, abs=1.0)
    assert load.reusable_percent == pytest.approx(100 * reused / total)
    # Growth by 1,000 from 8,500: the sum of all prompts but the last, over the sum of all.
    even = AgentLoad(turns=11, sessions=1, concurrency=1, growth=(1000, 1000), answers=(500, 500))
    assert even.reusable_percent == pytest.approx(100 * 130_000 / 148_500)


def test_a_digest_follows_the_seed_and_the_sizes_and_not_the_number_of_sessions() -> None:
    assert digest_of(fitted(SMALL), WORDING) == "8afc12c5f6d9"
    changed = [
        {"seed": 1}, {"longest": 800}, {"pauses": (0.02, 0.05)}, {"answers": (20, 60)},
        {"temperature": 0.0},
    ]  # fmt: skip
    loads = [msgspec.structs.replace(fitted(SMALL), **change) for change in changed]
    assert len({digest_of(load, WORDING) for load in (*loads, fitted(SMALL))}) == 6
    more = fitted(msgspec.structs.replace(SMALL, sessions=5))
    ours, theirs = (load.conversations(["m"], WORDING) for load in (fitted(SMALL), more))
    assert theirs[:3] == ours and len(theirs) == 5


def test_every_prompt_begins_with_the_previous_one_and_has_its_size() -> None:
    load = fitted(SMALL)
    bodies = {}
    for conversation in load.conversations(["m"], WORDING):
        plans, before = [*load.planned(conversation.session)], []
        for at, plan in enumerate(plans):
            body = json.loads(conversation.body(at))
            messages = body["messages"]
            assert count(messages) == plan.prompt and body["max_tokens"] == plan.answer
            assert messages[: len(before)] == before
            assert [one["role"] for one in messages[:4]] == ["system", "user", "assistant", "user"][
                : len(messages)
            ]
            before = messages
        bodies[conversation.session] = body
        assert len(conversation.turns) == len(plans) and conversation.turns[0].pause_s == 0.0
    systems = {body["messages"][0]["content"] for body in bodies.values()}
    assert (
        len(systems) == 1 and len({body["messages"][1]["content"] for body in bodies.values()}) == 3
    )
    del body["messages"], body["max_tokens"]
    assert body == {"model": "m", "temperature": 0.6, "ignore_eos": True, "stream": True,
                    "stream_options": {"include_usage": True}}  # fmt: skip
    warm = load.warm_up(2).conversations(["m"], WORDING)
    assert [len(one.turns) for one in warm] == [1, 1] and warm[0].head != conversation.head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"growth": (40, 20)}, "--growth: write the smaller"),
        ({"growth": (20, 60)}, "--growth has the answer and the tool's result"),
        ({"pauses": (0.0, 1.0)}, "--pauses: the shortest pause must be above 0 s"),
        ({"longest": 300}, "--longest must have room"),
        ({"concurrency": 4}, "at most --sessions"),
        ({"growth": (30, 60), "answers": (20, 40)}, "--growth less --answers is too small"),
        ({"shared_len": 5}, "--shared-len is too small"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fitted(msgspec.structs.replace(SMALL, **changes))


def test_a_template_that_changes_earlier_messages_is_refused() -> None:
    def forgetful(messages: list[Message]) -> int:
        return count(messages[-4:])

    with pytest.raises(ConfigError, match="template changes earlier messages"):
        SMALL.fitted(WORDING, forgetful, "http://h:1")


def test_a_conversation_waits_for_answers_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only pauses and answers advance. Nothing is sent after a failure."""
    clock, sent = [0.0], list[tuple[float, bytes]]()

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    async def send(self: client._Driver, body: bytes) -> Sample:
        sample = Sample(clock[0], [clock[0] + 5.0], error="HTTP 500: no" if b"2" in body else "")
        sent.append((clock[0], body))
        clock[0] += 5.0
        return sample

    monkeypatch.setattr(client.asyncio, "sleep", sleep)
    monkeypatch.setattr(client._Driver, "_send", send)
    turns = [
        Turn(b"%d" % at, b".", pause_s, 10 * at) for at, pause_s in enumerate((0.0, 3.0, 20.0, 1.0))
    ]
    share = client.Share("http://h:1", None, [Conversation(b"<", turns, 7)], [], 1)
    driver = client._Driver(share, client.RunState(multiprocessing.get_context("spawn"), 1))
    samples = asyncio.run(driver.run()).samples
    assert sent == [(0.0, b"<0."), (8.0, b"<0,1."), (33.0, b"<0,1,2.")]
    assert [(one.session, one.turn, one.reusable_tokens) for one in samples] == [
        (7, 0, 0), (7, 1, 10), (7, 2, 20), (7, 3, 30)
    ]  # fmt: skip
    assert [one.error for one in samples] == ["", "", "HTTP 500: no", client.NOT_SENT]


def test_numbers_of_a_scripted_server() -> None:
    """fake_chat counts the messages that it has seen at the start of an earlier prompt."""
    with fake_chat("short") as url:
        outcome = measure(url, SMALL, warmup=0)
    plans = [[*SMALL.planned(session)] for session in range(3)]
    turns = sum(map(len, plans))
    found, load = outcome.record.metrics, outcome.record.workload
    assert (found["completed"], found["failed"], load["requests"]) == (turns, 0, turns)
    assert found["input_tokens"] == sum(plan.prompt for one in plans for plan in one)
    assert found["output_tokens"] == sum(plan.answer for one in plans for plan in one)
    # All but the five tokens of the template's end. First turns may overlap each other.
    later = sum(plan.reusable - 5 for one in plans for plan in one[1:])
    first = plans[0][0].prompt - plans[0][0].result  # of the system message
    assert later <= found["cached_tokens"] <= later + 2 * first
    assert found["reusable_prompt_tokens_percent"] == pytest.approx(SMALL.reusable_percent)
    assert found["reused_prompt_tokens_percent"] == pytest.approx(
        100 * found["cached_tokens"] / found["input_tokens"]
    )
    assert (found["first_turns"], found["later_turns"]) == (3.0, turns - 3.0)
    assert found["first_turns_p50_ttft_ms"] >= 30.0 and found["sessions_completed"] == 3.0
    assert found["requests_per_minute"] == pytest.approx(60 * found["requests_per_s"])
    pauses = max(sum(plan.pause_s for plan in one) for one in plans)
    assert found["duration_s"] > pauses + 4 * 0.03
    assert 20.0 < found["tokens_per_second_of_a_user_p50"] <= 250.0  # the server's gap is 4 ms
    assert load["name"] == "agents-3x900" and load["digest"] == "8afc12c5f6d9"


def test_a_server_with_errors_ends_sessions() -> None:
    """Every fifth request is refused, and every seventh stream is closed."""
    with fake_chat("ill", "short") as url:
        outcome = measure(url, SMALL, warmup=0)
    turns = sum(len([*SMALL.planned(session)]) for session in range(3))
    found = outcome.record.metrics
    assert found["completed"] + found["failed"] == turns and found["failed"] >= 2
    assert any(error.startswith("HTTP 503") for error in outcome.errors)
    assert outcome.errors[client.NOT_SENT] >= 1 and outcome.record.notes.startswith("invalid:")
    assert found["sessions_completed"] < 3


def test_facts_by_hand() -> None:
    def sample(turn: int, ttft_s: float, cached: int, session: int = 0) -> Sample:
        stamps = [10.0 + ttft_s, 11.0 + ttft_s]
        sizes = {"input_tokens": 100, "output_tokens": 11, "reusable_tokens": 90}
        return Sample(10.0, stamps, cached_tokens=cached, session=session, turn=turn, **sizes)

    samples = [sample(0, 0.5, 0), sample(1, 0.2, 96), sample(2, 0.1, 97), sample(0, 0.7, 49, 1)]
    lost = Sample(12.0, [], session=1, turn=1, error="HTTP 503: full")
    before = {'vllm:prefix_cache_queries_total{engine="0"}': 50.0}
    after = {
        'vllm:prefix_cache_queries_total{engine="0"}': 450.0,
        'vllm:prefix_cache_hits_total{engine="0"}': 100.0,
        'vllm:external_prefix_cache_hits_total{engine="0"}': 60.0,
    }
    found = agent_facts([*samples, lost], before, after)
    assert found["Sessions completed"] == 1.0
    assert found["Requests per minute"] == pytest.approx(60 * 4 / 1.7)  # to the last chunk
    assert (found["Reusable prompt tokens (%)"], found["Reused prompt tokens (%)"]) == (90.0, 60.5)
    assert (found["Hits in GPU memory (%)"], found["Hits in other tiers (%)"]) == (25.0, 15.0)
    assert found["Tokens per second of a user, P50"] == pytest.approx(10.0)
    assert (found["First turns"], found["First turns, P50 TTFT (ms)"]) == (
        2.0,
        pytest.approx(600.0),
    )
    assert found["Turns 0 to 50 % reused"] == 2.0 and "Turns 50 to 90 % reused" not in found
    assert found["Turns 90 to 97 % reused, P99 TTFT (ms)"] == pytest.approx(200.0)
    assert found["Turns 97 to 100 % reused, P50 TTFT (ms)"] == pytest.approx(100.0)
    assert agent_facts([lost], before, after) == {}


def test_the_demo_is_driven_in_seconds(tmp_path: Path) -> None:
    arguments = ["--start", "--device", "cpu", "--set", f"server.port={free_port()}"]
    arguments += ["--workload", "agents", "--sessions", "2", "--turns", "3", "--warmup", "0"]
    arguments += ["--shared-len", "300", "--growth", "60-120", "--answers", "4-8"]
    arguments += ["--longest", "700", "--pauses", "0.01-0.02", "--results-dir", str(tmp_path)]
    line = [sys.executable, "-m", "nanovllm", "bench", *arguments]
    done = with_server_packages().start(line, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "\n----------------------Agents----------------------\n" in done.stdout
    (written,) = store.records(tmp_path)
    load = AgentLoad(sessions=2, turns=3, shared_len=300, growth=(60, 120), answers=(4, 8),
                     longest=700, pauses=(0.01, 0.02), concurrency=2)  # fmt: skip
    plans = [plan for session in range(2) for plan in load.planned(session)]
    assert (written.metrics["completed"], written.metrics["failed"]) == (6.0, 0.0)
    assert written.metrics["input_tokens"] == sum(plan.prompt for plan in plans)
    assert written.metrics["output_tokens"] == sum(plan.answer for plan in plans)
    # Pages are of 16 tokens; copies of partly filled pages make up for their ends.
    reused = written.metrics["reused_prompt_tokens_percent"]
    assert load.reusable_percent - 5.0 < reused <= load.reusable_percent + 0.1
    assert written.metrics["hits_in_gpu_memory_percent"] == pytest.approx(reused)
