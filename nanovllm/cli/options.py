"""What several commands share: the recipe and what overrides it, and where a record goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from nanovllm.bench.record import of_this_machine, write_to
from nanovllm.config import Config, load_config

Function = Callable[..., Any]
RECIPE_KEYS = {
    "device": "device",
    "tp": "parallel.tp",
    "load_format": "load.format",
    "host": "server.host",
    "port": "server.port",
    "api_key": "server.api_key",
}
json_option = click.option(
    "--json", "path", type=click.Path(path_type=Path), help="write the record here"
)


def recipe_options(function: Function) -> Function:
    """RECIPE, --set, --device, --tp, --load-format."""
    for option in (
        click.option("--load-format", help="auto, safetensors, or dummy (random weights)"),
        click.option("--tp", type=int, help="tensor-parallel ranks"),
        click.option("--device", help="auto, cuda or cpu"),
        click.option(
            "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a recipe key"
        ),
        click.argument("recipe", required=False),
    ):
        function = option(function)
    return function


def config_of(recipe: str | None, overrides: Sequence[str], **flags: object) -> Config:
    """`flags`: by the names of RECIPE_KEYS."""
    return load_config(recipe, overrides, {RECIPE_KEYS[name]: flags[name] for name in flags})


def write_record(path: Path | None, began: datetime, **fields: Any) -> None:  # noqa: ANN401
    """Of what began then and has just ended; nothing without a path."""
    if path is not None:
        took_s = (datetime.now(UTC) - began).total_seconds()
        started_at = began.isoformat(timespec="seconds")
        write_to(path, of_this_machine(started_at=started_at, duration_s=took_s, **fields))
