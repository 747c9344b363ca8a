"""The command line: names, loaded when used. Starting `nanovllm --help` imports no torch."""

from __future__ import annotations

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


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found: click.Command | None = resolve(COMMANDS, cmd_name) if cmd_name in COMMANDS else None
        return found


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nanovllm")
def cli() -> None:
    """An LLM inference server."""


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, never a traceback."""
    for fd in range(3):  # a closed one would become the next file or socket that is opened
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    try:
        sys.exit(cli(sys.argv[1:] or ["--help"], standalone_mode=False))
    except (ConfigError, click.ClickException) as error:
        said = str(error)
        if isinstance(error, click.ClickException):  # click has a usage and a hint before it
            said = " ".join(error.format_message().split())
        click.echo(f"error: {said}", err=True)
        sys.exit(2)
    except click.Abort:  # Ctrl-C
        sys.exit("aborted")
