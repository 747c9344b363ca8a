"""Messages become the prompt that the template intends; template errors are the client's."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from nanovllm.config import DEMO, ConfigError
from nanovllm.registry import resolve
from nanovllm.server.errors import ApiError
from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.base import CallPart, CallStart
from nanovllm.server.parsers.machine import OutputParser
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.render_task import Rendered, Task
from nanovllm.server.renderer import Renderer
from nanovllm.server.template import Template
from tests.server.tiny_tokenizer import write_folder


def request(messages, **more) -> ChatRequest:
    return msgspec.convert({"messages": messages, **more}, ChatRequest)


def hello(**more) -> ChatRequest:
    return request([{"role": "user", "content": "hello"}], **more)


def rendered(tmp_path, source: str, chat: ChatRequest) -> str:
    return Template(write_folder(tmp_path, source)).render(chat)


def test_a_prompt_is_rendered_and_encoded_with_its_special_tokens(tmp_path) -> None:
    template = Template(write_folder(tmp_path))
    prompt = template.prompt(hello())
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert template.tokenizer.decode(prompt.ids, skip_special_tokens=False) == text
    assert prompt.ids.count(template.tokenizer.token_to_id("<|im_start|>")) == 2
    assert prompt.turn == ""
    assert template.eos_id == template.tokenizer.token_to_id("<|im_end|>")


def test_the_models_turn_is_read_from_the_prompts_end(tmp_path) -> None:
    template = Template(write_folder(tmp_path), resolve(PARSERS, "qwen3").last_turn)
    thinking = hello(chat_template_kwargs={"enable_thinking": True})
    assert template.prompt(thinking).turn == "<think>\n"
    assert template.prompt(hello(reasoning_effort="low")).turn == "<think>\n"
    assert template.prompt(hello(reasoning_effort="none")).turn == ""
    said = request([{"role": "user", "content": "what does <think> do?"}])
    assert template.prompt(said).turn == ""


def test_an_effort_says_whether_to_think_unless_the_kwargs_do(tmp_path) -> None:
    source = "{{ enable_thinking }} {{ reasoning_effort }}"
    kwargs = {"enable_thinking": False, "reasoning_effort": "x"}
    assert rendered(tmp_path, source, hello(reasoning_effort="low")) == "True low"
    assert rendered(tmp_path, source, hello(reasoning_effort="none")) == "False none"
    chat = hello(reasoning_effort="high", chat_template_kwargs=kwargs)
    assert rendered(tmp_path, source, chat) == "False x"


def test_parts_roles_and_reasoning_reach_the_template_in_one_form(tmp_path) -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": "c", "reasoning": "r1"},
        {"role": "assistant", "content": None, "reasoning_content": "r2"},
        {"role": "function", "content": "d", "tool_call_id": "id7", "name": "f"},
    ]
    got = json.loads(rendered(tmp_path, "{{ messages | tojson }}", request(messages)))
    assert got == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "r1"},
        {"role": "assistant", "content": "", "reasoning_content": "r2"},
        {"role": "tool", "content": "d", "name": "f", "tool_call_id": "id7"},
    ]


CALLS = "{% for m in messages %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        # serialises: needs the object
        (f"{CALLS}{{{{ c.function.arguments | tojson }}}}{END}", '{"a":  1}', '{"a": 1}'),
        (f"{CALLS}{{{{ c.function.arguments | tojson }}}}{END}", {"a": 1}, '{"a": 1}'),
        (f"{CALLS}{{{{ c.function.arguments | tojson }}}}{END}", None, "{}"),
        # distinguishes strings: the model's own text, so that its pages are found again
        (
            f"{CALLS}{{% set arguments = c.function.arguments %}}"
            f"{{% if arguments is string %}}{{{{ arguments }}}}{{% else %}}"
            f"{{{{ arguments | tojson }}}}{{% endif %}}{END}",
            '{"a":  1}',
            '{"a":  1}',
        ),
        # concatenates: needs text
        (f"{CALLS}{{{{ '=' + c.function.arguments }}}}{END}", {"a": 1}, '={"a": 1}'),
    ],
)
def test_past_calls_have_the_arguments_the_template_expects(
    tmp_path, source, given, expected
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert rendered(tmp_path, source, request(messages)) == expected


def test_json_in_prompts_is_plain_and_tools_are_hidden_when_not_wanted(tmp_path) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "a < b & 'ü'"}}
    loop = "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    source = "{{ tools | tojson }}" + loop
    assert rendered(tmp_path, source, hello(tools=[tool])) == (
        '[{"type": "function", "function": {"name": "f", "description": "a < b & \'ü\'"}}]01'
    )
    assert rendered(tmp_path, source, hello(tools=[tool], tool_choice="none")) == "null01"


def test_the_client_cannot_replace_what_the_server_gives(tmp_path) -> None:
    kwargs = {"messages": [], "add_generation_prompt": False, "bos_token": "x", "colour": "red"}
    source = "{{ messages | length }}{{ add_generation_prompt }}{{ bos_token }}{{ colour }}"
    chat = hello(chat_template_kwargs=kwargs)
    assert rendered(tmp_path, source, chat) == "1True<|endoftext|>red"


def test_the_last_message_can_be_continued(tmp_path) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well, "}]
    template = Template(write_folder(tmp_path), resolve(PARSERS, "qwen3").last_turn)
    chat = request(messages, continue_final_message=True)
    assert template.render(chat).endswith("<|im_start|>assistant\nWell, ")
    assert template.prompt(chat).turn == "Well, "
    messages[1]["content"] = "assistant"  # occurs in the lines before and after it too
    chat = request(messages, continue_final_message=True)
    assert template.render(chat).endswith("<|im_end|>\n<|im_start|>assistant\nassistant")
    messages[1]["content"] = "Well, "
    assert template.render(request(messages, add_generation_prompt=False)).endswith(
        "Well, <|im_end|>\n"
    )
    with pytest.raises(ApiError, match="cannot be continued"):
        rendered(tmp_path, "{{ messages[0].content }}", chat)


@pytest.mark.parametrize("said", ["im", "e", "|", "_end", "<|im_", "\n", " ", "Well,\n\n", "x.  "])
def test_what_is_continued_may_read_as_what_ends_a_turn(tmp_path, said) -> None:
    """A continued prompt ends with the message, whose white space at the end is kept."""
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    chat = request(messages, continue_final_message=True)
    begin = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    template = Template(write_folder(tmp_path))
    assert template.render(chat) == begin + said
    assert template.tokenizer.decode(template.prompt(chat).ids, False) == begin + said
    stripping = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert rendered(tmp_path, stripping, chat) == f"[{said.strip()}][{said.lstrip()}"


ASKS_FOR_TEXT = "{% for m in messages %}{{ m.content }};{% if '</think>' in m.content %}{% endif %}"


def test_a_call_without_content_has_none_in_the_prompt(tmp_path) -> None:
    """Calls may have content null, which templates search, print or append to."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    answered = request([*messages, {"role": "tool", "content": None, "tool_call_id": "1"}])
    assert rendered(tmp_path, ASKS_FOR_TEXT + "{% endfor %}", answered) == ";;"
    del messages[0]["content"]
    assert rendered(tmp_path, "{{ '=' + messages[0].content }}", request(messages)) == "="


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [('{"a": "\\ud83d\\ude00 \\udc00"}', "a=\U0001f600 ?;"), ('{"a": "\\udfff"}', "a=?;")],
)
def test_half_a_surrogate_pair_in_arguments_is_replaced(tmp_path, arguments, printed) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    source = f"{CALLS}{{% for k, v in c.function.arguments.items() %}}{{{{ k }}}}={{{{ v }}}};"
    template = Template(write_folder(tmp_path, source + "{% endfor %}" + END + "{{ [] | tojson }}"))
    prompt = template.prompt(request(messages))
    assert template.tokenizer.decode(prompt.ids) == printed + "[]"


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": ' * 100_000])
def test_arguments_nested_too_deeply_stay_text(tmp_path, arguments) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    source = f"{CALLS}{{{{ (c.function.arguments | tojson) | length }}}}{END}"
    length = len(json.dumps(arguments))
    assert rendered(tmp_path, source, request(messages)) == str(length)


