"""Fields of other servers that turn reasoning on and off, read as this server's own."""

from __future__ import annotations

import pytest

from tests.server.test_unsupported import parse, refused

OWN = ("reasoning_effort", "thinking_token_budget", "include_reasoning", "chat_template_kwargs")
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.mark.parametrize(
    ("fields", "effort", "budget", "includes", "template"),
    [
        ({}, None, None, None, None),
        ({"enable_thinking": False}, None, None, None, OFF),
        ({"enable_thinking": True}, None, None, None, ON),
        ({"thinking_budget": 128}, None, 128, None, None),
        ({"thinking": False}, None, None, None, OFF),
        ({"thinking": {"type": "disabled"}}, None, None, None, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, None, 64, None, ON),
        ({"thinking": {"type": "auto"}}, None, None, None, None),
        (
            {"thinking": {"type": "enabled", "clear_thinking": False}},
            None, None, None, {**ON, "clear_thinking": False},
        ),
        ({"reasoning": {"effort": "low", "exclude": True}}, "low", None, False, None),
        ({"reasoning": {"enabled": False}}, None, None, None, OFF),
        ({"reasoning": {"max_tokens": 32, "exclude": False}}, None, 32, True, None),
        ({"reasoning": {"summary": "auto"}}, None, None, None, None),
        ({"reasoning": None, "thinking": None, "enable_thinking": None}, None, None, None, None),
        # this server's own fields have precedence
        ({"reasoning_effort": "high", "enable_thinking": False}, "high", None, None, None),
        ({"reasoning_effort": "high", "reasoning": {"effort": "low"}}, "high", None, None, None),
        ({"thinking_token_budget": 9, "thinking_budget": 128}, None, 9, None, None),
        ({"include_reasoning": True, "reasoning": {"exclude": True}}, None, None, True, None),
        (
            {"chat_template_kwargs": {**ON, "x": 1}, "enable_thinking": False},
            None, None, None, {**ON, "x": 1},
        ),
    ],
)  # fmt: skip
def test_fields_of_other_servers(fields, effort, budget, includes, template) -> None:
    request = parse(**fields)
    assert [getattr(request, name) for name in OWN] == [effort, budget, includes, template]
    others = request.reasoning, request.thinking, request.enable_thinking, request.thinking_budget
    assert others == (None, None, None, None)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be one of none, minimal"),
        ({"thinking": {"type": "off"}}, "thinking.type", "must be one of enabled, disabled"),
        ({"enable_thinking": "no"}, "enable_thinking", "bool"),
        ({"thinking_budget": "5"}, "thinking_budget", "int"),
        ({"thinking": {"budget_tokens": 1.5}}, "thinking.budget_tokens", "int"),
        ({"reasoning": "low"}, "reasoning", "object"),
        ({"thinking_budget": -2}, "thinking_budget", "must be"),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens", "must be"),
        ({"thinking": {"budget_tokens": 2**31}}, "thinking.budget_tokens", "must be"),
        ({"thinking": {"budget_tokens": 10**30}}, "thinking.budget_tokens", ""),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(fields, param: str, message: str) -> None:
    error = refused(**fields)
    assert error.param == param and message in error.message
