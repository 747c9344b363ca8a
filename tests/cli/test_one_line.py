"""Each wrong command line gives one line of error and the exit code 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm import cli

ROOT = Path(__file__).parents[2]


def said(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Return the exit code of the command line."""
    monkeypatch.setattr(sys, "argv", ["nanovllm", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--nope",), "No such option '--nope'."),
        (("serve", "--nope"), "No such option '--nope'."),
        (("serve", "--prt", "1"), "No such option '--prt'."),
        (("serve", "--port", "x"), "Invalid value for '--port': 'x' is not a valid integer."),
        (("serve", "--port", "65536"), "server.port is 65536; it must be between 0 and 65535"),
        (("serve", "--set"), "Option '--set' requires an argument."),
        (("serve", "demo", "more"), "Got unexpected extra argument (more)"),
        (("serve", "--host", ""), "server.host (--host) is empty; leave it out for 127.0.0.1"),
        (("serve", "--device", "\udcff"), r"recipe: a value is '\udcff'; it has a "),
        (("bench", "--api-key", "\udcff"), "--api-key has control characters"),
        (("bench", "--api-key", "a\nb"), "--api-key has control characters"),
        (("bench", "--concurrency", "0"), "Invalid value for '--concurrency': 0 is not in the "
                                          "range x>=1."),
        (("bench", "--num-prompts", "0"), "Invalid value for '--num-prompts': 0 is not in the "
                                          "range x>=1."),
        (("bench", "--temperature", "3"), "Invalid value for '--temperature': 3.0 is not in the "
                                          "range 0<=x<=2."),
        (("bench", "--results-dir", "/dev/null"), "--results-dir /dev/null: no record can be "
                                                  "written there (File exists)"),
        (("bench", "--ignore-eos=1"), "Option '--ignore-eos' does not take a value."),
        (("check-kernels", "--tp", "0"), "Invalid value for '--tp': 0 is not in the range x>=1."),
        (("profile-kv", "--lengths", "0"), "--lengths 0: write numbers from 1, none twice, as in "
                                           "1,4,16,64"),
        (("capture-graphs", "--nope"), "No such option '--nope'."),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line(
    arguments: tuple[str, ...],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said(monkeypatch, *arguments) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.endswith("\n") and errors.count("\n") == 1
    assert errors.startswith(f"error: {line}")  # a hint may follow


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("nope", "No such command 'nope'. The commands are:"),
        ("srve", "No such command 'srve'. Did you mean serve? The commands are:"),
        ("chat", "No such command 'chat'. `nanovllm serve MODEL` serves a page to chat with. The "
                 "commands are:"),
        ("Qwen/Qwen3-8B", "No such command 'Qwen/Qwen3-8B'. The commands are:"),
    ],
)  # fmt: skip
def test_an_unknown_command_lists_ours(
    typed: str, first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, typed) == 2
    output, errors = capsys.readouterr()
    lines = errors.splitlines()
    assert output == "" and lines[0] == f"error: {first}"
    assert [line.split()[0] for line in lines[1:]] == [*cli.COMMANDS]
    assert all(re.fullmatch(r"  \S+ +[A-Z].*\.", line) for line in lines[1:])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), " [OPTIONS] COMMAND [ARGS]..."),
        (("-h",), " [OPTIONS] COMMAND [ARGS]..."),
        (("serve", "--help"), " serve [OPTIONS] [RECIPE]"),
        (("--version",), ", version "),
    ],
)
def test_help_is_still_to_be_had(
    arguments: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not said(monkeypatch, *arguments)
    output, errors = capsys.readouterr()
    assert told in output.splitlines()[0] and errors == ""


def test_a_reader_who_leaves_and_an_interrupt_are_no_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "nanovllm", "--help"]
    run = subprocess.run(command, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert (run.returncode, run.stderr) == (1, b"")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "resolve", interrupted)
    assert said(monkeypatch, "serve") == "aborted"  # Python writes it and exits with 1
    assert capsys.readouterr().err == "\n"