END_OF_SENTENCE = "<\uff5cend\u2581of\u2581sentence\uff5c>"
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
SILENTLY = FOREVER.replace("x", "")
TREE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
R1 = "{% for m in messages %}<\uff5c{{ m.role }}\uff5c>{{ m.content }}{% endfor %}"


def test_deepseek_r1_gets_tools_although_its_template_ignores_them(tmp_path) -> None:
    family = resolve(PARSERS, "deepseek_r1")
    source = R1 + "<\uff5cAssistant\uff5c><think>\n"
    template = Template(write_folder(tmp_path, source), family.last_turn, family.tool_template)
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render(hello()) == "<\uff5cuser\uff5c>hello<\uff5cAssistant\uff5c><think>"
    first = template.prompt(hello(tools=[tool]))
    text = template.render(hello(tools=[tool]))
    assert (
        text.startswith("<|endoftext|># Tools\n") and '\n{"type": "function", "function":' in text
    )
    assert text.endswith("<\uff5cUser\uff5c>hello<\uff5cAssistant\uff5c><think>\n")
    assert first.turn == "<think>\n"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "<think>", "tool_call_id": "1"},
        {"role": "tool", "content": "8", "tool_call_id": "1"},
    ]
    said = request(messages, tools=[tool])
    text = template.render(said)
    assert text.startswith("<|endoftext|>Be kind.\n\n# Tools")
    wrote, results = text[text.index("<\uff5cUser") :].split(END_OF_SENTENCE)
    block = 'function<\uff5ctool\u2581sep\uff5c>f\n```json\n{"a": 1}\n```'
    assert wrote.count(block) == 2
    assert results.startswith("<\uff5ctool\u2581outputs\u2581begin\uff5c>")
    assert results.endswith(
        "8<\uff5ctool\u2581output\u2581end\uff5c><\uff5ctool\u2581outputs\u2581end\uff5c>"
    )
    assert template.prompt(said).turn == ""
    # the parser reads calls as the template shows them
    parser = OutputParser(family, {m: m for m in family.markers}, "", {})
    events = parser.feed(wrote.partition("Assistant\uff5c>")[2]) + parser.finish()
    assert [e.name for e in events if isinstance(e, CallStart)] == ["f", "f"]
    assert [e.text for e in events if isinstance(e, CallPart)] == ['{"a": 1}'] * 2


