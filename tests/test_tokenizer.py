"""Tokenizers of folders, compared token by token with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from nanovllm.config import ConfigError
from nanovllm.server.detokenize import Detokenizer, Vocabulary
from nanovllm.tokenizer import read_tokenizer, special_ids
from tests.server.tiny_tokenizer import tiny_tokenizer

SIZE = tiny_tokenizer().get_vocab_size()
TEXT = (
    "Again <new> x <later>, <|im_end|><think> y </think> <b><a> the <eos!> <pad!> <x1><x2> <img>"
    " quick <n1><n2>."
)


def entry(content: str, **fields: object) -> dict[str, object]:
    flags = dict(lstrip=False, rstrip=False, single_word=False, normalized=False, special=True)
    return {"content": content, **flags, **fields}


PAD = {"__type": "AddedToken", **entry("<pad!>", lstrip=True)}
del PAD["special"]  # as in files of transformers
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "new tokens, the second with a gap": {
        "added_tokens_decoder": {
            str(SIZE): entry("<new>"),
            str(SIZE + 5): entry("<later>", special=False),
        }
    },
    "in the order of numbers": {
        "added_tokens_decoder": {"1000": entry("<b>"), "999": entry("<a>", rstrip=True)}
    },
    "one of the file becomes special": {"added_tokens_decoder": {"400": entry("<think>")}},
    "a word becomes a token": {"added_tokens_decoder": {"300": entry("the", special=False)}},
    "an end that is no token of the file": {"eos_token": "<eos!>"},
    "one that is an object": {"pad_token": PAD},
    "named, and listed as ordinary": {
        "eos_token": "<eos!>",
        "pad_token": "<pad!>",
        "additional_special_tokens": ["<x1>", "<x2>"],
        "added_tokens_decoder": {"500": entry("<pad!>", special=False)},
    },
    "extra ones by name": {"extra_special_tokens": {"image_token": "<img>"}},
}


def folder_of(folder: Path, settings: dict[str, Any]) -> Path:
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def check(folder: Path) -> Tokenizer:
    """Compare added tokens, a text's ids, and the text of these ids with transformers."""
    reference, mine = PreTrainedTokenizerFast.from_pretrained(folder), read_tokenizer(folder)
    shown = {at: repr(token) for at, token in mine.get_added_tokens_decoder().items()}
    assert shown == {at: repr(token) for at, token in reference.added_tokens_decoder.items()}
    ids = mine.encode(TEXT, add_special_tokens=False).ids
    assert ids == reference(TEXT, add_special_tokens=False)["input_ids"]
    texts = Detokenizer(Vocabulary(mine), skip_special=True)
    text = "".join(map(texts.feed, ids)) + texts.finish()
    assert text == reference.decode(ids, skip_special_tokens=True)
    return mine


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_added_tokens_are_those_of_transformers(tmp_path, settings) -> None:
    check(folder_of(tmp_path, settings))


def test_older_folders_have_files_for_them(tmp_path) -> None:
    folder_of(tmp_path, {})
    ids = {"<n2>": SIZE + 2, "<n1>": SIZE + 1, "<eos!>": SIZE}
    (tmp_path / "added_tokens.json").write_text(json.dumps(ids))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos!>"}))
    mine = check(tmp_path)
    assert {text: mine.token_to_id(text) for text in ids} == ids
    assert "<eos!>" in special_ids(mine) and "<n1>" not in special_ids(mine)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"added_tokens_decoder": {"x": entry("<a>")}}, "added tokens: Expected `int`"),
        ({"added_tokens_decoder": {"5": {"special": True}}}, "missing required field `content`"),
        ({"added_tokens_decoder": [1]}, "added tokens: Expected `object`"),
    ],
)
def test_broken_lists_are_named(tmp_path, settings, says) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer_config.json: {says}|{says}"):
        read_tokenizer(folder_of(tmp_path, settings))


@pytest.mark.parametrize(("text", "says"), [("{", "is not JSON"), ("[1]", "must hold an object")])
def test_broken_settings_are_named(tmp_path, text, says) -> None:
    folder_of(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"tokenizer_config.json {says}"):
        read_tokenizer(tmp_path)
