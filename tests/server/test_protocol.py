"""Every field out of range is refused with its name, the range and the value."""

from __future__ import annotations

import json

import pytest

from nanovllm.server.errors import MAX_MESSAGE_CHARS, ApiError, half_pair
from nanovllm.server.protocol import WIDEST, ChatRequest, parse_request

HELLO = [{"role": "user", "content": "hello"}]


def parse(body: object) -> ChatRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(raw, model="demo", vocab_size=1000)


def refused(body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body)
    return caught.value


def field(**fields: object) -> dict[str, object]:
    return {"messages": HELLO, **fields}


# param -> bad values, and words that the message must contain
OUT_OF_RANGE = {
    "temperature": ([-0.1, 2.1], "between 0 and 2"),
    "top_p": ([0, 1.1, -1], "above 0 and at most 1"),
    "n": ([0, 17, -1], "between 1 and 16"),
    "max_tokens": ([0, -5, 2**24 + 1, 2**70], "between 1 and 16777216, the model's context"),
    "max_completion_tokens": ([0, 2**31], "between 1 and 16777216"),
    "presence_penalty": ([-2.5, 3], "between -2 and 2"),
    "frequency_penalty": ([-2.5, 3], "between -2 and 2"),
    "top_logprobs": ([-1, 21], "between 0 and 20"),
    "top_k": ([-2, 2**31, 2**70], "between -1 and 2147483647"),
    "min_p": ([-0.1, 1.5], "between 0 and 1"),
    "repetition_penalty": ([0, -1, 2.5], "above 0 and at most 2"),
    "min_tokens": ([-1, 2**31 - 1], "between 0 and 16777216"),
    "priority": ([2**31, -1], "between 0 and 2147483647 (below 0: a server with server.raise_"),
    "stream_interval": ([0, 2**31], "between 1 and 2147483647"),
    "seed": ([2**63, -(2**63) - 1], "(64 bits)"),
    "stop": (["", ["a", ""], ["x"] * 17, "x" * 1025], "stop must be"),
    "stop_token_ids": ([[1000], [-1]], "ids from 0 to 999"),
    "allowed_token_ids": ([[1000], [-1], [], [1] * 1025], "allowed_token_ids must be"),
    "bad_words": ([[""], ["x"] * 129, ["x" * 129]], "at most 128 words of 1 to 128 characters"),
    "reasoning_effort": (["", "lots"], "one of none, minimal, low"),
    "cache_salt": (["", "x" * 129], "1 to 128"),
    "request_id": (["", "a b", "x" * 257, "a\nb"], "1 to 256"),
    "thinking_token_budget": ([-2, 2**31], "between -1 and 2147483647"),
    "thinking_budget": ([-2, 2**31], "between -1 and 2147483647"),
    "structured_outputs": ([{}, {"regex": "a", "choice": ["b"]}], "exactly one of json, regex"),
    "tool_choice": (["required", "auto", "x"], "tool_choice must be"),
    "stream_options": ([{}, {"include_usage": True}], "unless stream is true"),
}


@pytest.mark.parametrize(
    ("param", "value", "words"),
    [(p, v, words) for p, (values, words) in OUT_OF_RANGE.items() for v in values],
    ids=lambda x: str(x)[:30],
)
def test_out_of_range(param, value, words) -> None:
    error = refused(field(**{param: value}))
    assert (error.status, error.param, error.code) == (400, param, "invalid_value")
    assert error.message.startswith(param) and words in error.message


def test_every_range_has_a_test() -> None:
    assert set(WIDEST) <= set(OUT_OF_RANGE)


WRONG_TYPE = {
    "messages": ["hello", 1, None, {}],
    "temperature": ["warm", [], True],
    "max_tokens": ["5", 1.5, False],
    "n": ["2", 1.5],
    "stream": ["yes", 1],
    "logprobs": [1],
    "stop": [5, {}],
    "logit_bias": [[1], 5],
    "tools": [{}, ["f"]],
    "seed": ["1", 0.5],
    "chat_template_kwargs": [[]],
    "stop_token_ids": [7],
    "model": [3],
    "stream_options": [[]],
    "response_format": ["text"],
}


@pytest.mark.parametrize(
    ("param", "value"),
    [(p, v) for p, values in WRONG_TYPE.items() for v in values],
    ids=lambda x: str(x)[:30],
)
def test_wrong_type(param, value) -> None:
    error = refused(field(**{param: value}))
    assert (error.status, error.code) == (400, "invalid_type")
    assert error.param in (param, f"{param}[0]")
    assert error.message.startswith(error.param) and "xpected" in error.message