MEMORY = "more than 96 MiB of memory"
CHARS = "the prompt has more than [0-9]+ characters"
LONG = "longer than 0.3 s"
DEEP = "maximum recursion depth exceeded"
# n is 0 for an empty message: a template that is harmless at start, but not in a request.
TOO_MUCH = {
    "a text times a number": ("{{ 'a' * (n * 10**9) }}", MEMORY),
    "a list times a number": ("{{ ([n] * (n * 10**9)) | length }}", MEMORY),
    "a long prompt": ("{{ 'a' * (n * 10**6) }}", CHARS),
    "many pieces": ("{% for i in range(9999) %}{{ 'a' * (n * 200) }}{% endfor %}", CHARS),
    "a large range": ("{{ range(n * 10**9) | list | length }}", "Range too big"),
    "a range in a loop": ("{% for i in range(n * 10**9) %}{% endfor %}", "Range too big"),
    "nested loops": (
        "{% for i in range(n * 9999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        LONG + "|" + CHARS,
    ),
    "nested loops without output": (
        "{% for i in range(n * 9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        LONG,
    ),
    "a tree of macros": (
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(n * 20) }}",
        LONG,
    ),
    "endless recursion": (
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{% if n %}{{ f(n) }}{% endif %}",
        DEEP,
    ),
    "a width": ("{{ '%*d' % (n * 10**9, 1) }}", MEMORY),
    "a width as text": ("{{ ('%' ~ n ~ '00000000d') % 1 }}", MEMORY),
    "format": ("{{ '{:>{w}}'.format('x', w=n * 10**9) }}", MEMORY),
    "the filter format": ("{{ '%*d' | format(n * 10**9, 1) }}", MEMORY),
    "the filter center": ("{{ 'x' | center(n * 10**9) }}", MEMORY),
    "center": ("{{ 'x'.center(n * 10**9) }}", MEMORY),
    "ljust": ("{{ 'x'.ljust(n * 10**9) }}", MEMORY),
    "rjust": ("{{ 'x'.rjust(n * 10**9) }}", MEMORY),
    "zfill": ("{{ 'x'.zfill(n * 10**9) }}", MEMORY),
    "expandtabs": ("{{ '\t'.expandtabs(n * 10**8) }}", MEMORY),
    "replace": ("{{ ('a' * (n * 10**6)).replace('a', 'b' * 10**6) }}", MEMORY),
    "join": ("{{ ('b' * 10**6).join('a' * (n * 10**6)) }}", MEMORY),
    "the filter join": ("{{ ('a' * (n * 10**6)) | join('b' * 10**6) }}", MEMORY + "|" + LONG),
    "indent": ("{{ ('a\n' * (n * 10**6)) | indent(n * 10**6) }}", MEMORY),
    "split": ("{{ ('a b ' * (n * 10**7)).split() | length }}", MEMORY),
    "a power": ("{{ (10 + n) ** (10 ** (10 * n)) }}", LONG + "|" + MEMORY),
    "a power of powers": ("{{ 7 ** (7 ** (n * 3)) ** 7 }}", LONG + "|" + MEMORY + "|digits"),
    "doubled by ~": (
        "{% set x = namespace(t='a') %}{% for i in range(n * 20) %}"
        "{% set x.t = x.t ~ x.t %}{% endfor %}{{ x.t }}",
        MEMORY,
    ),
    "doubled lists": (
        "{% set x = namespace(t=[1]) %}{% for i in range(n * 20) %}"
        "{% set x.t = x.t + x.t %}{% endfor %}{{ x.t | length }}",
        MEMORY,
    ),
    "a small list that is large when it is printed": (
        "{% set x = namespace(t=[1]) %}{% for i in range(n * 20) %}"
        "{% set x.t = [x.t, x.t] %}{% endfor %}{{ x.t }}",
        MEMORY + "|" + LONG,
    ),
    "the same as JSON": (
        "{% set x = namespace(t=[1]) %}{% for i in range(n * 20) %}"
        "{% set x.t = [x.t, x.t] %}{% endfor %}{{ x.t | tojson }}",
        MEMORY + "|" + LONG,
    ),
    "words": ("{{ lipsum(n * 10**6) }}", LONG + "|" + MEMORY + "|" + CHARS),
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_template_cannot_take_memory_or_time(tmp_path, name, monkeypatch, renderer) -> None:
    monkeypatch.setattr("nanovllm.server.template.MAX_RENDER_S", 0.3)
    monkeypatch.setattr("nanovllm.server.probe.MAX_RENDER_S", 0.3)
    source, words = TOO_MUCH[name]
    source = "{% set n = messages[0].content | length %}ok" + source
    template = Template(write_folder(tmp_path, source), renderer=renderer)
    before, begin = peak_kib(), time.monotonic()
    with pytest.raises(
        ApiError, match=f"messages: the chat template cannot render them: .*({words})"
    ):
        template.render(hello())
    assert time.monotonic() - begin < 20
    assert peak_kib() - before < 200 * 1024
    assert template.render(request([{"role": "user", "content": ""}])).startswith("ok")


