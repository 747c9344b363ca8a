"""Servers of checkpoints with MTP: every answer is that of the server without drafts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from nanovllm.config import DEMO
from tests.end_to_end.demo_server import Server, start
from tests.models.repeating import make_repeating
from tests.models.tiny import HYBRID, NEXT, V3
from tests.server.serving import eventually

CHAT = "/v1/chat/completions"
CONTEXT = 176
SMALL = ("--set", "cache.pages=33", "--set", "cache.page_tokens=8", "--set", "schedule.slots=7",
         "--set", "schedule.step_tokens=72", "--set", f"server.max_model_tokens={CONTEXT}",
         "--device", "cpu")  # fmt: skip
MTP = ("--set", "speculate={method: mtp, tokens: 3, adapt: false}")
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": V3,
    "qwen3_next": dict(NEXT, num_hidden_layers=2, full_attention_interval=2),
    "qwen3_5_text": dict(HYBRID, num_hidden_layers=2, full_attention_interval=2),
}
NOTES = "These are the notes of the day; read them, all of them, with care. "
AGE = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
       "required": ["age"], "additionalProperties": False}  # fmt: skip


Body = dict[str, Any]


class Servers(NamedTuple):
    plain: Server
    drafting: Server


@pytest.fixture(scope="module", params=FAMILIES)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_repeating(
        folder, request.param, **FAMILIES[request.param], vocab_size=2050
    )  # more than the tokenizer has
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder)
    both = Servers(*(start("--set", f"model={folder}", *SMALL, *more) for more in ((), MTP)))
    yield both
    assert [server.stop() for server in both] == [0, 0]


def chat(content: str, **more: Any) -> Body:
    asked = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, **more}
    return {"messages": [{"role": "user", "content": content}], **asked}


def questions() -> list[Body]:
    """Return requests. Several prompts share a prefix of some pages."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": AGE, "strict": True}}
    seeded = {"temperature": 0.7, "seed": 5}
    return [
        chat("Hello!"),
        chat("Hello!", **seeded),
        chat(NOTES * 2 + "What is done?"),
        chat(NOTES * 2 + "What is left?", **seeded, max_tokens=50),
        chat(NOTES * 2 + "Repeat them.", temperature=0.9, seed=6, n=2),
        chat("one two three four " * 4, stop=["e"]),
        chat("one two three four " * 4, **seeded, stop=["a", "t"], max_tokens=60),
        chat("How old is Ada?", response_format=schema, ignore_eos=False),
        chat(NOTES + "How old is Ada?", **seeded, response_format=schema, ignore_eos=False),
        chat("Which?", logprobs=True, top_logprobs=3),
        chat("Which?", **seeded, logprobs=True, top_logprobs=2, n=2),
        chat("Which?", **seeded, top_p=0.9, frequency_penalty=0.5, logit_bias={"9": 2}),
        chat("Go on.", max_tokens=None),  # to the end of the context
        chat("Go further.", max_tokens=None),  # the cache does not hold the two
        chat(NOTES + "Go on.", **seeded, max_tokens=None, stop_token_ids=[74, 70]),
        *(chat("Count.", max_tokens=new) for new in range(1, 9)),
    ]


async def answers(server: Server, asked: list[Body]) -> list[list[Any]]:
    """Return the choices and numbers of tokens of answers to requests that are sent at once."""

    async def one(http: httpx.AsyncClient, body: Body) -> list[Any]:
        response = await http.post(CHAT, json={**body, "return_token_ids": True})
        assert response.status_code == 200, response.text
        answer = response.json()
        fields = "index", "message", "token_ids", "finish_reason", "stop_reason"
        choices = [[choice.get(name) for name in fields] for choice in answer["choices"]]
        values = [numbers(choice.get("logprobs")) for choice in answer["choices"]]
        return [choices, values, answer["usage"]["completion_tokens"]]

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, trust_env=False, timeout=240, limits=limits
    ) as http:
        return await asyncio.gather(*(one(http, body) for body in asked))


def numbers(logprobs: dict[str, Any] | None) -> list[float]:
    """Return the log-probabilities of a choice, of chosen tokens and of the best ones."""
    if logprobs is None:
        return []
    entries = logprobs["content"]
    best = [top["logprob"] for entry in entries for top in entry["top_logprobs"]]
    return [entry["logprob"] for entry in entries] + best


def test_answers_are_those_without_drafts(servers: Servers) -> None:
    """The cache is too small for all requests at once, so that some are preempted.

    Other tests hold that the answers of a server without drafts are those alone.
    """
    asked = questions()
    plain = asyncio.run(answers(servers.plain, asked))
    for _ in range(2):  # the second time, prompts are in the cache
        drafted = asyncio.run(answers(servers.drafting, asked))
        for body, one, other in zip(asked, plain, drafted, strict=True):
            assert (other[0], other[2]) == (one[0], one[2]), body
            for values, expected in zip(other[1], one[1], strict=True):
                assert values == pytest.approx(expected, abs=1e-3), body
    reasons = {choice[3] for found in plain for choice in found[0]}
    assert reasons == {"stop", "length"}
    assert sum(len(values) for found in plain for values in found[1]) > 200
    drafting = servers.drafting
    eventually(lambda: drafting.metric("vllm:num_requests_running") == 0)
    drafts, accepted = (
        drafting.metric(f"vllm:spec_decode_num_{part}_tokens_total")
        for part in ("draft", "accepted")
    )
    assert 0.1 * drafts < accepted < 0.95 * drafts and accepted > 200
    assert drafting.metric("vllm:num_preemptions_total") > 0
    assert drafting.metric("vllm:prefix_cache_hits_total") > 200
