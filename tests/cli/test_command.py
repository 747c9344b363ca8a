"""The click classes of all commands: their help, and the detection of other programs' options."""

from __future__ import annotations

import re

import click
import pytest

from nanovllm import cli
from nanovllm.cli.command import options_of
from nanovllm.registry import resolve
from tests.cli.test_one_line import said


@pytest.mark.parametrize("command", [*cli.COMMANDS])
def test_help_has_groups_sentences_and_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not said(monkeypatch, command, "--help")
    sections = re.split(r"\n(?=[A-Z][\w ]+:\n)", capsys.readouterr().out)
    titles = [section.split(":")[0] for section in sections[1:]]
    assert titles[-2:] == ["Options", "Example"] and len(titles) > 2
    assert sections[-1].split("\n")[1].startswith(f"  nanovllm {command} ")
    found = resolve(cli.COMMANDS, command)
    for param in found.params:
        if isinstance(param, click.Option):
            assert re.fullmatch(r"[A-Z].*[.)]", param.help or ""), param.opts


def test_values_and_own_options_are_no_options_of_others() -> None:
    own = {"--set": True, "--quick": False, "-h": False}
    line = ["--set", "--max-len", "--quick", "x", "-a", "-1", "--b=", "-", "--", "--c"]
    assert [*options_of(line, own)] == [("-a", "-1"), ("--b", "")]