@pytest.mark.parametrize(
    ("text", "param", "half"),
    [
        (r'{"messages": [{"role": "user", "content": "a\ud800"}]}', "messages[0].content", "d800"),
        (r'{"messages": [{"role": "user", "content": "\udc00a"}]}', "messages[0].content", "dc00"),
        (
            r'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\uD83D!"}]}]}',
            "messages[0].content[0].text",
            "d83d",
        ),
        (r'{"messages": [], "stop": ["a", "\udfff"]}', "stop[1]", "dfff"),
        (r'{"messages": [], "tools": [{"function": {"\ud800": 1}}]}', "tools[0].function", "d800"),
        (r'{"messages": [], "metadata": {"' + "k" * 500 + r'": "\ud800"}}', None, "d800"),
    ],
)  # fmt: skip
def test_half_of_a_surrogate_pair_is_refused_by_its_field(
    text: str, param: str | None, half: str
) -> None:
    error = refused(text.encode())
    assert (error.status, len(error.param or "") <= 100) == (400, True)
    if param is not None:
        message = f"{param}: \\u{half} is half of a surrogate pair; send both halves"
        assert (error.param, error.code, error.message) == (param, "invalid_value", message)
    assert half in error.message


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"regx": "a"}, "['regx']"),
        ({"regx": "a", "regex": "b", "json": {}}, "['json', 'regex']"),
        ({"regex": None}, "[]"),
    ],
)
def test_other_structures_are_named(value: dict[str, object], shown: str) -> None:
    assert refused(field(structured_outputs=value)).message.endswith(f"structural_tag, not {shown}")


def test_a_whole_surrogate_pair_is_a_character() -> None:
    body = rb'{"messages": [{"role": "user", "content": "\ud83d\ude00"}]}'
    (message,) = parse_request(body, model="m", vocab_size=9).messages
    assert message.content == "\U0001f600"
    assert half_pair(body) is None and half_pair(rb'{"a": "\ud800"') is None


