"""SIGTERM or SIGHUP to a server: answers may finish, and the log counts those that were cut off."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from types import FrameType, SimpleNamespace
from typing import Any

import httpx
import pytest

from nanovllm import launch
from nanovllm.config import load_config
from tests.bench.test_online import free_port
from tests.end_to_end.demo_server import start
from tests.end_to_end.test_operation import BODY, ROOT, SERVE, ask, served, take_hangups


def test_answers_may_finish_for_a_minute_unless_the_recipe_says_less() -> None:
    assert load_config(None).recipe.server.shutdown_s == 60
    run = subprocess.run([*SERVE, "--help"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "server.shutdown_s seconds (60)" in " ".join(run.stdout.split())


@pytest.mark.parametrize("is_cut", [True, False])
def test_the_log_counts_the_answers_that_were_cut(is_cut: bool) -> None:
    """Two streams take a second, two others longer than the server's time to shut down."""
    more = ("--set", "server.shutdown_s=4") if is_cut else ()
    server = start("paper", "--set", "paper.tokens_per_s=20", *more)
    with ExitStack() as stack:
        lines = []
        for num_tokens in (30, 30, *(2000, 2000) * is_cut):
            body = BODY | {"stream": True, "max_tokens": num_tokens, "ignore_eos": True}
            client = stack.enter_context(httpx.Client(timeout=90))
            asking = client.stream("POST", f"{server.url}/v1/chat/completions", json=body)
            reading = stack.enter_context(asking).iter_lines()
            lines.append((next(reading), reading))
        server.process.terminate()
        ends = ["\n".join(rest) for _, rest in lines]
    assert server.process.wait(30) == 0
    num_cut = 2 * is_cut
    assert ["shutting_down" in end for end in ends] == [False, False, *[True] * num_cut]
    log = "".join(server.lines)
    level = "warning" if is_cut else "info"
    assert f"{level} server stopped worker=0 cut={num_cut}\n" in log
    assert re.search(
        rf"info server draining open={2 + num_cut} limit_s={4 if is_cut else 60}\.", log
    )


def test_a_closed_terminal_lets_requests_finish() -> None:
    """It sends SIGHUP to all processes, and so may the shell, after its own."""
    port = free_port()
    how: dict[str, Any] = {"start_new_session": True, "preexec_fn": take_hangups}
    with (
        served(port, "--set", "paper.tokens_per_s=20", **how) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        body = BODY | {"stream": True, "max_tokens": 40, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            for _ in range(2):
                os.killpg(process.pid, signal.SIGHUP)
                time.sleep(0.6)
            text = "\n".join([first, *lines])
        assert text.count('"finish_reason":"length"') == 1 and "shutting_down" not in text
        assert process.wait(20) == 0


def test_nohup_keeps_a_server_whose_terminal_closes() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    port = free_port()
    with served(port, start_new_session=True, preexec_fn=ignore) as process:
        os.killpg(process.pid, signal.SIGHUP)
        time.sleep(1.0)
        assert ask(f"http://127.0.0.1:{port}").status_code == 200
        process.terminate()
        assert process.wait(20) == 0


def test_a_signal_between_any_two_lines_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler runs in the main thread, which may hold a lock. Then an alarm ends the test."""
    monkeypatch.setattr(launch, "TICK_S", 0.001)
    alive: Any = SimpleNamespace(lost=lambda: "", processes=[])
    for nth in range(40):
        num_lines = 0

        def interrupt(frame: FrameType, event: str, _: object, nth: int = nth) -> Any:
            nonlocal num_lines
            if event == "line":
                num_lines += 1
                if num_lines == 1 + nth:
                    signal.raise_signal(signal.SIGTERM)
            return interrupt

        with launch.interruptible() as signalled:
            alarm = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for itself"))
            signal.setitimer(signal.ITIMER_REAL, 5)
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                assert launch.watch(alive, alive, signalled) == 0
            finally:
                sys.settrace(before)
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, alarm)
            assert signalled.yes and num_lines > nth
