"""GET /debug/steps?since=N&engine=K: an engine's latest steps after N, as JSON.

GET /debug/experts?engine=K: the number of tokens routed to each expert, as lines of JSON.

The fields are those of look.Steps and look.Step, but `slots` is an object of requests by slot and
`decodes` a list of slots. A step omits those that equal those of the step before.
"""

from __future__ import annotations

import asyncio
from array import array
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict

from nanovllm.config import Server
from nanovllm.look import Steps
from nanovllm.server.asgi import JSON, Scope, Writer
from nanovllm.server.engines import Engines
from nanovllm.server.errors import ApiError, bad_value
from nanovllm.server.page_files import Handler, is_shown, page_files

DEBUG = "/debug/"  # paths with this prefix need the API key
LINES = b"application/x-ndjson"  # several lines are not one JSON document
ANSWER_S = 5.0  # seconds for the engine's reading thread, which does not wait for steps
NO_STORE = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


def page_handlers(engines: Engines, server: Server) -> dict[str, Handler]:
    """Return handlers by path: those of the page and of /debug, or none if the page is off."""
    if not is_shown(server):
        return {}
    experts = partial(send_expert_load, engines)
    return {**page_files(), f"{DEBUG}steps": DebugSteps(engines), f"{DEBUG}experts": experts}


async def send_expert_load(engines: Engines, scope: Scope, writer: Writer) -> None:
    """Respond with one line for each layer with experts. Raise ApiError (404) if there are none."""
    load = engines.clients[_number(scope, "engine", len(engines.clients) - 1)].stats.experts
    if load is None:
        text = "there is no load of experts: the model has none, or no token has been computed yet"
        raise ApiError(404, text, code="no_experts")
    writer.respond(200, LINES, load.lines(), NO_STORE)


class DebugSteps:
    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    async def __call__(self, scope: Scope, writer: Writer) -> None:
        """Respond with the steps. Raise ApiError: 400 for a bad field, 503 without an answer."""
        clients = self._engines.clients
        since = _number(scope, "since", 1 << 53)
        at = _number(scope, "engine", len(clients) - 1)
        gone = ApiError(503, "the engine does not respond", code="engine_failed")
        if clients[at].is_lost:
            raise gone
        answer: asyncio.Future[Steps] = asyncio.get_running_loop().create_future()
        clients[at].look(since, lambda steps: None if answer.done() else answer.set_result(steps))
        try:
            steps = await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError:
            raise gone from None
        ready = clients[at].ready
        sizes = {"num_slots": ready.num_slots, "num_pages": ready.num_pages}
        body = {"engine": at, "engines": len(clients), **sizes, **as_json(steps)}
        writer.respond(200, JSON, msgspec.json.encode(body), NO_STORE)


def _number(scope: Scope, name: str, most: int) -> int:
    """Return a number from the query, 0 if it is missing."""
    fields = dict(part.partition("=")[::2] for part in scope["query_string"].decode().split("&"))
    text = fields.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise bad_value(name, f"a whole number from 0 to {most}", text)
    return int(text)


def as_json(steps: Steps) -> dict[str, Any]:
    """Return the body without the sizes."""
    slots = decodes = b""
    listed = []
    for step in steps.steps:
        row = asdict(step)
        del row["slots"], row["decodes"]
        if step.slots != slots:
            row["slots"] = _owners(step.slots)
        if step.decodes != decodes:
            row["decodes"] = array("i", step.decodes).tolist()
        row["rows"] = len(step.decodes) // 4
        slots = step.slots
        decodes = step.decodes
        listed.append(row)
    return {**asdict(steps), "slots": _owners(steps.slots), "steps": listed}


def _owners(slots: bytes) -> dict[int, int]:
    return {slot: owner for slot, owner in enumerate(array("q", slots)) if owner >= 0}
