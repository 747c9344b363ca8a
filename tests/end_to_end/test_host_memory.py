"""A server whose cache is smaller than its conversations, with pages in host memory."""

from __future__ import annotations

from typing import Any

from tests.end_to_end.demo_server import asked, start

SMALL = ("--device", "cpu", "--set", "cache.pages=24", "--set", "cache.page_tokens=16")
QUESTIONS = "My name is {}. " * 12 + "What is nanovllm?", "And what is a page?"


def test_conversations_come_back_from_host_memory() -> None:
    """Three conversations take turns. Under another salt, their last answers are computed anew."""
    server = start(*SMALL, "--set", "cache.host_gib=0.1")
    client = server.client()

    def answer(messages: list[Any], salt: str) -> tuple[str | None, int]:
        body = asked("", temperature=0, max_tokens=16) | {"messages": messages}
        found = client.chat.completions.create(**body, extra_body={"cache_salt": salt})
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        cached = found.usage.prompt_tokens_details.cached_tokens or 0
        return found.choices[0].message.content, cached

    past: dict[str, list[Any]] = {name: [] for name in ("Ada", "Grace", "Edsger")}
    latest = {}
    for question in QUESTIONS:
        for name, messages in past.items():
            content = question.format(*[name] * 12)
            messages.append({"role": "user", "content": content})
            latest[name] = answer(messages, "a")
            messages.append({"role": "assistant", "content": latest[name][0]})
    for name, messages in past.items():
        text, cached = latest[name]
        assert text and cached >= 96
        assert answer(messages[:-1], f"not {name}") == (text, 0)
    assert server.stop() == 0
