"""Unsupported fields are refused if they would change an answer, and ignored otherwise."""

from __future__ import annotations

import json

import pytest

from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import ChatRequest, parse_request
from nanovllm.server.unsupported import DEFAULTS, INSTEAD

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def parse(**fields: object) -> ChatRequest:
    raw = json.dumps({"messages": HELLO, **fields}).encode()
    return parse_request(raw, model="demo", vocab_size=1000)


def refused(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


ASKED = {  # values that change an answer
    "add_special_tokens": True,
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "chat_template": "{{ messages }}",
    "custom_logit_processor": "x",
    "documents": [{"text": "x"}],
    "ebnf": 'root ::= "a"',
    "echo": True,
    "function_call": "auto",
    "functions": [{"name": "f", "parameters": {}}],
    "grammar": 'root ::= "a"',
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "json_schema": {"type": "object"},
    "length_penalty": 1.5,
    "logits_processors": ["x"],
    "logprob_token_ids": [1],
    "lora_path": "x",
    "mm_processor_kwargs": {"fps": 1},
    "modalities": ["text", "audio"],
    "prompt_logprobs": 0,
    "regex": "a",
    "repetition_detection": {"max_pattern_size": 2},
    "stop_regex": "a",
    "structural_tag": "{}",
    "truncate_prompt_tokens": -1,
    "use_beam_search": True,
    "vllm_xargs": {"x": 1},
}


@pytest.mark.parametrize("field", DEFAULTS)
def test_what_would_change_the_answer_is_refused(field) -> None:
    error = refused(**{field: ASKED[field]})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert error.message == f"{field} is not supported by this server" + (
        f": {INSTEAD[field]}" if field in INSTEAD else ""
    )
    # The value is not repeated in the message.
    assert len(error.body()) < 300


@pytest.mark.parametrize("field", DEFAULTS)
def test_what_changes_nothing_is_accepted(field) -> None:
    for value in (None, False, [], {}, "", DEFAULTS[field]):
        parse(**{field: value})
    parse(length_penalty=1.0, best_of=1, modalities=["text"], function_call="none")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "auto"}, "left out or 'none' if there are no tools"),
        ({"tool_choice": "required"}, "if there are no tools"),
        ({"tool_choice": TOOL}, "if there are no tools"),
        ({"tool_choice": "auto", "tools": []}, "if there are no tools"),
        ({"tool_choice": "required", "tools": []}, "if there are no tools"),
        ({"tool_choice": "auto", "tools": None}, "if there are no tools"),
    ],
)
def test_a_choice_of_tools_needs_tools(fields, words) -> None:
    error = refused(**fields)
    assert error.param == "tool_choice" and words in error.message


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "none"}],
)
def test_no_tools_and_no_choice_are_fine(fields) -> None:
    assert parse(**fields).choice_of_tools.mode == "none"


def test_what_an_assistant_once_refused_is_history() -> None:
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "I can't."}]
    messages = [
        {"role": "assistant", "content": parts},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": "Yes.", "refusal": None},
    ]
    assert [m.text for m in parse(messages=messages).messages] == ["Well.\nI can't.", "No.", "Yes."]


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        (
            {"role": "user", "content": [{"type": "refusal", "refusal": "x"}]},
            "messages[0].content[0].type",
            "must be 'text'",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal"}]},
            "messages[0].content[0].refusal",
            "must be a string",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]},
            "messages[0].content[0].refusal",
            "Expected `str | null`",
        ),
    ],
)
def test_a_refusal_is_an_assistants_text(message, param, words) -> None:
    error = refused(messages=[message])
    assert error.param == param and words in error.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "a", "prefix": True}]},
            "messages[1].prefix is not supported by this server: use continue_final_message",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            "response_format.schema is not supported by this server: use the type json_schema",
        ),
    ],
)
def test_a_field_of_another_server_is_refused_with_the_one_to_use(fields, message) -> None:
    error = refused(**fields)
    assert (error.message, error.code) == (message, "unsupported_parameter")
    assert error.param == message.split()[0]


def test_fields_of_other_servers_that_say_nothing_are_accepted() -> None:
    message = {"role": "assistant", "content": "a", "prefix": False}
    formats = ({"type": "json_object", "schema": {}}, {"type": "json_object", "schema": None})
    for response_format in formats:
        parse(messages=[*HELLO, message], response_format=response_format)


def test_text_parts_of_the_responses_api_are_text() -> None:
    parts = [{"type": "input_text", "text": "Add"}, {"type": "output_text", "text": "1 and 2"}]
    (message,) = parse(messages=[{"role": "user", "content": parts}]).messages
    assert message.text == "Add\n1 and 2"
    error = refused(messages=[{"role": "user", "content": [{"type": "input_text"}]}])
    assert error.param == "messages[0].content[0].text"
    assert error.message == f"{error.param} is missing or null; it must be a string"
