"""Options that several commands share: the recipe and what overrides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Function = Callable[..., Any]


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
