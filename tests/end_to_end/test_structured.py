"""Structured outputs of the demo model, end to end."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Literal

import httpx
import jsonschema
import pytest
from pydantic import BaseModel, Field

from tests.end_to_end import demo_server
from tests.end_to_end.demo_server import THINK
from tests.forks import HELPER
from tests.load.structured import SCHEMAS, run

ADA = "Maria is 34 years old, lives in Lima and works as a doctor. Describe her as JSON."
WEATHER = "What is the weather in Oslo and in Lima?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time", "parameters": CITY, "strict": True}},
]


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=30)
    age: int = Field(ge=0, le=150)
    mood: Literal["happy", "sad"] | None
    # The demo has never seen such a list, so only a limit ends its strings.
    pets: list[Annotated[str, Field(max_length=12)]] = Field(max_length=2)


def asked(text, **more) -> dict:
    return demo_server.asked(text, **{"max_tokens": 300, **more})


def test_parsed_by_the_openai_client(client) -> None:
    made = client.chat.completions.parse(**asked(ADA, response_format=Person))
    (choice,) = made.choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)
    several = client.chat.completions.parse(
        **asked(ADA, response_format=Person, n=4, temperature=1.5, seed=1)
    )
    assert len({choice.message.content for choice in several.choices}) > 1
    assert all(isinstance(choice.message.parsed, Person) for choice in several.choices)


def test_reasoning_then_json(client) -> None:
    for budget in (None, 4):
        extra = {**THINK, "thinking_token_budget": budget}
        made = client.chat.completions.create(
            **asked(ADA, response_format={"type": "json_object"}, extra_body=extra)
        )
        message = made.choices[0].message
        assert isinstance(json.loads(message.content), dict)
        assert message.reasoning
        used = made.usage.completion_tokens_details.reasoning_tokens
        assert used > 5 if budget is None else used <= 6  # with the marker and the text after it


@pytest.mark.parametrize("name", [None, "get_time"])
def test_streamed_calls_that_must_come(client, name) -> None:
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    fields = asked(WEATHER, tools=TOOLS, tool_choice=choice, temperature=0)
    whole = client.chat.completions.create(**fields).choices[0].message
    assert whole.content is None
    assert whole.tool_calls and (not name or len(whole.tool_calls) == 1)
    assert {call.function.name for call in whole.tool_calls} == {name or "get_weather"}
    parts: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**fields, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            parts.setdefault(call.index, []).append(call.function.arguments or "")
        assert not chunk.choices[0].delta.content
    arguments = ["".join(pieces) for pieces in parts.values()]
    assert arguments == [call.function.arguments for call in whole.tool_calls]
    assert max(map(len, parts.values())) > 3  # they came as they were written
    for text in arguments:
        jsonschema.validate(json.loads(text), CITY)


def test_one_call_at_most(client) -> None:
    fields = asked(WEATHER, tools=TOOLS, tool_choice="required", temperature=0)
    for allowed, count in ((True, 2), (False, 1)):
        for choice in ("required", "auto"):
            fields |= {"parallel_tool_calls": allowed, "tool_choice": choice}
            made = client.chat.completions.create(**fields)
            assert len(made.choices[0].message.tool_calls) == count


@pytest.mark.parametrize(
    ("structure", "allowed"),
    [
        ({"choice": ["maybe", "never"]}, lambda text: text in ("maybe", "never")),
        ({"regex": r"[0-9]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"grammar": 'root ::= "ab" two\ntwo ::= "!" | "ab" "?"'}, ("ab!", "abab?").__contains__),
        ({"json": CITY}, lambda text: list(json.loads(text)) == ["city"]),
    ],
)
def test_structured_outputs(client, structure, allowed) -> None:
    extra = {"structured_outputs": structure}
    made = client.chat.completions.create(**asked(ADA, extra_body=extra)).choices[0]
    assert made.finish_reason == "stop" and allowed(made.message.content), made.message.content


REFUSED = [
    ({"grammar": "root ::= nope"}, "structured_outputs", 'Rule "nope" is not defined'),
    ({"regex": "(?=a)b"}, "structured_outputs.regex", "look-around"),
    ({"json": {"not": {"format": "date"}}}, "structured_outputs.json", "'not'"),
]


def test_a_refused_grammar_leaves_other_streams_alone(server) -> None:
    def body(**more):
        return asked("Tell me a long story.", temperature=0, **more)

    async def story(client) -> str:
        made = await client.post("/v1/chat/completions", json=body(max_tokens=200))
        return made.json()["choices"][0]["message"]["content"]

    async def refuse(client) -> None:
        for structure, param, words in REFUSED * 3:
            made = await client.post(
                "/v1/chat/completions", json=body(structured_outputs=structure)
            )
            error = made.json()["error"]
            assert (made.status_code, error["param"]) == (400, param)
            assert words in error["message"]

    async def everyone() -> tuple[str, str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            alone = await story(client)
            together = (await asyncio.gather(story(client), refuse(client)))[0]
            return alone, together

    alone, together = asyncio.run(everyone())
    assert alone == together


def test_a_slice_of_the_acceptance_run(server) -> None:
    found = asyncio.run(run(f"{server.url}/v1", "demo", count=1, concurrency=16))
    assert found.failures == []
    assert found.num_valid == len(SCHEMAS) == 100


def test_heavy_grammars_whose_clients_leave_hold_nobody(server) -> None:
    """12 grammars of a minute each delay no request, and leave nothing."""
    branches = [" | ".join(f'[a-z]{{1,{i + 1}}} "{i}-{n}"' for i in range(900)) for n in range(12)]

    def body(**structure):
        return asked(ADA, structured_outputs=structure)

    async def everyone() -> float:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            heavy = [
                asyncio.create_task(
                    client.post("/v1/chat/completions", json=body(grammar=f"root ::= {text}"))
                )
                for text in branches
            ]
            while server.metric("nanovllm:grammar_compilations_waiting") < 12:
                await asyncio.sleep(0.05)
            for task in heavy:
                task.cancel()
            begun = time.monotonic()
            made = await client.post("/v1/chat/completions", json=body(choice=["just this"]))
            assert made.json()["choices"][0]["message"]["content"] == "just this"
            return time.monotonic() - begun

    server.client().chat.completions.create(
        **asked(ADA, extra_body={"structured_outputs": {"choice": ["first"]}})
    )  # starts everything that starts with the first grammar
    threads = num_threads(server)
    assert asyncio.run(everyone()) < 15
    assert server.metric("nanovllm:grammar_compilations_waiting") == 0
    assert num_threads(server) <= threads
    deadline = time.monotonic() + 30
    while num_compiling(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_threads(server) -> int:
    return len(list(Path(f"/proc/{server.engine_pid()}/task").iterdir()))


def num_compiling(server) -> int:
    """Return the number of forks of the engine's only child, besides the helpers of both."""
    (trials,) = children_of(server.engine_pid())
    return len(children_of(trials))


def children_of(pid) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    pids = [int(name) for task in tasks for name in (task / "children").read_text().split()]
    return [pid for pid in pids if demo_server.name_of(pid) != HELPER]
