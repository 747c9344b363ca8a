"""Prompts that cannot fit are refused at low cost, and large ones do not delay others."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanovllm.config import DEMO, load_config
from nanovllm.server.errors import ApiError
from nanovllm.server.large import (
    LARGE_BYTES,
    MANY_MESSAGES,
    PreparedBody,
    RefusedBody,
    Room,
    answered,
)
from nanovllm.server.length import EXACT_CHARS, Lengths, longest_token
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.served import Served
from tests.server.serving import JSON, Api, body, content, eventually, parsed_events, serving
from tests.server.test_choice import ENGINE

CHAT = "/v1/chat/completions"
DEMO_TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
# Unknown fields are ignored: they make a body large, but not its prompt.
PADDING = "x" * (LARGE_BYTES + 1000)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Any:
    with serving(tmp_path_factory.mktemp("large"), "server.max_body_bytes=8000000") as api:
        assert api.chat("warm up", padding=PADDING).status_code == 200
        yield api


@pytest.fixture
def api(large: Api) -> Api:
    large.engine.reset()
    return large


def too_long(response: httpx.Response) -> int:
    """Return the number of tokens in the refusal."""
    found = response.json()["error"]
    assert (response.status_code, found["code"]) == (400, "context_length_exceeded"), found
    assert found["param"] == "messages" and found["type"] == "invalid_request_error"
    counted = re.match(
        r"messages: the prompt has (at least )?(\d+) tokens; with at least one token to generate "
        r"it must have at most 511 \(the context is 512\)$",
        found["message"],
    )
    assert counted, found["message"]
    return int(counted[2])


def test_two_megabytes_are_refused_at_once(api) -> None:
    for text in ("word " * 400_000, "a" * 2_000_000, " " * 2_000_000, "\u00e9\u4e2d" * 400_000):
        responses = [api.chat(text) for _ in range(3)]
        assert {too_long(response) >= len(text.encode()) / 17 for response in responses} == {True}
        assert min(response.elapsed.total_seconds() for response in responses) < 0.5
    assert api.engine.generates == []


def test_a_long_prompt_is_told_its_exact_length(api) -> None:
    text = "word " * 5000
    assert len(text) < EXACT_CHARS
    exact = len(DEMO_TOKENIZER.encode(text).ids)
    assert exact <= too_long(api.chat(text)) < exact + 50


def test_a_large_body_with_a_small_prompt_is_served_as_any_other(api) -> None:
    more: dict[str, Any] = dict(
        temperature=0.25, stop=["zz"], seed=7, logit_bias={"5": 2.5}, max_tokens=40, n=2
    )
    small, large = (api.chat("some words", **more, padding=pad) for pad in ("", PADDING))
    first, second = (response.json() for response in (small, large))
    assert first["choices"] == second["choices"] and first["usage"] == second["usage"]
    sent = [
        (one.prompt, one.sampling, one.max_new, one.stop_ids, one.grammar)
        for one in api.engine.generates
    ]
    assert sent[:2] == sent[2:] and len(sent) == 4
    events = parsed_events(api.chat("some words", stream=True, padding=PADDING).text)
    assert content(events) == "some words"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    plain, padded = (
        api.chat("hi", tools=tools, tool_choice="required", padding=pad).json()
        for pad in ("", PADDING)
    )
    assert plain["choices"][0]["message"].keys() == padded["choices"][0]["message"].keys()


def test_errors_of_large_bodies_are_those_of_small_ones(api) -> None:
    for more in (
        {"temperature": 3},
        {"model": "gpt-9"},
        {"messages": [{"role": "x"}]},
        {"stop": ""},
    ):
        raw = [json.dumps(body() | more | {"padding": pad}).encode() for pad in ("", PADDING)]
        small, large = (api.http.post(CHAT, content=one, headers=JSON) for one in raw)
        assert small.status_code == large.status_code >= 400
        assert small.json() == large.json()
    response = api.http.post(CHAT, content=b"{" + b" " * 200_000, headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    many = {f"f{i}": {"x": "y" * 100} for i in range(20_000)}
    found = api.chat(response_format={"type": "json_object", "more": many}).json()["error"]
    assert found["code"] == "body_too_large" and "in addition to its messages" in found["message"]


def test_many_messages_are_as_much_work_as_a_large_body(tmp_path) -> None:
    with serving(tmp_path) as api:
        for count, num_processes in ((MANY_MESSAGES, 0), (MANY_MESSAGES + 1, 1)):
            messages = [{"role": "user", "content": ""}] * count
            assert too_long(api.http.post(CHAT, json={"messages": messages})) > 511
            assert len(large_processes(api)) == num_processes


def test_small_requests_do_not_wait_for_large_ones(api) -> None:
    """Large bodies that are slow to decode, render or tokenise do not delay small requests."""
    many = [{"role": "user", "content": ""}] * 100_000
    heavy = [json.dumps(body("word " * 400_000)).encode(), json.dumps({"messages": many}).encode()]
    quiet = max(api.chat("quiet").elapsed.total_seconds() for _ in range(10))
    is_over, answers = threading.Event(), []

    def hold(raw: bytes) -> None:
        with httpx.Client(base_url=api.url, trust_env=False, timeout=60) as http:
            while not is_over.is_set():
                answers.append(http.post(CHAT, content=raw, headers=JSON).status_code)

    threads = [threading.Thread(target=hold, args=(raw,)) for raw in heavy * 2]
    for thread in threads:
        thread.start()
    times = []
    for _ in range(30):
        times.append(api.chat("beside").elapsed.total_seconds())
        time.sleep(0.03)
    is_over.set()
    for thread in threads:
        thread.join()
    assert set(answers) == {400}
    assert sorted(times)[15] < quiet + 0.1 and max(times) < 5.0  # on two cores with the clients


def test_who_leaves_the_queue_holds_no_place(api) -> None:
    text, before = "word " * 400_000, api.log().count("status=499")
    assert api.chat("x", padding=PADDING).status_code == 200
    (pid,) = large_processes(api)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=api.url, trust_env=False) as http:
            for _ in range(6):
                with pytest.raises(httpx.TimeoutException):
                    await http.post(CHAT, json=body(text), timeout=httpx.Timeout(9, read=0.001))

    os.kill(pid, signal.SIGSTOP)  # no answer comes before the client leaves
    try:
        asyncio.run(main())
        eventually(lambda: api.log().count("status=499") == before + 6)
    finally:
        os.kill(pid, signal.SIGCONT)
    begun = time.monotonic()
    assert api.chat("x", padding=PADDING).status_code == 200
    assert time.monotonic() - begun < 5


def test_the_process_is_replaced_when_it_ends(api) -> None:
    """No request fails because the subprocess ended while idle."""
    (pid,) = large_processes(api)
    os.kill(pid, signal.SIGKILL)
    threads = Path(f"/proc/{pid}/task")  # it has ended with the last of them
    eventually(lambda: not large_processes(api) and len(list(threads.iterdir())) == 1)
    response = api.chat("first", padding=PADDING)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "first"
    assert len(large_processes(api)) == 1 and large_processes(api) != [pid]


def large_processes(api: Api) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(") ")
        except OSError:
            continue
        fields = tail.split()
        is_ours = int(fields[1]) == api.process.pid and "(nanovllm-large" in head
        if is_ours and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def test_the_process_ends_with_the_server(tmp_path) -> None:
    with serving(tmp_path) as api:
        assert large_processes(api) == []
        assert api.chat("x", padding=PADDING).status_code == 200
        (pid,) = large_processes(api)
        assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[16]) > 5
    eventually(lambda: not Path(f"/proc/{pid}").exists())


BROKEN = """
import logging, threading
from multiprocessing import Pipe
from nanovllm.config import load_config
from nanovllm.server import large

