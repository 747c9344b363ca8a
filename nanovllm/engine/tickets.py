"""Tickets of a decode server's requests, from their arrival until they have started or ended."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from nanovllm.config import Recipe
from nanovllm.engine.executor import Executor
from nanovllm.kv.keys import PageKeys
from nanovllm.transfer.remote_pages import RemotePages
from nanovllm.wire import Generate, StepOutput


@dataclass(frozen=True, slots=True)
class Tickets:
    """Offers tickets of requests to `pages`, and settles them."""

    pages: RemotePages
    page_tokens: int

    def offer(self, request: Generate) -> None:
        """Offer the request's ticket. One token of the prompt is always left to compute."""
        tokens = array("i")
        tokens.frombytes(request.prompt)
        keys = PageKeys(tokens, request.salt, self.page_tokens)
        most = max(len(tokens) - 1, 0) // self.page_tokens
        self.pages.offer(request.request_id, request.ticket, keys.full, most)

    def published(self, output: StepOutput) -> None:
        """Settle the tickets of requests that have started, ended or been refused."""
        for started in output.started:
            self.pages.settle(started.request_id)
        for finished in output.finished:
            self.pages.settle(finished.request_id)
        for refused in output.refused:
            self.pages.settle(refused.request_id)


def tickets_of(executor: Executor, recipe: Recipe) -> Tickets | None:
    """Return the tickets of a decode server; None for other servers. `recipe` is resolved."""
    if executor.remote is None:
        return None
    return Tickets(executor.remote, int(recipe.cache.page_tokens))
