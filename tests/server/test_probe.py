"""The parser follows from the template's calls, not from the names of folder and class."""

from __future__ import annotations

import json
import shutil
from typing import Any

import msgspec
import pytest

from nanovllm.config import DEMO, ConfigError, load_config
from nanovllm.registry import resolve
from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.base import CallPart, CallStart
from nanovllm.server.parsers.machine import OutputParser
from nanovllm.server.parsers.markers import CALL, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from nanovllm.server.probe import TemplateFacts, facts_of, parser_of
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.renderer import Renderer
from nanovllm.server.template import Template
from nanovllm.server.template_files import TemplateFiles
from tests.server.tiny_tokenizer import write_folder

EACH = "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
CONTENT = "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}<|im_end|>\n{% endfor %}"
DUMPED = "{{ f.arguments if f.arguments is string else f.arguments | tojson }}"
ITEMS = "{% for k, v in f.arguments | items %}"
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
CALLS = {
    "qwen3": "<tool_call>\n" + OBJECT + "\n</tool_call>",
    "qwen3 in another order": '<tool_call>{"arguments": '
    + DUMPED
    + ', "name": "{{ f.name }}"}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function={{ f.name }}>\n"
    + ITEMS
    + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n'
    + ITEMS
    + '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>',
    "glm4_7": "<tool_call>{{ f.name }}"
    + ITEMS
    + "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>",
    "deepseek_r1": f"{CALLS_BEGIN}{CALL}{{{{ c.type }}}}{SEPARATOR}{{{{ f.name }}}}\n```json\n"
    + DUMPED
    + f"\n```{CALL_END}{CALLS_END}",
    "deepseek_r1 as text": f"{CALLS_BEGIN}{CALL}function{SEPARATOR}{{{{ f.name + '\\n```json\\n' "
    f"+ f.arguments }}}}\n```{CALL_END}{CALLS_END}",
    "deepseek_v3_1": f"{CALLS_BEGIN}{CALL}{{{{ f.name }}}}{SEPARATOR}"
    + DUMPED
    + f"{CALL_END}{CALLS_END}",
    "llama3": '<|end_header_id|>\n\n{"name": "{{ f.name }}", "parameters": '
    "{{ f.arguments | tojson }}}",
    "thinking": "<function>{{ f.name }}</function>{{ '</think>' if false }}",
    "plain": "[TOOL_CALLS]{{ f.name }}{{ f.arguments | tojson }}",
}


@pytest.fixture(scope="module")
def renderer() -> Any:
    made = Renderer()
    yield made
    made.close()


def facts(folder, source, renderer) -> TemplateFacts:
    return facts_of(TemplateFiles(folder, {"default": source}, {}), renderer)


@pytest.mark.parametrize("name", CALLS)
def test_the_parser_is_that_of_the_calls_in_the_history(tmp_path, name, renderer) -> None:
    source = EACH + CONTENT + CALLS[name] + END
    found = facts(tmp_path, source, renderer)
    assert (found.parser, found.shows_tools) == (name.split()[0], True)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("plain", "thinking")])
