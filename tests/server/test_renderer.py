"""The render subprocess ends with its parent, and is replaced after it exited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.server.render_task import Rendered, Task
from nanovllm.server.renderer import Renderer
from nanovllm.server.rendering import END, NAME, rendered
from tests.server.serving import eventually
from tests.times import least

EACH = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


def task(source: str = EACH, content: str = "hello", **more: Any) -> Task:
    messages = [{"role": "user", "content": content}]
    return Task(source, {"messages": messages}, more.pop("max_s", 5.0), **more)


def render_processes() -> list[int]:
    """Return the ids of this process's render subprocesses."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(") ")
        except OSError:
            continue
        state, parent = tail.split()[:2]
        if int(parent) == os.getpid() and f"({NAME}" in head and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def processes() -> Callable[[], list[int]]:
    """Return the function that lists the subprocesses of this test: tests before it may have left
    renderers in use.
    """
    others = {*render_processes()}
    return lambda: [pid for pid in render_processes() if pid not in others]


def test_one_process_renders_every_template(renderer, processes) -> None:
    assert renderer.render(task()) == Rendered("user:hello;")
    (pid,) = processes()
    assert renderer.render(task("{{ messages | length }}")) == Rendered("1")
    assert processes() == [pid]
    renderer.close()
    assert processes() == []
    assert renderer.render(task()) == Rendered("user:hello;")  # a new one


def test_a_process_that_was_killed_is_replaced_and_no_prompt_is_lost(renderer, processes) -> None:
    renderer.render(task())
    (pid,) = processes()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: processes() == [])
    assert renderer.render(task()) == Rendered("user:hello;")


def test_signals_for_the_whole_group_do_not_end_it(renderer, processes) -> None:
    """The subprocess ignores SIGTERM and SIGINT, so that a draining server can still render
    prompts.
    """
    renderer.render(task())
    (pid,) = processes()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    assert renderer.render(task()) == Rendered("user:hello;")
    assert processes() == [pid]


def test_after_a_limit_another_process_goes_on(renderer, processes) -> None:
    renderer.render(task())
    (first,) = processes()
    found = renderer.render(task("{{ 'a' * 10**10 }}"))
    assert found == Rendered("it takes more than 96 MiB of memory", "limit")
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    found = renderer.render(task(slow, max_s=0.2))
    assert found == Rendered("it takes longer than 0.2 s", "limit")
    assert renderer.render(task()) == Rendered("user:hello;")
    assert first not in processes() and len(processes()) == 1


def test_long_conversations_may_take_more_memory(renderer) -> None:
    """30 MB of short messages are rendered, since the memory limit grows with the messages."""
    messages = [{"role": "user", "content": "x" * 10}] * 200_000
    found = renderer.render(Task(EACH, {"messages": messages}, 60.0))
    assert (len(found.text), found.error) == (200_000 * 16, "")
    text = "é" * 20_000_000
    found = renderer.render(task(content=text, max_s=60.0))
    assert found == Rendered(f"user:{text};")


def test_threads_get_each_their_own_prompt(renderer, processes) -> None:
    wrong: list[str] = []

    def ask(number: int) -> None:
        for at in range(50):
            content = f"{number}.{at}" * (number * 100 + 1)
            found = renderer.render(task(content=content))
            if found != Rendered(f"user:{content};"):
                wrong.append(found.text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(processes()) == 1


PARENT = """
import time
from nanovllm.server.render_task import Task
from nanovllm.server.renderer import Renderer
renderer = Renderer()
renderer.render(Task("x", {"messages": []}, 5.0))
print(renderer._child._process.pid, flush=True)
time.sleep(60)
"""


def test_the_process_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}/comm").read_text() == f"{NAME}\n"
        parent.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_renderer_that_is_dropped_leaves_no_process(processes) -> None:
    made = Renderer()
    made.render(task())
    assert len(processes()) == 1
    del made
    eventually(lambda: processes() == [])


def test_a_start_costs_little(renderer, processes) -> None:
    def start_s() -> float:
        renderer.close()
        begun = time.monotonic()
        renderer.render(task())
        return time.monotonic() - begun

    assert least(start_s, 3) < 3
    (pid,) = processes()
    status = Path(f"/proc/{pid}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 60 * 1024


# -- rendering, without a process ----------------------------------------------------------------


def test_the_last_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    given = Task(EACH, {"messages": messages}, 5.0, is_continued=True)
    assert rendered(given, 1000) == Rendered("user:a;assistant:b")
    messages[1]["content"] = "b"
    given = Task("{{ messages[0].content }}", {"messages": messages}, 5.0, is_continued=True)
    assert rendered(given, 1000) == Rendered("", "changed")


def test_errors_have_kinds() -> None:
    assert rendered(task("{% if %}"), 1000).error == "broken"
    assert rendered(task("{{ 1 // 0 }}"), 1000).error == "refused"
    assert rendered(task("{{ 'ab' * 8 }}"), 16) == Rendered("ab" * 8)
    found = rendered(task("{{ 'ab' * 8 }}"), 15)
    assert found == Rendered("the prompt has more than 15 characters", "long")
    with pytest.raises(MemoryError):
        rendered(task("{{ 'a' * 10**17 }}"), 1000)


@pytest.mark.parametrize(
    ("given", "as_text", "shown"),
    [
        ('{"a":  1}', False, "{'a': 1}"),
        ('{"a":  1}', True, '{"a":  1}'),
        ({"a": "é"}, True, '{"a": "é"}'),
        ("[1]", False, "[1]"),
        ('{"a": 1', False, "{'a': 1}"),  # as in a truncated call
        ('{"a": 1', True, '{"a": 1'),
        ('{"a": [1, {"b": "x, y', False, "{'a': [1, {'b': 'x, y'}]}"),
        ('{"a": "}", "b": tr', False, "{'a': '}'}"),
        ('{"a": 2, "b', False, "{'a': 2}"),
        ('{"a', False, "{}"),
        ('{"a": "x\\', False, "{}"),
        ("{a: 1}", False, "{a: 1}"),
        ("[" * 500, False, "[" * 500),
        ("Oslo", False, "Oslo"),
        (" null\n", False, "{}"),
        ("null", True, "null"),
    ],
)
def test_arguments_of_past_calls_are_text_or_objects(given, as_text, shown) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    messages = [{"role": "assistant", "content": END, "tool_calls": [call]}]
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    found = rendered(Task(source, {"messages": messages}, 5.0, arguments_as_text=as_text), 1000)
    assert found == Rendered(shown)


@pytest.mark.parametrize("given", ["{a: 1}", "[1]"])
def test_arguments_that_a_template_cannot_iterate_over_are_named(given) -> None:
    source = "{% for k, v in messages[1].tool_calls[1].function.arguments.items() %}{% endfor %}"
    calls = [{"function": {"name": "f", "arguments": one}} for one in ("{}", given)]
    messages = [{"role": "user"}, {"role": "assistant", "tool_calls": calls}]
    found = rendered(Task(source, {"messages": messages}, 5.0), 1000)
    place = "messages[1].tool_calls[1].function.arguments must be a JSON object"
    assert (found.error, found.text[: len(place)]) == ("refused", place)
    assert "has no attribute 'items'" in found.text
    calls[1]["function"]["arguments"] = "{}"
    assert rendered(Task(source, {"messages": messages}, 5.0), 1000) == Rendered("")
