"""Templates render as transformers' apply_chat_template renders them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.renderer import Renderer
from nanovllm.server.template import Template
from tests.server import tiny_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "a < b & 'ü'",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "name": "f", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "  thanks \n"},
]
EACH = "{%- for m in messages %}"
SOURCES = {
    "roles": EACH + "\n[{{ m.role }}] {{ m.content | trim }}\n{%- endfor %}",
    "generation": EACH
    + "{% if m.role == 'assistant' %}\n  {% generation %}\n{{ m.content }}\n{% endgeneration %}\n"
    "{% else %}\n{{- m['content'] -}}\n{% endif %}{% endfor %}",
    "generation in one line": EACH
    + "{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}",
    "a variable of generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}"
    "{% endgeneration %}{{ x }}",
    "loop controls": EACH + "{% if m.role == 'tool' %}{% continue %}{% endif %}"
    "{% if loop.index > 4 %}{% break %}{% endif %}{{ m.content }};{% endfor %}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=4) }}",
    "json in other forms": "{{ tools | tojson(indent=2, separators=(',', ':')) }}"
    "{{ tools | tojson(ensure_ascii=True) }}{{ messages | tojson(sort_keys=True) }}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}"
    "|{{ sep_token }}|{{ cls_token }}|{{ mask_token }}",
    "what is defined": "{{ documents is defined }}{{ documents is none }}{{ tools is defined }}"
    "{{ custom_tools is defined }}{{ enable_thinking is defined }}{{ add_generation_prompt }}",
    "namespaces": "{% set n = namespace(a=1, b='x') %}" + EACH + "{% set n.a = n.a + 1 %}"
    "{% endfor %}{{ n.a }}{{ n.b }}",
    "a namespace of a dictionary": "{% set n = namespace({'a': 1}, b=2) %}{{ n.a + n.b }}",
    "dictionaries": "{{ dict(a=1, b=2) | tojson }}{{ dict.fromkeys(['a'], 3) | items | list }}",
    "macros": "{% macro show(m, sep=': ') %}{{ m.role }}{{ sep }}{{ caller() if caller }}"
    "{{ m.content }}{% endmacro %}{% for m in messages %}{% call show(m) %}!{% endcall %}"
    "{{ show(m, sep='=') }}{% endfor %}",
    "arguments": EACH + "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    "slices and filters": "{{ messages[::-1] | map(attribute='role') | join(',') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ (messages | last).content.split(' ')[0].upper() }}{{ 7 // 2 ~ 2 ** 5 }}",
    "blocks and blanks": "{% if true %}\n    x\n    {% if true %}\n  y\n"
    "    {% endif %}\n{% endif %}\n\n",
    "the year": "{{ strftime_now('%Y-%m') }}",
}


@pytest.fixture(scope="module")
def renderer() -> Any:
    made = Renderer()
    yield made
    made.close()


def rendered(folder, messages, renderer, **more) -> str:
    request = msgspec.convert({"messages": messages, **more}, ChatRequest)
    return Template(folder, renderer=renderer).render(request)


def expected(folder, messages, **more) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    options = {"tokenize": False, "add_generation_prompt": True, **more}
    return str(tokenizer.apply_chat_template(messages, **options))


def write_folder(folder, source=""):
    """Write a folder for transformers, which requires a token's type in its object."""
    tiny_tokenizer.write_folder(folder, source)
    settings_of(folder, bos_token={"__type": "AddedToken", "content": "<|endoftext|>"})
    return folder


def settings_of(folder, **more) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.mark.parametrize("name", SOURCES)
def test_a_template_renders_as_in_transformers(tmp_path, name, renderer) -> None:
    write_folder(tmp_path, SOURCES[name] + "{{ tools | tojson if tools }}")
    settings_of(tmp_path, sep_token="<|im_start|>", cls_token="<|im_end|>")
    for tools in (None, [TOOL]):
        given = {} if tools is None else {"tools": tools}
        assert rendered(tmp_path, MESSAGES, renderer, **given) == expected(
            tmp_path, MESSAGES, tools=tools
        ), name


def test_documents_and_options_reach_the_template(tmp_path, renderer) -> None:
    write_folder(tmp_path, "{% for d in documents %}{{ d.title }}={{ d.text }}{% endfor %}{{ x }}")
    more = {"documents": [{"title": "T", "text": "what"}], "x": 3}
    assert rendered(tmp_path, MESSAGES, renderer, chat_template_kwargs=more) == expected(
        tmp_path, MESSAGES, **more
    )


