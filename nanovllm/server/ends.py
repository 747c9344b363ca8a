"""Tokens that end a text: the one place that decides them.

They are the union of config.json, generation_config.json, the tokenizer's eos_token, and the
special token with which the chat template ends an assistant's turn: in many checkpoints these
differ. The supervisor computes them once (`Config.eos_ids`). Requests carry them to the scheduler,
the sampler (min_tokens) and the detokenizer, and the engine's grammars end with them.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from nanovllm.config import NOT_JSON, Config, ConfigError
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import ChatMessage, ChatRequest
from nanovllm.server.renderer import Renderer
from nanovllm.server.template import Template
from nanovllm.tokenizer import special_ids

QUESTION, ANSWER = "nanovllm-question", "nanovllm-answer"  # found again in what is rendered


class EosFields(Struct, frozen=True):
    """The fields of config.json and generation_config.json that are read here."""

    eos_token_id: int | list[int] | None = None
    vocab_size: int | None = None


def eos_ids_of(config: Config, template: Template | None = None) -> tuple[int, ...]:
    """Return the ids of all tokens that end a text, in ascending order.

    `template`: of the model's folder, if it is read already. Ids beyond the vocabulary are left
    out. Raise ConfigError that names a broken file.
    """
    if template is None:
        with closing(Renderer()) as renderer:
            return eos_ids_of(config, Template(Path(config.tokenizer_dir), renderer=renderer))
    own = read(Path(config.config_path))
    found = named(own)
    if config.model_dir is not None:
        path = Path(config.model_dir) / "generation_config.json"
        found |= named(read(path)) if path.is_file() else set()
    if template.eos_id is not None:
        found.add(template.eos_id)
    found |= ids_of_turn_ends(template)
    end = template.tokenizer.get_vocab_size() if own.vocab_size is None else own.vocab_size
    return tuple(sorted(token_id for token_id in found if 0 <= token_id < end))


def read(path: Path) -> EosFields:
    try:
        return msgspec.json.decode(path.read_bytes(), type=EosFields)
    except (*NOT_JSON, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None


def named(file: EosFields) -> set[int]:
    ids = file.eos_token_id
    return {ids} if isinstance(ids, int) else set(ids or ())


def ids_of_turn_ends(template: Template) -> set[int]:
    """Return the ids of the special tokens that follow an assistant's text in short conversations.

    Both a last turn and one before a question are looked at, as templates may end them
    differently. A conversation that the template refuses is left out.
    """
    special = special_ids(template.tokenizer)
    question, answer = ChatMessage("user", QUESTION), ChatMessage("assistant", ANSWER)
    turns: list[tuple[str, str]] = []
    for messages in ([question, answer], [question, answer, question]):
        request = ChatRequest(messages=messages, add_generation_prompt=False)
        with suppress(ApiError):
            before, _, after = template.render(request).partition(ANSWER)
            turns.append((before, after))
    ends = {first_of(special, after) for _, after in turns}
    ends |= ends_after_space(special, turns)
    return {special[end] for end in ends if end is not None}


def ends_after_space(special: Collection[str], turns: list[tuple[str, str]]) -> set[str | None]:
    """Return the token that ends turns after spaces or newlines, if there is one.

    It must follow every turn. The last token before the first question begins turns: after a space
    it is the next turn's beginning, and ends none.
    """
    ends = {first_of(special, after.lstrip()) for _, after in turns}
    openings = {last_of(special, before.partition(QUESTION)[0]) for before, _ in turns}
    return ends - openings if len(ends) == 1 else set()


def last_of(special: Collection[str], text: str) -> str | None:
    """Return the special token that comes last in the text."""
    return max((token for token in special if token in text), key=text.rfind, default=None)


def first_of(special: Collection[str], text: str) -> str | None:
    """Return the longest special token that the text begins with."""
    return max((token for token in special if text.startswith(token)), key=len, default=None)
