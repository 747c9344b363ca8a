"""Set of tokens that end a text.

Its sources differ in many checkpoints. They are config.json and generation_config.json, the
tokenizer's eos_token, and the special token with which the chat template ends an assistant's turn.
The supervisor computes it once (`Config.eos_ids`). Requests carry it to the scheduler, the sampler
(min_tokens) and the detokenizer, and the engine's grammars end with these tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from nanovllm.checkpoint import text_fields
from nanovllm.config import NOT_JSON, Config, ConfigError
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import ChatMessage, ChatRequest
from nanovllm.server.renderer import Renderer
from nanovllm.server.template import Template
from nanovllm.tokenizer import special_ids

T = TypeVar("T", bound=Struct)

QUESTION, ANSWER = "nanovllm-question", "nanovllm-answer"  # markers to find in the rendered text


class EosFields(Struct, frozen=True):
    """Fields read from config.json and generation_config.json."""

    eos_token_id: int | list[int] | None = None
    vocab_size: int | None = None


def eos_ids_of(config: Config, template: Template | None = None) -> tuple[int, ...]:
    """Return the ids of all tokens that end a text, in ascending order.

    `template` is that of the model's folder, if it has been read already. Ids outside the
    vocabulary are left out. Raise ConfigError with the name of a broken file.
    """
    if template is None:
        with closing(Renderer()) as renderer:
            return eos_ids_of(config, Template(Path(config.tokenizer_dir), renderer=renderer))
    own = read(Path(config.config_path), EosFields)
    ids = eos_ids_in(own)
    if config.model_dir is not None:
        path = Path(config.model_dir) / "generation_config.json"
        ids |= eos_ids_in(read(path, EosFields)) if path.is_file() else set()
    if template.eos_id is not None:
        ids.add(template.eos_id)
    ids |= ids_of_turn_ends(template)
    end = template.tokenizer.get_vocab_size() if own.vocab_size is None else own.vocab_size
    return tuple(sorted(token_id for token_id in ids if 0 <= token_id < end))


def read(path: Path, schema: type[T]) -> T:
    """Return a JSON file of the checkpoint. Raise ConfigError with the path of an invalid one."""
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return msgspec.convert(text_fields(raw), schema)
    except (*NOT_JSON, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None


def eos_ids_in(file: EosFields) -> set[int]:
    ids = file.eos_token_id
    return {ids} if isinstance(ids, int) else set(ids or ())


def ids_of_turn_ends(template: Template) -> set[int]:
    """Return the ids of the special tokens that follow an assistant's text in short conversations.

    The assistant's turn is rendered both as the last one and before a question, since templates may
    end these differently. A conversation that the template refuses is skipped.
    """
    special = special_ids(template.tokenizer)
    question = ChatMessage("user", QUESTION)
    answer = ChatMessage("assistant", ANSWER)
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

    It must follow every turn. The last special token before the first question opens a turn. After
    a space it therefore belongs to the next turn and ends none.
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
