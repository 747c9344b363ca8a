"""Options of `nanovllm bench --workload agents`, and loads made of them."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

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


def test_a_span_is_two_numbers() -> None:
    found = CliRunner().invoke(bench, ["--workload", "agents", "--growth", "2:4"])
    assert found.exit_code == 2 and "2:4: write two numbers, as in 200-4000" in found.output
    found = CliRunner().invoke(bench, ["--workload", "agents", "--growth", "2-4.5"])
    assert found.exit_code == 2 and "2-4.5: write whole numbers, as in 200-4000" in found.output


def test_loads_of_agents() -> None:
    """Sessions run all at once unless --concurrency is less. Only given sizes replace defaults."""
    given = dict.fromkeys(("turns", "growth", "answers", "longest", "pauses", "sweep"))
    given |= {"workload": "agents", "temperature": 0.0, "ignore_eos": True, "seed": 3}
    given |= {
        "request_rate": None,
        "shared_len": 500,
        "sessions": 6,
        "concurrency": None,
        "adapters": 2,
    }
    (load,) = loads_of(Options(**given))
    assert load == AgentLoad(
        sessions=6, concurrency=6, shared_len=500, temperature=0.0, seed=3, adapters=2
    )
    two = loads_of(Options(**given | {"sweep": "2,4"}))
    assert [(one.concurrency, one.sessions, one.seed) for one in two] == [(2, 6, 5), (4, 6, 7)]
    (eight,) = loads_of(Options(**given | {"sessions": None}))
    assert (eight.sessions, eight.concurrency) == (8, 8)
