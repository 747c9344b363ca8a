"""Reading of a checkpoint's tokenizer: tokenizer.json, and tokens added by tokenizer_config.json.

transformers is the reference. Tokens in `added_tokens_decoder` or in settings (eos_token,
pad_token, ...) become added tokens even if tokenizer.json lacks them. The ids in
`added_tokens_decoder` only order the tokens: a new token gets the next free id.

The library is imported on first use: commands check a folder before they load it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from nanovllm.config import NOT_JSON, ConfigError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

SETTINGS = "tokenizer_config.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")


class TokenEntry(Struct, frozen=True):
    """A token of `added_tokens_decoder`, or a setting that is an object."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None  # None: True unless the token is special
    special: bool = False

    def token(self, *, is_named: bool) -> AddedToken:
        from tokenizers import AddedToken

        normalized = not self.special if self.normalized is None else self.normalized
        return AddedToken(
            self.content,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            single_word=self.single_word,
            normalized=normalized,
            special=self.special or is_named,
        )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder. Raise ConfigError with the path of an invalid file."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception, not a subclass
        raise ConfigError(f"{path}: {error}") from None
    tokens = added_tokens(folder, read_object(folder / SETTINGS))
    if tokens:
        tokenizer.add_tokens(tokens)
    return tokenizer


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if it does not exist. Raise ConfigError if invalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold an object")
    return value


def added_tokens(folder: Path, settings: dict[str, Any]) -> list[AddedToken]:
    """Return the tokens to add, in the order of their ids."""
    listed = settings.get("added_tokens_decoder")
    try:
        if listed is not None:
            named = settings
            entries = [
                entry
                for _, entry in sorted(
                    msgspec.convert(listed, dict[int, TokenEntry], strict=False).items()
                )
            ]
        else:  # older folders; transformers reads these files only in this case
            named = settings | read_object(folder / "special_tokens_map.json")
            entries = older_entries(folder, named)
        special = [
            entry for entry in map(special_token, special_values(named)) if entry is not None
        ]
    except NOT_JSON as error:
        raise ConfigError(f"{folder / SETTINGS}: added tokens: {error}") from None
    names = {entry.content for entry in special}
    tokens = [entry.token(is_named=entry.content in names) for entry in entries]
    known = {entry.content for entry in entries}
    return tokens + [one.token(is_named=True) for one in special if one.content not in known]


def older_entries(folder: Path, named: dict[str, Any]) -> list[TokenEntry]:
    """Return the tokens of added_tokens.json, which has only their ids."""
    ids = msgspec.convert(read_object(folder / "added_tokens.json"), dict[str, int])
    special = {one.content for one in map(special_token, special_values(named)) if one is not None}
    ordered = sorted(ids, key=lambda text: ids[text])
    return [TokenEntry(text, special=text in special) for text in ordered]


def special_values(settings: dict[str, Any]) -> list[Any]:
    """Return the unparsed settings of special tokens."""
    values = [settings.get(name) for name in NAMED]
    extra: Any = next((settings[name] for name in EXTRA if settings.get(name)), [])
    values += extra.values() if isinstance(extra, dict) else extra
    return values


def special_token(value: object) -> TokenEntry | None:
    """Return a special token given as its text or as an object; None for other values."""
    if isinstance(value, dict):
        value = msgspec.convert(value, TokenEntry)
        return msgspec.structs.replace(value, special=True)
    return TokenEntry(value, special=True) if isinstance(value, str) and value else None


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of special tokens by text: those that `skip_special_tokens` leaves out.

    Each token is decoded, because a token's flag may differ from the library's behaviour.
    """
    ids = {token.content: at for at, token in tokenizer.get_added_tokens_decoder().items()}
    return {
        text: token_id
        for text, token_id in ids.items()
        if not tokenizer.decode([token_id], skip_special_tokens=True)
    }
