"""The soak test itself, for seconds: it passes a good server and fails a changed answer."""

from __future__ import annotations

import asyncio

from tests.end_to_end.demo_server import Server
from tests.load.soak.questions import asked, questions
from tests.load.soak.run import Soak

SHORT = ("leave_streams", "leave_requests", "leave_many_choices", "malformed_bodies", "connects",
         "distinct_schemas", "heavy_schemas", "pipelines", "same_request_id", "foreign_pages",
         "forbidden_heads", "early_refusals")  # fmt: skip


def test_some_seconds_beside_abusers(server: Server) -> None:
    unsteady = asked("Which recipes are there?", temperature=2, n=8)
    asks = [*questions()[1::13], unsteady]
    soak = Soak(server.url, server.process.pid, 4, asks=asks, abuses=SHORT)
    asyncio.run(soak.run(1.5))
    assert soak.problems
    for problem in soak.problems:
        assert problem.startswith(
            f"question {len(asks) - 1} ('Which recipes are there?') different"
        )
    told, metrics = soak.told(), soak.metrics()
    assert metrics["equal"] >= len(asks) - 1 and metrics["different"] >= 1
    assert (
        metrics["refused"] == metrics["failed"] == metrics["nanovllm:grammar_matchers_after"] == 0
    )
    assert sum(told["abuses"].values()) >= 2 and told["questions"] == len(asks)
    assert metrics["nanovllm-engine_rss_mib_after"] > 50
    assert len(told["mib_by_second"]["nanovllm-engine"]) >= 2