class Broken:
    def __init__(self, config, ready): ...
    def request(self, body): raise RuntimeError("no such thing")

def client():
    ours.send_bytes(b"{}")  # adapters
    ours.send_bytes(b"{}")
    assert ours.recv_bytes() == b"ready" and b"internal error" in ours.recv_bytes()
    ours.close()

large.Served = Broken
ours, theirs = Pipe()
threading.Thread(target=client).start()
large.work(theirs, load_config(None, ["server.log_format=json"]), None)
logging.shutdown()
"""


def test_the_process_writes_the_log_as_the_recipe_says() -> None:
    run = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60)
    (line,) = run.stdout.splitlines()
    found = json.loads(line)
    assert (found["level"], found["message"]) == ("error", "processing a large body failed"), (
        run.stderr
    )
    assert "no such thing" in found["exception"]


def test_the_process_answers_in_msgpack() -> None:
    """The subprocess answers with values, not with pickled code."""
    served = Served(load_config(None), ENGINE)
    wide = {"type": "integer", "maximum": 10**30}  # more than msgpack's integers hold
    given = body("hello", tools=[{"type": "function", "function": {"name": "f"}}], seed=7)
    given["tools"][0]["function"]["parameters"] = {"properties": {"n": wide}}
    given["stop"] = ["\u00e9"]
    found = msgspec.msgpack.decode(answered(json.dumps(given).encode(), served), type=PreparedBody)
    rest = msgspec.json.decode(found.rest, type=ChatRequest)
    assert (rest.seed, rest.stop, rest.messages) == (7, ["\u00e9"], [])
    assert rest.tools == given["tools"]
    assert found.prompt == served.template.prompt(served.request(json.dumps(given).encode()))
    refused = msgspec.msgpack.decode(answered(b'{"messages": []}', served), type=RefusedBody)
    assert (refused.status, refused.param) == (400, "messages")


def test_large_bodies_share_a_room() -> None:
    room = Room(3 * LARGE_BYTES)
    with room.taken() as small, room.taken() as first, room.taken() as second:
        small(LARGE_BYTES)  # small bodies take none of it
        first(LARGE_BYTES + 1)
        first(2 * LARGE_BYTES)
        with pytest.raises(ApiError, match="too many large requests") as refused:
            second(2 * LARGE_BYTES)
        assert (refused.value.status, refused.value.code) == (503, "overloaded")
    with room.taken() as all_of_it:
        all_of_it(3 * LARGE_BYTES)


# -- lower bounds of the number of tokens ---------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(
        st.one_of(
            st.text(max_size=20),
            st.sampled_from(["appointments", " the", "\n\n", "   ", "12345", "<|im_end|>", "<th"]),
        ),
        min_size=1,
        max_size=12,
    ),
    count=st.integers(1, 60),
    context=st.integers(1, 200),
)
def test_what_is_surely_there_is_there(pieces, count, context) -> None:
    text = "".join(pieces) * count
    num_tokens = len(DEMO_TOKENIZER.encode(text, add_special_tokens=False).ids)
    assert Lengths(DEMO_TOKENIZER).at_least(text, context) <= num_tokens


def test_the_longest_token_of_the_demo() -> None:
    sizes = [len(piece) for piece in DEMO_TOKENIZER.get_vocab(with_added_tokens=True)]
    assert longest_token(DEMO_TOKENIZER) == max(sizes) == len("</tool_response>")


def test_long_texts_of_long_words_are_looked_at_only_in_part() -> None:
    """If the size proves nothing, the beginning of the text is enough."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["z" * 4096])
    lengths = Lengths(tokenizer)
    text = "ab cd " * 100_000
    least = lengths.at_least(text, 1000)
    assert 1000 <= least < 10_000
    with pytest.raises(ApiError, match=f"at least {least} tokens"):
        lengths.encode(text, 1000)
    # A word whose end is uncertain is read completely.
    assert lengths.at_least("a" * 100_000, 1000) == 0
    assert lengths.encode("z" * 4096 * 20, 1000) == [tokenizer.token_to_id("z" * 4096)] * 20


def byte_level(**model: Any) -> Tokenizer:
    letters = {letter: at for at, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(letters, [], **model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_no_bound_where_text_may_vanish() -> None:
    assert longest_token(byte_level()) == 1
    removing = byte_level()
    cut = pre_tokenizers.Split(Regex(r"\s"), "removed")
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(use_regex=False)]
    )
    assert longest_token(removing) is None
    greedy = byte_level()
    greedy.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert longest_token(greedy) is None
    assert longest_token(byte_level(unk_token="!")) is None
    metaspace = byte_level()
    metaspace.decoder = decoders.Metaspace()
    assert longest_token(metaspace) is None


def test_text_is_measured_as_the_tokenizer_sees_it() -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    decomposed = "e\u0301" * 1000 + " " * 5000
    assert Lengths(tokenizer).at_least(decomposed, 1500) == 2000
    assert len(tokenizer.encode(decomposed).ids) == 2000
    assert array("i", tokenizer.encode(decomposed).ids)