def test_what_the_template_writes_of_a_call_is_what_the_parser_reads(
    tmp_path, name, renderer
) -> None:
    source = "{{ tools | tojson if tools }}{% for m in messages %}" + CONTENT + CALLS[name]
    source = source.replace("<|end_header_id|>\n\n", "") + "{% endfor %}{% endfor %}"
    function = {"name": "f", "arguments": '{"city": "Oslo"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    template = Template(write_folder(tmp_path, source), renderer=renderer)
    request = msgspec.convert({"messages": messages}, ChatRequest)
    family = resolve(PARSERS, name.split()[0])
    parser = OutputParser(family, {m: m for m in family.markers}, "", {"f": None})
    events = parser.feed(template.render(request)) + parser.finish()
    assert [event.name for event in events if isinstance(event, CallStart)] == ["f"]
    arguments = "".join(event.text for event in events if isinstance(event, CallPart))
    assert json.loads(arguments) == {"city": "Oslo"}


def test_a_call_without_content_is_tried_in_every_form(tmp_path, renderer) -> None:
    """The probe finds R1's calls, which its template shows only if the content is null."""
    shown = CONTENT + CALLS["deepseek_r1"] + "{% endfor %}"
    source = (
        "{% for m in messages %}{% if m.content is none %}" + shown + "{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    found = facts(tmp_path, source, renderer)
    assert (found.parser, found.shows_tools) == ("deepseek_r1", False)


def test_calls_are_tried_without_tools_if_these_are_refused(tmp_path, renderer) -> None:
    source = "{{ raise_exception('no tools') if tools }}" + EACH + CONTENT + CALLS["qwen3"] + END
    assert facts(tmp_path, source, renderer).parser == "qwen3"


@pytest.mark.parametrize(
    ("source", "parser"),
    [
        ('{{ tools }}So: <tool_call>\n{"name": N, "arguments": A}\n</tool_call>', "qwen3"),
        ("{{ tools }}So: <tool_call>\n<function=N>", "qwen3_coder"),
        ("{{ tools }}So: <tool_call>{name}\n<arg_key>{key}</arg_key>", "glm4_7"),
        ('{{ tools }}So: <minimax:tool_call>\n<invoke name="N">', "minimax_m2"),
    ],
)
def test_instructions_count_where_the_history_shows_no_calls(
    tmp_path, source, parser, renderer
) -> None:
    assert facts(tmp_path, source, renderer).parser == parser


@pytest.mark.parametrize(
    ("token", "parser"),
    [
        ("<minimax:tool_call>", "minimax_m2"),
        ("<arg_key>", "glm4_7"),
        (CALL, "deepseek_r1"),
        ("<tool_call>", "qwen3"),
        ("<x>", "thinking"),
    ],
)
def test_added_tokens_count_where_nothing_shows_calls(tmp_path, token, parser, renderer) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": token}]}))
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert facts(tmp_path, source, renderer).parser == parser
    unknown = EACH + CONTENT + CALLS["plain"] + END
    assert facts(tmp_path, unknown, renderer).parser == "plain"  # it shows calls of another kind


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-Coder", "DeepSeek-R1-Distill", "x"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("parser", ["qwen3_coder", "deepseek_v3_1", "llama3"])
def test_names_decide_nothing(tmp_path, name, architecture, parser) -> None:
    folder = tmp_path / name
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(EACH + CONTENT + CALLS[parser] + END)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert parser_of(load_config(str(folder))) == parser
    assert parser_of(load_config(str(folder), ["server.parser=minimax_m2"])) == "minimax_m2"


def test_a_broken_template_is_named(tmp_path, renderer) -> None:
    for source, words in (("{% if %}", "broken: Expected"), ("{{ 'a' * 10**10 }}", "cannot be")):
        with pytest.raises(ConfigError, match=f"the chat template in {tmp_path} .*{words}"):
            facts(tmp_path, source, renderer)
    files = TemplateFiles(tmp_path, {"default": "x", "tool_use": "{% if %}"}, {})
    with pytest.raises(ConfigError, match="the chat template 'tool_use' in"):
        facts_of(files, renderer)


def test_a_template_that_takes_too_much_of_a_message_is_left_to_requests(
    tmp_path, renderer
) -> None:
    source = "{{ 'a' * (messages[0].content | length * 10**9) }}"
    assert facts(tmp_path, source, renderer) == TemplateFacts("plain", arguments_as_text=True)


def test_parts_of_a_tool_result_that_a_template_would_separate_are_joined(
    tmp_path, renderer
) -> None:
    """MiniMax-M2 writes each part of a tool's result as a result, with a line break more."""
    source = (
        "{% for m in messages %}{% if m.content is string %}<r>{{ m.content }}</r>{% else %}"
        "{% for p in m.content or [] %}<r>{{ p.text }}LAST</r>{% endfor %}{% endif %}{% endfor %}"
    )
    both = facts(tmp_path, source.replace("LAST", ""), renderer)
    assert both.reads_parts == {"system", "user", "assistant", "tool"}
    apart = facts(tmp_path, source.replace("LAST", "\n"), renderer)
    assert apart.reads_parts == {"system", "user", "assistant"}
    only = facts(tmp_path, source.replace("{{ m.content }}", ""), renderer)
    assert only.reads_parts == only.needs_parts == both.reads_parts


V3_1 = (
    "{% for m in messages %}<\uff5c{{ m.role }}\uff5c>{{ m.content or '' }}"
    + CONTENT[CONTENT.index("{% for") :]
    + CALLS["deepseek_v3_1"]
    + "{% endfor %}{% endfor %}{% if add_generation_prompt %}<\uff5cAssistant\uff5c>"
    "{{ '<think>' if thinking else '</think>' }}{% endif %}"
)


def test_deepseek_v3_1_gets_tools_although_its_template_ignores_them(tmp_path) -> None:
    folder = write_folder(tmp_path, V3_1)
    renderer = Renderer()
    family = resolve(PARSERS, facts(folder, V3_1, renderer).parser)
    template = Template(folder, family.last_turn, family.tool_template, renderer)
    tool = {"type": "function", "function": {"name": "f", "description": "Do it."}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "8", "tool_call_id": "1"},
    ]

    def prompt(messages, **more) -> Any:
        request = {"messages": messages, "tools": [tool], **more}
        return template.prompt(msgspec.convert(request, ChatRequest))

    first = prompt(messages[:2])
    text = template.tokenizer.decode(first.ids, skip_special_tokens=False)
    assert text.startswith("<|endoftext|>Be kind.\n\n## Tools\n")
    assert "\n### f\nDescription: Do it.\n\nParameters: {}\n" in text
    assert text.endswith("<\uff5cUser\uff5c>hello<\uff5cAssistant\uff5c></think>")
    assert first.turn == "</think>"
    assert prompt(messages[:2], chat_template_kwargs={"thinking": True}).turn == "<think>"
    after = prompt(messages)
    text = template.tokenizer.decode(after.ids, skip_special_tokens=False)
    block = f'{CALL}f{SEPARATOR}{{"a": 1}}{CALL_END}'
    assert f"</think>{CALLS_BEGIN}{block}{block}{CALLS_END}" in text
    assert text.endswith("output\u2581begin\uff5c>8<\uff5ctool\u2581output\u2581end\uff5c>")
    assert after.turn == ""
