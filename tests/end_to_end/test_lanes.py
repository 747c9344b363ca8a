"""`parallel.ep: 2` with data parallelism on a CPU: the text of one process, and shutdown."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from nanovllm.watch import cpu_ticks
from tests.end_to_end.demo_server import Server, asked, start
from tests.end_to_end.test_ranks import FORMED, all_leave, pid_of, refused
from tests.gpu.test_lanes import MODEL

ASKS = [
    FORMED,
    *(asked(f"Question {at}.", temperature=0, max_tokens=20 + at) for at in range(6)),
    *(asked(f"Question {at}.", temperature=0.9, seed=at, max_tokens=20) for at in range(3)),
]
NGRAM = ("--set", "speculate={method: ngram, tokens: 3, min_match: 1}")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lanes")
    (folder / "config.json").write_text(json.dumps(MODEL | {"hidden_size": 128}))
    path = folder / "recipe.yaml"
    path.write_text(
        "model: a/b\nconfig: config.json\nload: {format: dummy}\ndevice: cpu\n"
        "cache: {pages: 200}\nschedule: {slots: 3, step_tokens: 64}\n"
        "server: {max_model_tokens: 1500, served_name: demo, shutdown_s: 60}\n"
    )
    return path


@pytest.fixture
def two(recipe: Path) -> Iterator[Server]:
    server = start(str(recipe), "--set", "parallel.ep=2")
    yield server
    server.process.kill()


def texts(server: Server) -> list[str]:
    """Return the answers to concurrent requests, which outnumber the slots."""
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(len(ASKS)) as pool:
        answers = list(
            pool.map(lambda ask: client.post(f"{server.url}/v1/chat/completions", json=ask), ASKS)
        )
    return [answer.json()["choices"][0]["message"]["content"] for answer in answers]


@pytest.fixture(scope="module")
def expected(recipe: Path) -> list[str]:
    """Return the answers of one engine."""
    alone = start(str(recipe))
    found = texts(alone)
    assert alone.stop() == 0
    return found


def test_two_lanes_serve_what_one_engine_does(two: Server, expected: list[str]) -> None:
    assert texts(two) == expected and all(expected[1:])
    assert two.metric("vllm:num_requests_running") == two.metric("vllm:num_requests_waiting") == 0
    looked = httpx.get(f"{two.url}/debug/steps").json()
    assert (looked["num_slots"], looked["num_pages"]) == (6, 400)
    assert {int(slot) // 3 for step in looked["steps"] for slot in step.get("slots", {})} == {0, 1}
    rank, children = pid_of(two, "nanovllm-rank1"), two.children()
    used = cpu_ticks(rank)
    time.sleep(1)
    assert cpu_ticks(rank) - used <= 2  # an idle engine does not spin
    assert two.stop() == 0
    all_leave(children)


def test_drafts_do_not_change_it(recipe: Path, expected: list[str]) -> None:
    server = start(str(recipe), "--set", "parallel.ep=2", *NGRAM)
    assert texts(server) == expected
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["nanovllm-engine", "nanovllm-rank1"])
def test_a_lost_lane_ends_streams_and_server(two: Server, name: str, number: int) -> None:
    """The streams of both lanes end, since neither can continue without the other's experts."""
    children = two.children()
    ask = asked("Count.", temperature=0, max_tokens=1400, stream=True)
    chat = two.client().chat.completions
    with chat.create(**ask) as one, chat.create(**ask) as other:
        next(iter(one))
        for at, _ in enumerate(other):
            if at == 3:
                break
        os.kill(pid_of(two, name), number)
        lost = time.monotonic()
        for stream in (one, other):
            with pytest.raises(openai.APIError):
                for _ in stream:
                    pass
        assert time.monotonic() - lost < 20
    assert two.process.wait(25 - (time.monotonic() - lost)) == 1
    all_leave(children)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "parallel.ep=2"), "parallel.ep is 2; the model has no experts; it can be 1"),
        (
            ("RECIPE", "--set", "parallel.ep=3"),
            "parallel.ep is 3; the model's num_experts 16 is not a multiple of it; "
            "it can be 1, 2, 4, 8, 16",
        ),
        (
            ("RECIPE", "--set", "parallel={tp: 4, ep: 2}"),
            "parallel.ep is 2; it must be 1 or parallel.tp, which is 4; with a parallel.tp of 1 it "
            "can be any number of devices",
        ),
    ],
)
def test_what_cannot_be_served_is_one_line(
    recipe: Path, arguments: tuple[str, ...], said: str
) -> None:
    given = (str(recipe) if one == "RECIPE" else one for one in arguments)
    line, logged = refused("--device", "cpu", *given)
    assert line == f"error: {said}"
    assert "loading" not in logged
