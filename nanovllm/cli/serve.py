"""`nanovllm serve`: a recipe behind /v1/chat/completions."""

from __future__ import annotations

import sys

import click

from nanovllm import launch, log
from nanovllm.cli.options import recipe_options
from nanovllm.config import load_config


@click.command()
@recipe_options
@click.option("--host", help="address to listen on (default 127.0.0.1)")
@click.option("--port", type=int, help="port to listen on (default 8000; 0 picks a free one)")
@click.option("--api-key", help="require it as a bearer token on every route but /health")
def serve(
    recipe: str | None,
    overrides: tuple[str, ...],
    device: str | None,
    tp: int | None,
    load_format: str | None,
    host: str | None,
    port: int | None,
    api_key: str | None,
) -> None:
    """Serve RECIPE (a YAML file; without one, the embedded demo model)."""
    log.setup()
    flags = {
        "device": device,
        "parallel.tp": tp,
        "load.format": load_format,
        "server.host": host,
        "server.port": port,
        "server.api_key": api_key,
    }
    config = load_config(recipe, overrides, flags)
    try:
        sys.exit(launch.serve(config))
    except launch.EngineDied as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(launch.EXIT_CRASH)
    except launch.Stopped:
        sys.exit(0)
