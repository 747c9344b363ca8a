"""Click classes of all commands: grouped options, an example, hints for other servers' options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from nanovllm.cli import other_flags
from nanovllm.config import ConfigError

Function = Callable[..., Any]
OTHERS = "Options"  # group of options without one


class GroupedOption(click.Option):
    """An option that `--help` shows under a heading."""

    def __init__(self, *args: Any, group: str = OTHERS, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:  # noqa: ANN401
        """Return nothing: help texts are sentences, and errors name the range of a number."""
        return {}


def option(*names: str, group: str = OTHERS, **settings: Any) -> Callable[[Function], Function]:  # noqa: ANN401
    return click.option(*names, cls=GroupedOption, group=group, **settings)


class Command(click.Command):
    """A command whose help ends with an example.

    `others` are options of other servers, which are refused with their counterparts here.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401
        example: str,
        others: other_flags.Table,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*args, **kwargs)
        self.example = example
        self.others = others

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {
            name: not (isinstance(param, click.Option) and (param.is_flag or param.count))
            for param in self.get_params(ctx)
            for name in (*param.opts, *param.secondary_opts)
        }
        faults = []
        for typed, value in options_of(args, own):
            if (answer := other_flags.answer(typed, value, self.others)) is not None:
                faults.append(f"{typed}: {answer}")
        if faults:
            raise ConfigError("; ".join(faults))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            line = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if line is not None:
                groups.setdefault(getattr(param, "group", OTHERS), []).append(line)
        groups[OTHERS] = groups.pop(OTHERS)  # last; it contains `--help`
        for title, lines in groups.items():
            with formatter.section(title):
                formatter.write_dl(lines)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example"):
            formatter.write(f"{'':{formatter.current_indent}}{self.example}\n")


def options_of(args: Sequence[str], own: dict[str, bool]) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a command line that are not in `own`, each with its value or None.

    `own` maps this command's options to True if they take a value. A dash with several letters is
    one option, as in `-tp 2`.
    """
    at = 0
    while at < len(args) and args[at] != "--":
        typed, equals, value = args[at].partition("=")
        at += 1
        following = args[at] if at < len(args) else "-"
        if typed in own:
            at += own[typed] and not equals
        elif typed.startswith("-") and len(typed) > 1:
            is_number = following[:1] == "-" and following[1:].isdigit()
            at += is_number and not equals
            is_value = is_number or not following.startswith("-")
            yield typed, value if equals else following if is_value else None