def peak_kib() -> int:
    """Return the maximum memory of this process and its ended children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds)


EQUAL = (
    "{% set x = namespace(t=[1], u=[1]) %}{% for i in range(n * 20) %}"
    "{% set x.t = [x.t, x.t] %}{% set x.u = [x.u, x.u] %}{% endfor %}{{ x.t == x.u }}"
)


def test_what_holds_the_interpreter_is_ended_from_outside(tmp_path, renderer) -> None:
    """A comparison that no exception interrupts is ended by the CPU limit of the process."""
    source = "{% set n = messages[0].content | length %}" + EQUAL
    task = Task(source, {"messages": [{"role": "user", "content": "hello"}]}, 0.2)
    assert renderer.render(task) == Rendered("it takes longer than 0.2 s", "limit")
    task = Task("fine", {"messages": []}, 0.2)
    assert renderer.render(task) == Rendered("fine")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'a' * 10**10 }}", MEMORY),
        ("{{ 'x' * 70000000 }}", MEMORY + "|" + CHARS),
        (FOREVER, LONG + "|" + CHARS),
        (SILENTLY, LONG),
        (TREE, LONG),
    ],
)
def test_a_template_that_always_takes_too_much_ends_the_start(
    tmp_path, source, words, monkeypatch
) -> None:
    monkeypatch.setattr("nanovllm.server.probe.MAX_RENDER_S", 0.3)
    with pytest.raises(
        ConfigError, match=f"even for one message without text, .*({words})"
    ) as caught:
        Template(write_folder(tmp_path, source))
    assert len(str(caught.value).splitlines()) == 1


def test_dates_can_be_asked_for(tmp_path) -> None:
    assert rendered(tmp_path, "{{ strftime_now('%Y') }}", hello()) >= "2025"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x.y }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
    ],
)
def test_what_a_template_refuses_is_a_bad_request(tmp_path, source) -> None:
    with pytest.raises(ApiError, match="the chat template cannot render them") as caught:
        rendered(tmp_path, source, hello())
    assert (caught.value.status, caught.value.param) == (400, "messages")


DATED = "{{ messages[0].content }}, {{ date | upper if date is string else date + 1 }}"


@pytest.mark.parametrize(
    ("kwargs", "source"),
    [
        ({"date": [1, 2]}, DATED),  # a list and 1
        ({"date": {"of": "today"}}, DATED),
        ({"date": None}, DATED),
        ({"messages": [], "thinking": {"budget": 5}}, "{{ thinking + 1 if thinking }}"),
        ({"raise_exception": 1, "date": []}, DATED.replace("date + 1", "raise_exception('no')")),
        ({"times": 10**9}, "{% for _ in range(times or 1) %}{% endfor %}"),
    ],
)
def test_a_kwarg_that_the_template_refuses_is_named(tmp_path, kwargs, source) -> None:
    source = "{% set date = date | default('today') %}" + source
    assert rendered(tmp_path, source, hello()) is not None
    with pytest.raises(
        ApiError, match="chat_template_kwargs: the chat template cannot render them"
    ) as caught:
        rendered(tmp_path, source, hello(chat_template_kwargs=kwargs))
    assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")
    assert caught.value.code == "template_error"


def test_messages_are_named_that_the_template_refuses_whatever_the_kwargs(tmp_path) -> None:
    source = "{{ date + 1 if date }}{{ raise_exception('roles must alternate') }}"
    for kwargs in ({"date": [1]}, {"date": 1}, {}):
        with pytest.raises(ApiError, match=r"^messages: .*: roles must alternate$") as caught:
            rendered(tmp_path, source, hello(chat_template_kwargs=kwargs))
        assert (caught.value.status, caught.value.param) == (400, "messages")


def test_an_empty_prompt_is_refused(tmp_path) -> None:
    with pytest.raises(ApiError, match="the prompt is empty"):
        Template(write_folder(tmp_path, " {{- '' -}} ")).prompt(hello())


def test_templates_are_found_where_checkpoints_keep_them(tmp_path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one"}))
    assert Template(tmp_path).render(hello()) == "one"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert Template(tmp_path).render(hello()) == "two"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer_config.json", "[]", "must hold an object"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("chat_template.jinja", "{% if %}", "chat template in .* is broken"),
        ("chat_template.jinja", "", "chat template in .* is empty"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, message) -> None:
    (write_folder(tmp_path) / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        Template(tmp_path)


def test_a_missing_template_is_named(tmp_path) -> None:
    (write_folder(tmp_path) / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        Template(tmp_path)


def test_the_demo_models_own_template() -> None:
    template = Template(DEMO, resolve(PARSERS, "qwen3").last_turn)
    assert template.render(hello()) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert template.prompt(hello(reasoning_effort="high")).turn == "<think>\n"
    assert template.prompt(hello(reasoning_effort="none")).turn == "<think>\n\n</think>\n\n"


def test_the_api_process_starts_without_torch_or_transformers() -> None:
    code = (
        "import sys; import nanovllm.server.main; from nanovllm.config import DEMO;"
        "from nanovllm.server.template import Template; Template(DEMO);"
        "print([m for m in ('torch', 'transformers', 'numpy', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
