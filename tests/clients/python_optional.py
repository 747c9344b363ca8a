"""LangChain and LiteLLM with one server. Run it from the repository's root:

    python -m tests.clients.python_optional http://127.0.0.1:8000

It needs only the server's address. tests.clients.run starts it in an environment without nanovllm.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import litellm
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError

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


@tool
def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return WEATHER_NOW if city == "Oslo" else "unknown"


class LangChain:
    def __init__(self, url: str) -> None:
        self.model = ChatOpenAI(
            model="demo", base_url=f"{url}/v1", api_key="none", max_retries=0, stream_usage=True
        )

    def invoke(self) -> None:
        answer = self.model.invoke(SUM)
        assert answer.content == SUM_ANSWER, answer.content
        assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
        assert answer.response_metadata["finish_reason"] == "stop"

    def stream(self) -> None:
        chunks = list(self.model.stream(SUM))
        assert "".join(chunk.content for chunk in chunks) == SUM_ANSWER
        assert sum(bool(chunk.content) for chunk in chunks) > 1, "one piece"
        assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) > 10

    def ainvoke(self) -> None:
        assert asyncio.run(self.model.ainvoke(SUM)).content == SUM_ANSWER

    def bind_tools(self) -> None:
        able = self.model.bind_tools([get_weather])
        messages: list[Any] = [HumanMessage(WEATHER)]
        turn = able.invoke(messages)
        (call,) = turn.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
        told = get_weather.invoke(call)
        assert isinstance(told, ToolMessage)
        assert able.invoke([*messages, turn, told]).content == WEATHER_ANSWER

    def stream_a_tool_call(self) -> None:
        whole = AIMessageChunk("")
        for chunk in self.model.bind_tools([get_weather]).stream(WEATHER):
            whole += chunk
        (call,) = whole.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})

    def with_structured_output(self) -> None:
        asked = self.model.with_structured_output(Person, method="json_schema")
        assert asked.invoke(EXTRACT) == MARIA
        called = self.model.with_structured_output(Person, method="function_calling")
        found = called.invoke(EXTRACT)  # the name in such a call depends on the model
        assert isinstance(found, Person) and found.age == MARIA.age, found

    def refusal(self) -> None:
        try:
            self.model.bind(temperature=3).invoke(SUM)
        except BadRequestError as error:
            assert error.param == "temperature"
        else:
            raise AssertionError("accepted")


class LiteLLM:
    def __init__(self, url: str) -> None:
        self.fixed = {"model": "hosted_vllm/demo", "api_base": f"{url}/v1", "num_retries": 0}

    def ask(self, text: str, **more: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return litellm.completion(**self.fixed, **{"messages": messages, **more})

    def completion(self) -> None:
        answer = self.ask(SUM)
        message = answer.choices[0].message
        assert message.content == SUM_ANSWER
        assert message.reasoning_content.startswith("17 + 25: "), message
        assert answer.usage.completion_tokens > 10

    def acompletion_stream(self) -> None:
        async def ask() -> tuple[str, str]:
            messages = [{"role": "user", "content": SUM}]
            made = await litellm.acompletion(**self.fixed, messages=messages, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in made]
            reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
            return "".join(d.content or "" for d in deltas), reasoning

        text, reasoning = asyncio.run(ask())
        assert text == SUM_ANSWER
        assert reasoning == self.ask(SUM).choices[0].message.reasoning_content

    def tools(self) -> None:
        turn = self.ask(WEATHER, tools=[TOOL]).choices[0]
        (call,) = turn.message.tool_calls
        assert turn.finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        told = {"role": "tool", "tool_call_id": call.id, "content": WEATHER_NOW}
        history = [{"role": "user", "content": WEATHER}, turn.message, told]
        answer = self.ask("", messages=history, tools=[TOOL])
        assert answer.choices[0].message.content == WEATHER_ANSWER

    def streamed_tools(self) -> None:
        whole = litellm.stream_chunk_builder(list(self.ask(WEATHER, tools=[TOOL], stream=True)))
        (call,) = whole.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}

    def response_format(self) -> None:
        answer = self.ask(EXTRACT, response_format=Person)
        assert json.loads(answer.choices[0].message.content) == MARIA.model_dump()

    def refusal(self) -> None:
        try:
            self.ask(SUM, temperature=3)
        except litellm.BadRequestError as error:
            assert "temperature must be between 0 and 2" in str(error)
        else:
            raise AssertionError("accepted")


def checks(client: LangChain | LiteLLM) -> list[tuple[str, Callable[[], None]]]:
    names = [name for name in vars(type(client)) if name != "ask" and not name.startswith("_")]
    kind = type(client).__name__.lower()
    return [(f"{kind}: {name}", getattr(client, name)) for name in names]


def main(url: str) -> int:
    """Run all checks and return the number of failures."""
    failed = 0
    for name, check in checks(LangChain(url)) + checks(LiteLLM(url)):
        try:
            check()
        except Exception:
            failed += 1
            sys.stdout.write(f"FAILED {name} - {traceback.format_exc()}\n")
        else:
            sys.stdout.write(f"PASSED {name}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) > 0)