NAMED = {
    "default": "plain {{ messages[-1].content }}",
    "tool_use": "with tools {{ tools | tojson }}",
    "rag": "not used",
}


def by_settings(folder) -> None:
    (folder / "chat_template.jinja").unlink()
    listed = [{"name": name, "template": source} for name, source in NAMED.items()]
    settings_of(folder, chat_template=listed)


def by_files(folder) -> None:
    (folder / "chat_template.jinja").write_text(NAMED["default"])
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
    settings_of(folder, chat_template="files come first")


@pytest.mark.parametrize("write", [by_settings, by_files])
def test_named_templates(tmp_path, write, renderer) -> None:
    write(write_folder(tmp_path))
    plain = rendered(tmp_path, MESSAGES, renderer)
    assert plain == expected(tmp_path, MESSAGES) == "plain   thanks \n"
    tools = rendered(tmp_path, MESSAGES, renderer, tools=[TOOL])
    assert tools == expected(tmp_path, MESSAGES, tools=[TOOL])
    assert tools.startswith('with tools [{"type": "function"')
    unwanted = rendered(tmp_path, MESSAGES, renderer, tools=[TOOL], tool_choice="none")
    assert unwanted == plain


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def test_content_parts_stay_parts_where_the_template_reads_them(tmp_path, renderer) -> None:
    messages = [
        {"role": "system", "content": PARTS},
        {"role": "user", "content": "text"},
        {"role": "user", "content": PARTS},
    ]
    write_folder(tmp_path, BOTH)
    got = rendered(tmp_path, messages, renderer)
    assert got == expected(tmp_path, messages) == "<a><b\n>text<a><b\n>"


def test_text_becomes_a_part_where_the_template_reads_nothing_else(tmp_path, renderer) -> None:
    only = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    write_folder(tmp_path, only)
    as_parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    got = rendered(tmp_path, [{"role": "user", "content": "hello"}], renderer)
    assert got == expected(tmp_path, as_parts) == "<hello>"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}|{% endfor %}",
        "{% for m in messages %}{{ m.content | trim + '|' }}{% endfor %}",
        "{% for m in messages %}{{ m.content + '|' }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson }}|{% endfor %}",
    ],
)
def test_parts_are_joined_where_the_template_reads_text(tmp_path, source, renderer) -> None:
    write_folder(tmp_path, source)
    got = rendered(tmp_path, [{"role": "user", "content": PARTS}], renderer)
    assert got in ("a\nb\n|", "a\nb|", '"a\\nb\\n"|')


def test_a_part_can_be_continued(tmp_path, renderer) -> None:
    write_folder(tmp_path, BOTH.replace("{% endfor %}{% endif %}", "{% endfor %}.{% endif %}"))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PARTS}]
    got = rendered(tmp_path, messages, renderer, continue_final_message=True)
    assert got == "x<a><b\n"


def test_reasoning_has_the_name_that_the_template_reads(tmp_path, renderer) -> None:
    messages = [{"role": "assistant", "content": "c", "reasoning": "r"}]
    for name in ("reasoning_content", "reasoning", "thinking"):
        write_folder(tmp_path, f"{{{{ messages[0].{name} }}}}{{{{ messages[0]['{name}'] }}}}")
        assert rendered(tmp_path, messages, renderer) == "rr"


def test_tools_that_the_template_does_not_show_are_refused(tmp_path, renderer) -> None:
    write_folder(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(
        ApiError, match="tools: the model's chat template does not support tools"
    ) as caught:
        rendered(tmp_path, MESSAGES, renderer, tools=[TOOL])
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert caught.value.code == "unsupported_tools"
    assert "hello" in rendered(tmp_path, MESSAGES, renderer, tools=[TOOL], tool_choice="none")
    assert "hello" in rendered(tmp_path, MESSAGES, renderer, tools=[])


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ dict.__class__ }}{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_a_template_reaches_no_python(tmp_path, source, renderer) -> None:
    write_folder(tmp_path, source)
    with pytest.raises(ApiError, match="the chat template cannot render them"):
        rendered(tmp_path, MESSAGES, renderer)
