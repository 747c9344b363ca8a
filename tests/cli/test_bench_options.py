"""Options of `nanovllm bench --workload agents`, and loads made of them."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import asdict

from nanovllm.bench.agents import AgentLoad
from nanovllm.cli.bench import bench
from nanovllm.cli.bench_options import Options, loads_of
from nanovllm.config import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "agents", "--input-len", "5"], "sizes of its own; --input-len has no"),
        (["--sessions", "5"], "--sessions needs --workload agents"),
        (["--offline", "--workload", "agents"], "--workload agents needs a server: drop --offline"),
        (["--workload", "agents", "--sessions", "2", "--sweep", "1,4"], "at most --sessions"),
    ],
)
def test_senseless_options_of_agents_are_refused(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(bench, arguments).exception
    assert isinstance(error, ConfigError) and message in str(error)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--request-rate", "nan", "nan is not a number"),
        ("--burstiness", "nan", "nan is not a number"),
        ("--burstiness", "inf", "inf is not in the range"),
        ("--range-ratio", "nan", "nan is not a number"),
        ("--range-ratio", "1", "1.0 is not in the range"),
        ("--temperature", "-nan", "-nan is not a number"),
    ],
)
def test_numbers_are_in_their_range(option: str, value: str, message: str) -> None:
    found = CliRunner().invoke(bench, [f"{option}={value}"])
    assert found.exit_code == 2
    assert f"Invalid value for '{option}': {message}" in found.output


def test_a_span_is_two_numbers() -> None:
    found = CliRunner().invoke(bench, ["--workload", "agents", "--growth", "2:4"])
    assert found.exit_code == 2 and "2:4: write two numbers, as in 200-4000" in found.output
    found = CliRunner().invoke(bench, ["--workload", "agents", "--growth", "2-4.5"])
    assert found.exit_code == 2 and "2-4.5: write whole numbers, as in 200-4000" in found.output


def test_loads_of_agents() -> None:
    """Sessions run all at once unless --concurrency is less. Only given sizes replace defaults."""
    typed = ["--workload", "agents", "--temperature", "0", "--seed", "3", "--shared-len", "500"]
    typed += ["--adapters", "2"]
    (load,) = loads_of(options(*typed, "--sessions", "6"))
    assert load == AgentLoad(
        sessions=6, concurrency=6, shared_len=500, temperature=0.0, seed=3, adapters=2
    )
    two = loads_of(options(*typed, "--sessions", "6", "--sweep", "2,4"))
    assert [(one.concurrency, one.sessions, one.seed) for one in two] == [(2, 6, 5), (4, 6, 7)]
    (eight,) = loads_of(options(*typed))
    assert (eight.sessions, eight.concurrency) == (8, 8)


def options(*typed: str) -> Options:
    """Return the values of a command line, as `nanovllm bench` makes them."""
    return Options(**bench.make_context("bench", [*typed]).params)


def test_options_have_the_names_and_types_of_the_command_line() -> None:
    typed = ["demo", "--start", "--set", "a=1", "--set", "b=2", "--tp", "2", "--growth", "20-40"]
    found = options(*typed)
    assert (found.recipe, found.overrides, found.tp) == ("demo", ("a=1", "b=2"), 2)
    assert (found.growth, found.num_prompts, found.warmup) == ((20, 40), None, None)
    assert msgspec.convert(asdict(found), Options, strict=True) == found
