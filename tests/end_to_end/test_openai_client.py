"""Responses of the demo model to the official openai client and to bare HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.clients.questions import (
    EXTRACT,
    MARIA,
    SUM,
    SUM_ANSWER,
    TOOL,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_NOW,
    Person,
)
from tests.end_to_end.demo_server import THINK, Server, asked, has_left, start
from tests.server.serving import eventually

ABOUT = "What is nanovllm?"
TWO_CITIES = "What is the weather in Oslo and Lima?"
DESCRIBE = EXTRACT.replace("name, age and city", "name, age, city, day and pair")
LONG = {"ignore_eos": True}


class get_weather(BaseModel):  # the client names the tool after the class
    """Get the current weather for a city."""

    city: str


def test_reasoning_and_text_whole_and_streamed(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**asked(SUM))
    whole = raw.parse()
    (choice,) = whole.choices
    assert choice.message.content == SUM_ANSWER and choice.finish_reason == "stop"
    assert choice.message.reasoning.startswith("17 + 25: ")
    assert raw.headers["x-request-id"] == whole._request_id == whole.id.removeprefix("chatcmpl-")
    text = reasoning = ""
    for chunk in client.chat.completions.create(**asked(SUM, stream=True)):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        if more := getattr(delta, "reasoning", ""):
            assert not text, "reasoning after the text"
            reasoning += more
    assert (text, reasoning) == (SUM_ANSWER, choice.message.reasoning)


def test_async_whole_and_streamed(server: Server) -> None:
    async def both() -> tuple[str, str, int]:
        async with server.async_client() as client:
            made = client.chat.completions.create
            streamed = made(**asked(ABOUT, stream=True, stream_options={"include_usage": True}))
            whole, stream = await asyncio.gather(made(**asked(ABOUT)), streamed)
            chunks = [chunk async for chunk in stream]
            *chunks, last = chunks
            assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
            assert last.usage.completion_tokens == whole.usage.completion_tokens
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
            return whole.choices[0].message.content, "".join(pieces), len(pieces)

    whole, streamed, num_pieces = asyncio.run(both())
    assert streamed == whole and whole.startswith("nanovllm is ")
    assert num_pieces > 10


def assembled(chunks: openai.Stream[Any]) -> dict[str, Any]:
    """Return the message that a stream's deltas form, joined as a client must do it."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning", "")
        for part in delta.tool_calls or ():
            if part.index == len(calls):
                assert part.id and part.type == "function" and part.function.name
                function = {"name": part.function.name, "arguments": ""}
                calls.append({"id": part.id, "type": "function", "function": function})
            calls[part.index]["function"]["arguments"] += part.function.arguments or ""
    assert chunk.choices[0].finish_reason == "tool_calls"
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_tool_is_called_and_its_answer_told(
    client: openai.OpenAI, stream: bool, thinks: bool
) -> None:
    request = asked(WEATHER, tools=[TOOL], extra_body=THINK if thinks else {})
    made = client.chat.completions.create(**request, stream=stream)
    turn = assembled(made) if stream else made.choices[0].message.model_dump(exclude_none=True)
    (call,) = turn["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert turn.get("reasoning", "") == "I call get_weather with city Oslo." * thinks
    assert not turn.get("content")
    told = {"role": "tool", "tool_call_id": call["id"], "content": WEATHER_NOW}
    request["messages"] += [turn, told]
    answer = client.chat.completions.create(**request, stream=False)
    assert answer.choices[0].message.content == WEATHER_ANSWER
    assert answer.choices[0].finish_reason == "stop"


def test_two_calls_streamed(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(**asked(TWO_CITIES, tools=[TOOL], stream=True))
    first, second = assembled(made)["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"city": "Oslo"}
    assert json.loads(second["function"]["arguments"]) == {"city": "Lima"}
    assert first["id"] != second["id"]


def test_parsed_output(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(**asked(EXTRACT), response_format=Person)
    assert made.choices[0].message.parsed == MARIA


def test_parsed_calls_of_a_strict_tool(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(get_weather)]
    made = client.chat.completions.parse(**asked(WEATHER), tools=tools, tool_choice="required")
    (call,) = made.choices[0].message.tool_calls
    assert call.function.parsed_arguments == get_weather(city="Oslo")


def test_what_zod_writes_is_enforced(client: openai.OpenAI) -> None:
    """Schemas of Zod (draft 7, from the AI SDK): integer bounds, patterns with formats, tuples."""
    date, size = r"^(?:\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01]))$", 2**53 - 1
    text, whole = {"type": "string"}, {"type": "integer", "minimum": -size, "maximum": size}
    pair = {"type": "array", "items": [{"type": "boolean"}, whole], "additionalItems": False}
    properties = {
        "name": text,
        "age": whole,
        "city": text,
        "day": {"type": "string", "format": "date", "pattern": date},
        "pair": {**pair, "minItems": 2, "maxItems": 2},
    }
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    named = {"name": "person", "schema": schema, "strict": True}
    fixed = asked(DESCRIBE, response_format={"type": "json_schema", "json_schema": named})
    found = json.loads(client.chat.completions.create(**fixed).choices[0].message.content)
    assert list(found) == list(properties) and found["age"] == 34
    assert re.fullmatch(date, found["day"]), found
    assert [type(value) for value in found["pair"]] == [bool, int]


def test_parsed_output_async(server: Server) -> None:
    async def ask() -> Person | None:
        async with server.async_client() as client:
            made = await client.chat.completions.parse(**asked(EXTRACT), response_format=Person)
            return made.choices[0].message.parsed

    assert asyncio.run(ask()) == MARIA


def test_events_of_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**asked(SUM)) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    text = "".join(event.delta for event in events if event.type == "content.delta")
    (done,) = (event for event in events if event.type == "content.done")
    assert text == done.content == final.choices[0].message.content == SUM_ANSWER
    assert final.choices[0].finish_reason == "stop"


def test_events_of_a_streamed_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**asked(WEATHER), tools=[TOOL]) as stream:
        events = list(stream)
    kind = "tool_calls.function.arguments"
    pieces = [event.arguments_delta for event in events if event.type == f"{kind}.delta"]
    (done,) = (event for event in events if event.type == f"{kind}.done")
    assert "".join(pieces) == done.arguments == '{"city": "Oslo"}'
    assert done.name == "get_weather" and len(pieces) > 1


def test_events_of_a_parsed_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**asked(EXTRACT), response_format=Person) as stream:
        events = list(stream)
    grown = [event.parsed for event in events if event.type == "content.delta"]
    (done,) = (event for event in events if event.type == "content.done")
    assert {"name": "Maria", "age": 34} in grown
    assert done.parsed == MARIA


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_the_client_s_own_error(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked(SUM, temperature=3), stream=stream)
    error = refused.value
    assert (error.status_code, error.param, error.code) == (400, "temperature", "invalid_value")
    assert error.type == "invalid_request_error" and error.request_id
    assert error.body["message"] == "temperature must be between 0 and 2, not 3.0"


def test_a_closed_stream_frees_its_place(client: openai.OpenAI, server: Server) -> None:
    made = client.chat.completions.create(
        **asked(ABOUT, stream=True, max_tokens=3000), extra_body=LONG
    )
    next(iter(made))
    eventually(lambda: server.metric("vllm:num_requests_running") == 1, 10)
    made.close()
    eventually(lambda: server.metric("vllm:num_requests_running") == 0, 10)


def test_bare_http(server: Server) -> None:
    request = asked(SUM, stream=True, stream_options={"include_usage": True})
    url, headers = f"{server.url}/v1/chat/completions", {"x-request-id": "mine-1"}
    with httpx.stream("POST", url, json=request, headers=headers, timeout=60) as response:
        lines = list(response.iter_lines())
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-request-id"] == "mine-1"
    assert lines[1::2] == [""] * (len(lines) // 2), "an empty line ends each event"
    *chunks, usage, done = [line.removeprefix("data: ") for line in lines[::2]]
    assert done == "[DONE]"
    shown = [json.loads(chunk) for chunk in chunks]
    assert {chunk["id"] for chunk in shown} == {"chatcmpl-mine-1"}
    (last,) = (chunk for chunk in shown if chunk["choices"][0]["finish_reason"])
    assert last is shown[-1] and last["choices"][0]["finish_reason"] == "stop"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in shown)
    assert text == SUM_ANSWER
    counts = json.loads(usage)
    assert counts["choices"] == []
    assert counts["usage"]["completion_tokens"] > 10
    refused = httpx.post(url, json={"messages": []}, headers=headers)
    assert refused.status_code == 400 and refused.headers["x-request-id"] == "mine-1"
    assert refused.json()["error"]["param"] == "messages"


def test_a_failure_in_mid_stream_is_an_error() -> None:
    server = start("--set", "schedule.slots=8", "--set", "cache.cpu_gib=0.2")
    made = server.client().chat.completions.create(
        **asked(ABOUT, stream=True, max_tokens=3000), extra_body=LONG
    )
    assert next(iter(made)).choices[0].delta.content == ""
    children = server.children()
    os.kill(server.engine_pid(), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the engine failed before this request was finished"):
        for _ in made:
            pass
    assert server.process.wait(30) == 1
    eventually(lambda: all(map(has_left, children)), 15)
