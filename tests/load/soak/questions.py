"""Fixed questions of well-behaved clients, and the parts of an answer that are compared.

Every question is greedy or has a seed, so its answer does not depend on other requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isclose
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
Body = dict[str, Any]
PLAIN = (
    "What is nanovllm?",
    "What is 17 + 25?",
    "Hello!",
    "Which recipes are there?",
    "How do I install nanovllm?",
    "Repeat after me: 259 blue tigers run",
    "Extract name, age and city from this text as JSON: Maria is 34 and lives in Lima.",
    "What does --set do?",
    "Who are you?",
    "How is nanovllm different from vLLM?",
    "sdlkfjsldkfj",
    "Explain the French Revolution in two sentences.",
)
QUIETLY = {"chat_template_kwargs": {"enable_thinking": False}}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
NAME = {"type": "string", "maxLength": 16}
LOGPROB_TOLERANCE = 2e-3  # the last digits depend on the size of the batch
PREFIX = "These are the notes of the day, read them with care. " * 12


class RefusedError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text[:300]}")
        self.status = status


@dataclass
class Choice:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments
    tokens: list[str] = field(default_factory=list)  # only if the request has logprobs
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)  # prompt and completion tokens

    def differs_from(self, quiet: Answer) -> str:
        """Return a description of the first difference, or "" if there is none."""
        if self.usage != quiet.usage or self.choices.keys() != quiet.choices.keys():
            return f"usage {self.usage}, quiet {quiet.usage}: {self.choices}"
        for index, choice in self.choices.items():
            alone = quiet.choices[index]
            for name, value in vars(choice).items():
                wanted = getattr(alone, name)
                if value != wanted and not (name == "logprobs" and all_close(value, wanted)):
                    return f"choice {index}: {name} {value!r}, quiet {wanted!r}"
        return ""


def all_close(some: list[float], others: list[float]) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(
        isclose(one, other, abs_tol=LOGPROB_TOLERANCE) for one, other in pairs
    )


def questions() -> list[Body]:
    """Return all questions. Every second one is streamed."""
    long = [f"{PREFIX}{n} of them are done. {PLAIN[n]}" for n in range(8)]
    made = [
        *(asked(text) for text in PLAIN),
        *(asked(text, **QUIETLY) for text in PLAIN[:6]),
        *(asked(text, temperature=0.9, seed=7 + n) for n, text in enumerate(PLAIN[:8])),
        *(asked(text, **QUIETLY) for text in long),
        *forms(),
        *tools(),
        *(asked(PLAIN[n], n=3, temperature=1.0, seed=90 + n, max_tokens=24) for n in range(4)),
        *(asked(PLAIN[n], logprobs=True, top_logprobs=n, **QUIETLY) for n in range(4)),
        *penalties(),
    ]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return [{**body, **streamed} if n % 2 else body for n, body in enumerate(made)]


def asked(text: str, **more: object) -> Body:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 80, **more}


def thing(**properties: Body) -> Body:
    names = list(properties)
    closed = {"required": names, "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


def schema(body: Body) -> Body:
    named = {"name": "s", "schema": body, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def structured(**form: object) -> Body:
    return {"structured_outputs": form}


def forms() -> list[Body]:
    """Return structured outputs of every form."""
    text = "Describe a person named Ada as JSON."
    items = {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 4}
    wanted = (
        schema(thing(name=NAME, age=SMALL)),
        schema(thing(items=items, who=thing(name=NAME))),
        schema(thing(day={"type": "string", "format": "date"}, on={"type": "boolean"})),
        schema(thing(kind={"enum": ["cat", "dog", None]}, lives=SMALL)),
        {"response_format": {"type": "json_object"}},
        structured(json=thing(name=NAME)),
        structured(regex="[a-z]{3,8} [0-9]{2}"),
        structured(choice=["yes", "no", "perhaps"]),
        structured(grammar='root ::= "a" [0-9]+ "z"'),
    )
    # Some have a temperature: their answers differ from the model's unconstrained ones.
    warm = {"temperature": 0.8, "seed": 3}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 12}
    return [
        *(asked(text, **form, **QUIETLY) for form in wanted),
        *(asked(text, **form, **warm, **QUIETLY) for form in wanted[:2]),
        asked(text, **wanted[0], **thinks),
    ]


def tools() -> list[Body]:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "The weather now.", "parameters": city}
    offered = {"tools": [{"type": "function", "function": function}]}
    named = {"type": "function", "function": {"name": "get_weather"}}
    text = "What is the weather in Oslo?"
    return [
        asked(text, **offered),
        asked(text, **offered, **QUIETLY),
        asked(text, **offered, tool_choice="required"),
        asked(text, **offered, tool_choice=named),
        asked(text, **offered, tool_choice="none"),
    ]


def penalties() -> list[Body]:
    """Return requests with penalties, stop strings, and other changes to the logits or the end."""
    text, free = PLAIN[0], {"temperature": 0.7, "seed": 11}
    return [
        asked(text, presence_penalty=1.5, frequency_penalty=0.5, **free),
        asked(text, repetition_penalty=1.3, **free),
        asked(text, stop=["server", "\n"]),
        asked(text, stop=["a"], include_stop_str_in_output=True),
        asked(text, logit_bias={"300": 5, "301": -100}, **free),
        asked(text, bad_words=["nanovllm"], **free),
        asked(text, ignore_eos=True, min_tokens=60, max_tokens=60),
        asked(text, top_p=0.5, top_k=20, min_p=0.05, **free),
        asked(text, max_tokens=1),
    ]


async def answer(http: httpx.AsyncClient, body: Body) -> Answer:
    """Return the answer. Raise RefusedError, httpx.HTTPError, or ValueError if it is malformed."""
    if not body.get("stream"):
        response = await http.post(CHAT, json=body)
        if response.status_code != 200:
            raise RefusedError(response.status_code, response.text)
        found, whole = Answer(), response.json()
        for choice in whole["choices"]:
            add(found, choice, choice["message"])
        count(found, whole["usage"])
        return found
    async with http.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            raise RefusedError(response.status_code, (await response.aread()).decode())
        return folded([line async for line in response.aiter_lines()])


def folded(lines: list[str]) -> Answer:
    """Return the chunks of a stream as one answer. Raise ValueError."""
    found = Answer()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"the stream ends in {events[-1:]}")
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            raise RefusedError(int(event["error"].get("status", 500)), str(event["error"]))
        for choice in event["choices"]:
            add(found, choice, choice["delta"])
        if event.get("usage") is not None:
            count(found, event["usage"])
    return found


def add(found: Answer, choice: Body, part: Body) -> None:
    """Add a choice, or a part of one, to the answer."""
    into = found.choices.setdefault(choice["index"], Choice())
    into.content += part.get("content") or ""
    into.reasoning += part.get("reasoning") or ""
    for at, call in enumerate(part.get("tool_calls") or ()):
        function = call["function"]
        if call.get("index", at) >= len(into.calls):
            into.calls.append([function["name"], ""])
        into.calls[call.get("index", at)][1] += function["arguments"]
    for token in (choice.get("logprobs") or {}).get("content") or ():
        into.tokens.append(token["token"])
        into.logprobs.append(token["logprob"])
    into.finish_reason = choice["finish_reason"] or into.finish_reason


def count(found: Answer, usage: Body) -> None:
    found.usage = usage["prompt_tokens"], usage["completion_tokens"]
