"""The command line: commands by name, imported on first use. The module does not import torch."""

from __future__ import annotations

import difflib
import os
import sys

import click

from nanovllm.config import ConfigError
from nanovllm.registry import resolve

COMMANDS = {
    "serve": "nanovllm.cli.commands:serve",
    "bench": "nanovllm.cli.bench:bench",
    "check-kernels": "nanovllm.cli.check_kernels:check_kernels",
    "capture-graphs": "nanovllm.cli.commands:capture_graphs",
    "profile-kv": "nanovllm.cli.commands:profile_kv",
}


# Commands of other projects, and their counterparts here.
ELSEWHERE = {
    **dict.fromkeys(("run", "start", "launch", "launch_server", "server", "api_server"),
                    "`nanovllm serve MODEL` serves a model."),
    **dict.fromkeys(("chat", "complete", "generate", "play"),
                    "`nanovllm serve MODEL` serves a page to chat with."),
    **dict.fromkeys(("pull", "download"), "`nanovllm serve MODEL` downloads what it needs."),
    **dict.fromkeys(("bench_serving", "benchmark"), "`nanovllm bench` measures a server."),
    **dict.fromkeys(("list", "ls", "models"), "`nanovllm serve --help` explains MODEL."),
    **dict.fromkeys(("version", "collect-env"), "`nanovllm --version` shows the version."),
    "run-batch": "Requests go to `nanovllm serve` over HTTP.",
    "help": "`nanovllm --help` shows this list.",
}  # fmt: skip


class UnknownCommand(click.ClickException):
    """The first argument is not a command. The message lists the commands, one per line."""


class LazyGroup(click.Group):
    """The commands, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None = (
            resolve(COMMANDS, cmd_name) if cmd_name in COMMANDS else None
        )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raise UnknownCommand if the first argument is not a command."""
        if (name := args[0]) in COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = ELSEWHERE.get(name) or (f"Did you mean {near[0]}?" if near else "")
        lines = [f"No such command {name!r}." + (f" {hint}" if hint else "") + " The commands are:"]
        for known in COMMANDS:
            command = self.get_command(ctx, known)
            assert command is not None
            lines.append(f"  {known:15} {command.get_short_help_str(80)}")
        raise UnknownCommand("\n".join(lines))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nanovllm")
def cli() -> None:
    """Serve and measure language models. Start with `nanovllm serve`, which needs no model."""


def main() -> None:
    """Run the command line. A user error prints one message, and the exit code is 2."""
    for fd in range(3):  # otherwise the next opened file or socket would get a closed number
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    try:
        sys.exit(cli(sys.argv[1:] or ["--help"], standalone_mode=False))
    except (ConfigError, click.ClickException) as error:
        message = str(error)
        if isinstance(error, UnknownCommand):
            message = error.message
        elif isinstance(error, click.ClickException):  # its message may have several lines
            message = " ".join(error.format_message().split())
        click.echo(f"error: {message}", err=True)
        sys.exit(2)
    except click.Abort:  # Ctrl-C
        sys.exit("aborted")