def test_a_large_body_is_not_searched_for_half_of_a_surrogate_pair() -> None:
    """A search takes a hundred times as long as decoding it."""
    small, large = (b'{"a": [%s"\\ud800"]}' % (b"0, " * count) for count in (100, 10_000))
    assert half_pair(large) is None
    refusal = half_pair(small)
    assert refusal is not None and refusal.param == "a[100]"
    assert refused(large).message.startswith("the body is not valid JSON: ")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "not valid JSON"),
        (b"{", None, "not valid JSON"),
        (b"null", None, "Expected `object`"),
        (b"[]", None, "Expected `object`"),
        (b'{"messages": [] x', None, "not valid JSON"),
        (b'{"messages": [], "temperature": NaN}', None, "not valid JSON"),
        (
            b'{"messages": [{"role": "\xff"}]}',
            None,
            "the body is not valid UTF-8: invalid start byte (byte 24)",
        ),
        (b'{"messages": ' + b"[" * 100_000, "messages[0]", "Expected"),
        (b'{"store": ' + b"[" * 100_000, None, "nested too deeply"),
        ({}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [{"role": 1}]}, "messages[0].role", "Expected `str`"),
        ({"messages": [*HELLO, {"role": "bot"}]}, "messages[1].role", "developer, user"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "Expected"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "this model accepts only text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "must be a string",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            "is missing",
        ),
        (field(tools=[{"type": "custom"}]), "tools[0].type", "'function'"),
        (field(tools=[{"function": {}}]), "tools[0].function.name", "1 to 256"),
        (field(tools=[{"function": {"name": "a b"}}]), "tools[0].function.name", "white space"),
        (
            field(tools=[{"function": {"name": f"f{i}"}} for i in range(513)]),
            "tools",
            "at most 512 tools, not 513",
        ),
        (
            field(continue_final_message=True, add_generation_prompt=True),
            "continue_final_message",
            "left out",
        ),
        (field(continue_final_message=True), "messages[0]", "an assistant's message with text"),
        (field(response_format={}), "response_format.type", "one of text, json_object"),
        (field(response_format={"type": "x"}), "response_format.type", "not 'x'"),
        (
            field(response_format={"type": "json_schema"}),
            "response_format.json_schema",
            "an object with the schema",
        ),
        (
            field(
                response_format={"type": "json_object"}, structured_outputs={"json_object": True}
            ),
            "structured_outputs",
            "together with response_format",
        ),
        (
            field(structured_outputs={"json_object": "false"}),
            "structured_outputs.json_object",
            "true or false, not 'false'",
        ),
        (
            field(structured_outputs={"json": {}, "whitespace_pattern": " ?"}),
            "structured_outputs.whitespace_pattern",
            "not supported by this server",
        ),
        (
            field(tools=[{"function": {"name": "f", "parameters": []}}]),
            "tools[0].function.parameters",
            "a JSON Schema",
        ),
        (
            field(tools=[{"function": {"name": "f", "strict": 1}}]),
            "tools[0].function.strict",
            "true or false",
        ),
        (field(tools=[{"function": "f"}]), "tools[0].function", "an object"),
        (field(tools=[{"name": "f"}]), "tools[0].function", "is missing or null; it must be an ob"),
        (
            field(tools=[{"function": {"name": "f"}}], tool_choice={"type": "function"}),
            "tool_choice.function",
            "an object with the name of one of the tools",
        ),
        *(
            (field(response_format=response_format), f"response_format.json_schema.{name}", words)
            for response_format, name, words in (
                ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema", "is missing or"),
                (
                    {"type": "json_schema", "json_schema": {"schema": {}, "strict": "false"}},
                    "strict",
                    "true or false, not 'false'",
                ),
            )
        ),
        *(
            (
                field(structured_outputs={"json": {}, flag: "false"}),
                f"structured_outputs.{flag}",
                "true or false, not 'false'",
            )
            for flag in ("strict", "disable_any_whitespace")
        ),
        (field(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "at most 1024 ids"),
        (field(stop_token_ids=[1] * 1025), "stop_token_ids", "at most 1024 ids, not 1025"),
        (field(min_tokens=5, max_tokens=3), "min_tokens", "at most max_tokens, here 3, not 5"),
        (field(top_logprobs=2), "top_logprobs", "unless logprobs is true"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_malformed(body, param, words) -> None:
    error = refused(body)
    assert (error.status, error.param) == (400, param)
    assert words in error.message


def test_an_unknown_model_is_not_found() -> None:
    error = refused(field(model="gpt-9"))
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "'gpt-9'" in error.message and "'demo'" in error.message


@pytest.mark.parametrize("name", ["model", "stop", "request_id", "tool_choice"])
def test_a_request_does_not_choose_how_long_its_refusal_is(name) -> None:
    error = refused(field(**{name: "\n" * 10_000_000}))
    assert len(error.body()) < 4 * MAX_MESSAGE_CHARS


def test_the_error_body_is_openais() -> None:
    assert json.loads(refused(field(n=0)).body()) == {
        "error": {
            "message": "n must be between 1 and 16, not 0",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }
    assert json.loads(ApiError(503, "later").body())["error"]["type"] == "server_error"


def test_a_missing_value_is_named_as_missing_not_as_pythons_none() -> None:
    error = refused(field(response_format={"json_schema": {}}))
    assert error.message == (
        "response_format.type is missing or null; it must be one of text, json_object, "
        "json_schema, structural_tag"
    )


def test_what_clients_send_is_accepted() -> None:
    body = field(
        model="demo",
        temperature=1,
        top_p=None,
        n=None,
        stop=None,
        max_tokens=7,
        max_completion_tokens=9,
        user="u",
        metadata={"a": [1]},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        verbosity="low",
        modalities=["text"],
        safety_identifier="x",
        prompt_cache_key="x",
        prompt_cache_retention="24h",
        prompt_cache_options={},
        prediction={"type": "content", "content": "x"},
        return_tokens_as_token_ids=False,
        moderation={},
        web_search_options={},
        session_id="x",
        spaces_between_special_tokens=True,
        reasoning_effort="ultra",
        cache_salt=None,
        bad_words=[],
        logit_bias={"5": -100, "6": 100},
        response_format={"type": "text"},
        tools=[{"type": None, "function": {"name": "f", "parameters": None, "strict": None}}],
        tool_choice="none",
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        a_field_from_the_future={"x": 1},
    )
    body["messages"] = [
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": None},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]
    request = parse(body)
    assert request.token_limit == 9
    assert request.n is None
    assert request.logit_bias == {"5": -100, "6": 100}
    assert [message.text for message in request.messages] == ["a", None, "x"]


def test_bounds_themselves_are_inside() -> None:
    parse(field(temperature=0, top_p=1, n=16, top_k=-1, min_p=1, repetition_penalty=2))
    parse(
        field(temperature=2, top_k=0, seed=2**63 - 1, stop=["x"] * 16, min_tokens=3, max_tokens=3)
    )
    parse(field(seed=-(2**63), logprobs=True, top_logprobs=20, stop="x" * 1024))


TOOLS = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]
ONE = {"type": "function", "function": {"name": "f"}}
STRICT = [{"function": {"name": "f", "strict": True}}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}, "tools": TOOLS}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": ONE}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [ONE]},
                },
            },
            "tool_choice",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "none"}, None),
        ({"tools": STRICT}, "tools"),
        ({"tools": STRICT, "tool_choice": "none"}, None),
    ],
)
def test_what_needs_a_grammar(fields, expected) -> None:
    assert parse(field(**fields)).constrained_by == expected


@pytest.mark.parametrize("number", ["1" * 309, "-" + "1" * 4300, "1" * 4301, "1e400"])
@pytest.mark.parametrize(
    "body",
    [
        *('"temperature": N', '"seed": N', '"max_tokens": N', '"top_k": N', '"priority": N'),
        *('"logit_bias": {"1": N}', '"logit_bias": {"N": 1}', '"stop_token_ids": [N]'),
        *('"thinking_token_budget": N', '"n": N', '"min_p": N', '"allowed_token_ids": [N]'),
    ],
)
def test_a_request_with_such_a_number_is_a_400(body: str, number: str) -> None:
    whole = '{"messages": [{"role": "user", "content": "x"}], ' + body.replace("N", number) + "}"
    with pytest.raises(ApiError) as caught:
        parse_request(whole.encode(), model="m", vocab_size=100)
    assert caught.value.status == 400
    assert len(json.loads(caught.value.body())["error"]["message"]) < 1100
