"""Subprocess that renders chat templates.

A template is a program that comes with a checkpoint. The operating system limits it here: to 5 s of
CPU time, and to memory in proportion to the messages.

Decision: a process, not checks in the sandbox. Multiplication, widths, joins and powers could be
checked one by one. Comparing nested lists or a filter written in C could not be, and a thread
cannot be stopped. The process costs 0.1 s at start, 25 MB, and some 0.1 ms for each prompt.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from multiprocessing.connection import Connection as Pipe
from typing import Any

import jinja2
import msgspec

from nanovllm.own_process import num_pages, set_limit, set_name
from nanovllm.server.render_task import Rendered, Task
from nanovllm.server.sandbox import environment

NAME = "nanovllm-render"
SPARE_BYTES = 96 << 20  # memory for a template, plus for each byte of the messages:
BYTES_PER_BYTE = 32
SPARE_CHARS = 4 << 20  # characters of a prompt, plus BYTES_PER_BYTE for each byte of the messages
MAX_PROMPT_CHARS = 1 << 26
CLOSERS = {"{": "}", "[": "]"}
MAX_DEPTH = 100  # of JSON that is completed
MAX_ENDS = 20  # places at which completion is tried
SPARE_S = 1  # seconds of CPU time before the process is killed if the exception did not stop it
END = "\udfff"  # marks the end of a continued message; a lone surrogate, which clients cannot send


class TooSlowError(BaseException):
    """Raised by the timer. A BaseException, so that a template cannot catch it."""


class _LongError(Exception): ...


def work(descriptor: int) -> None:
    """Main function of the subprocess: render each task until the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent closes the pipe
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _too_slow)
    set_name(NAME)
    set_limit(resource.RLIMIT_CORE, 0)
    decode = msgspec.json.Decoder(Task).decode
    base = num_pages(0) * resource.getpagesize()  # of address space
    pipe = Pipe(descriptor)
    with contextlib.suppress(EOFError, OSError):
        while True:
            body = pipe.recv_bytes()
            set_limit(resource.RLIMIT_AS, base + SPARE_BYTES + BYTES_PER_BYTE * len(body))
            answer = answered(body, decode)
            set_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
            pipe.send_bytes(msgspec.msgpack.encode(answer))
            if answer.error == "limit":
                return


def answered(body: bytes, decode: Callable[[bytes], Task]) -> Rendered:
    """Return the prompt or an error, within the task's limits."""
    max_s = 0.0
    try:
        task = decode(body)
        max_s = task.max_s
        spent = os.times()
        set_limit(resource.RLIMIT_CPU, int(spent.user + spent.system + max_s + 1) + SPARE_S)
        signal.setitimer(signal.ITIMER_PROF, max_s)
        most = min(MAX_PROMPT_CHARS, SPARE_CHARS + BYTES_PER_BYTE * len(body))
        return rendered(task, most)
    except TooSlowError:
        text = f"it takes longer than {max_s:g} s"
    except MemoryError:
        text = f"it takes more than {SPARE_BYTES >> 20} MiB of memory"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Rendered(text, "limit")


def rendered(task: Task, max_chars: int) -> Rendered:
    try:
        template = _compiled(task.source)
    except MemoryError:
        raise
    except Exception as error:  # jinja's, and the Python compiler's
        return Rendered(str(error), "broken")
    messages = task.options["messages"]
    unusable = _shape_calls(messages, as_text=task.arguments_as_text)
    continued = ""
    if task.is_continued:
        continued = _mark_end(messages[-1])
    try:
        text = _within(template.generate(task.options), max_chars)
    except MemoryError:
        raise
    except _LongError as error:
        return Rendered(str(error), "long")
    except Exception as error:  # a template may raise anything for a client's values
        text = str(error) or type(error).__name__
        if unusable:
            text = f"{unusable} must be a JSON object ({text})"
        return Rendered(_clean(text.replace(END, "") if task.is_continued else text), "refused")
    if task.is_continued:
        *before, _ = text.split(END)
        text = "".join(before)
        if not before or not text.rstrip().endswith(continued.strip()):
            return Rendered("", "changed")
    return Rendered(_clean(text))


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def _within(pieces: Iterable[str], max_chars: int) -> str:
    text: list[str] = []
    num_chars = 0
    for piece in pieces:
        text.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise _LongError(f"the prompt has more than {max_chars} characters")
    return "".join(text)


def _mark_end(message: dict[str, Any]) -> str:
    """Append END to the message's text, and return the original text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + END
        return content
    text: str = content[-1]["text"]
    content[-1]["text"] = text + END
    return text


def _shape_calls(messages: list[dict[str, Any]], *, as_text: bool) -> str:
    """Convert the arguments of all past calls.

    Return the place of arguments that a template cannot iterate over, "" if there are none.
    """
    unusable = ""
    for at, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            _shape_arguments(call["function"], as_text=as_text)
            if not as_text and not isinstance(call["function"]["arguments"], dict):
                unusable = f"messages[{at}].tool_calls[{number}].function.arguments"
    return unusable


def _shape_arguments(function: dict[str, Any], *, as_text: bool) -> None:
    """Convert the arguments of a past call to text, or to an object if they are JSON.

    A client may send a truncated call back. Templates that iterate then get its readable part, and
    no arguments for null.
    """
    arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and not as_text:
        for text in closable(arguments):
            with contextlib.suppress(ValueError, RecursionError):
                value = {} if text.strip() == "null" else json.loads(text)
                function["arguments"] = value if isinstance(value, dict) else arguments
                return


def closable(text: str) -> Iterator[str]:
    """Yield the text and, if it is truncated, completions of it as JSON, the longest first."""
    yield text
    closers = ""
    is_string = False
    is_escaped = False
    ends: deque[tuple[int, str]] = deque(maxlen=MAX_ENDS)
    for at, character in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif is_string:
            is_escaped = character == "\\"
            is_string = character != '"'
        elif character in CLOSERS:
            closers = CLOSERS[character] + closers
            ends.append((at + 1, closers))
        elif closers and character == closers[0]:
            closers = closers[1:]
        elif character == ",":
            ends.append((at, closers))
        else:
            is_string = character == '"'
        if len(closers) > MAX_DEPTH:
            return
    if closers:
        yield text + ('"' if is_string else "") + closers
        for end, closers in reversed(ends):
            yield text[:end] + closers


def _clean(text: str) -> str:
    """Return the text with lone surrogates replaced. Arguments may contain them."""
    return text.encode(errors="replace").decode()


def _too_slow(*_: object) -> None:
    raise TooSlowError
