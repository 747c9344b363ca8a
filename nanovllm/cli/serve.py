"""`nanovllm serve`: a recipe behind /v1/chat/completions."""

from __future__ import annotations

import sys
from typing import Any

import click

from nanovllm import launch, log
from nanovllm.cli.options import config_of, recipe_options


@click.command()
@recipe_options
@click.option("--host", help="address to listen on (default 127.0.0.1)")
@click.option("--port", type=int, help="port to listen on (default 8000; 0 picks a free one)")
@click.option("--api-key", help="require it as a bearer token on every route but /health")
def serve(**recipe: Any) -> None:  # noqa: ANN401
    """Serve RECIPE (a YAML file; without one, the embedded demo model)."""
    log.setup()
    config = config_of(**recipe)
    try:
        sys.exit(launch.serve(config))
    except launch.EngineDied as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(launch.EXIT_CRASH)
    except launch.Stopped:
        sys.exit(0)
