"""Served model: names and limits, tokenizer, chat template and sampling defaults.

Read once at start from the model's files and the engine's `Ready`. Only `adapters` changes later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from nanovllm.config import Config
from nanovllm.registry import resolve
from nanovllm.server.detokenize import Vocabulary
from nanovllm.server.ends import eos_ids_of
from nanovllm.server.errors import ApiError
from nanovllm.server.generation import sampling_defaults
from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.base import Family, Schemas
from nanovllm.server.parsers.machine import OutputParser
from nanovllm.server.probe import parser_of
from nanovllm.server.protocol import ChatRequest, parse_request
from nanovllm.server.ranges import ranges
from nanovllm.server.template import Template
from nanovllm.wire import Ready


class Served:
    def __init__(self, config: Config, ready: Ready) -> None:
        """Read the tokenizer, which is slow. Raise ConfigError."""
        self.name = ready.model
        self.names = list(dict.fromkeys([*config.model_names, self.name]))  # the Hub id first
        self.paths = config.model_paths  # accepted as names, but not listed
        self.adapters = dict(ready.adapters)  # folders by name; these are further models
        self.created = int(time.time())
        self.max_model_tokens = ready.max_model_tokens
        self.vocab_size = ready.vocab_size
        server, speculate = config.recipe.server, config.recipe.speculate
        role = config.recipe.transfer
        self.is_prefill = role is not None and role.role == "prefill"
        self.ranges = ranges(
            ready.max_model_tokens,
            raise_priority=server.raise_priority,
            max_queue=config.recipe.schedule.max_queue,
        )
        self.writes_by_chance = speculate is not None and speculate.writes_by_chance
        self.family: Family = resolve(PARSERS, parser_of(config))
        self.template = Template(
            Path(config.tokenizer_dir), self.family.last_turn, self.family.tool_template
        )
        self.vocabulary = Vocabulary(self.template.tokenizer, self.family.markers)
        # Tokens of the tokenizer for which the model has no embedding: id -> text.
        tokens = self.template.tokenizer.get_vocab(with_added_tokens=True)
        beyond = sorted((i, text) for text, i in tokens.items() if i >= self.vocab_size)
        self.beyond = dict(beyond)
        self.reasoning_content = server.reasoning_content
        self.defaults = sampling_defaults(config)
        eos_ids = config.eos_ids
        if eos_ids is None:
            eos_ids = eos_ids_of(config, self.template)
        self.eos_ids = frozenset(token_id for token_id in eos_ids if token_id < self.vocab_size)

    def parser(
        self, turn: str, schemas: Schemas | None, *, is_spelled: bool, mends: bool = False
    ) -> OutputParser:
        """Return a parser for this model's family. The arguments are those of `OutputParser`."""
        marks = self.vocabulary.marks
        return OutputParser(self.family, marks, turn, schemas, is_spelled=is_spelled, mends=mends)

    def check_tokens(self, field: str, ids: Sequence[int]) -> None:
        """Raise ApiError if the text has a token that is not in the model's vocabulary."""
        if not self.beyond or max(ids, default=0) < self.vocab_size:
            return
        token_id = next(token_id for token_id in ids if token_id >= self.vocab_size)
        text = (
            f"{field}: the tokenizer's token {self.beyond[token_id]!r} (id {token_id}) is outside "
            f"the model's vocabulary, whose largest id is {self.vocab_size - 1}"
        )
        raise ApiError(400, text, param=field, code="invalid_value")

    def warnings(self) -> list[str]:
        """Return warnings about the model's files, for the log."""
        if not self.beyond:
            return []
        first, text = next(iter(self.beyond.items()))
        return [
            f"{len(self.beyond)} tokens of the tokenizer, the first one {text!r} (id {first}), "
            f"are outside the model's vocabulary of {self.vocab_size}: "
            "requests that contain them are refused"
        ]

    def request(self, body: bytes) -> ChatRequest:
        """Parse a body and check that each field is in this model's range. Raise ApiError."""
        return parse_request(
            body,
            model=self.names[0],
            vocab_size=self.vocab_size,
            allowed=self.ranges,
            other_names=self.names[1:],
            paths=self.paths,
            adapters=list(self.adapters),
        )

    def adapter_of(self, request: ChatRequest) -> str:
        """Return the name of the adapter that a request names, or an empty string.

        It may have been unloaded since the name was checked. Then the engine refuses the request,
        with RefusalKind.NO_ADAPTER.
        """
        model = request.model
        if not model or model in self.names or model in self.paths:
            return ""
        return model
