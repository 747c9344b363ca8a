"""Calls as the models of each family write them. Each is a name and its arguments as JSON."""

from __future__ import annotations

import json

CALLS, CALL, SEP, END_CALL, END = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)


def qwen3(*calls):
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def deepseek(*calls):
    several = "\n".join(
        f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{END_CALL}"
        for name, arguments in calls
    )
    return f"{CALLS}{several}{END}"


def deepseek_v3_1(*calls):
    several = "".join(f"{CALL}{name}{SEP}{arguments}{END_CALL}" for name, arguments in calls)
    return f"{CALLS}{several}{END}"


def coder(*calls):
    def parameters(arguments):
        given = json.loads(arguments)
        return "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{parameters(arguments)}</function>\n</tool_call>"
        for name, arguments in calls
    )


def minimax(*calls):
    def parameters(arguments):
        given = json.loads(arguments)
        return "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in given.items())

    several = "".join(
        f'<invoke name="{name}">\n{parameters(arguments)}</invoke>\n' for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{several}</minimax:tool_call>"


def glm(*calls):
    def parameters(arguments):
        given = json.loads(arguments).items()
        return "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in given)

    return "".join(
        f"<tool_call>{name}{parameters(arguments)}</tool_call>" for name, arguments in calls
    )


FAMILIES = {
    "qwen3": qwen3,
    "glm4_7": glm,
    "deepseek_r1": deepseek,
    "deepseek_v3_1": deepseek_v3_1,
    "qwen3_coder": coder,
    "minimax_m2": minimax,
}
