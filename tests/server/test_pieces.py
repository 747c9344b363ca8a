"""Ids of prompts in pieces: equal to those of the whole text, kept by salt, bounded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from nanovllm.config import DEMO
from nanovllm.server.pieces import LEAST_CHARS, Pieces, pattern_of

PARTS = ["<|im_start|>", "<|im_end|>", "<think>", "<|im_", "\n", " ", "  ", "Hello", "ÄÖ é", "1 2"]


def tokenizer_of(folder: Path = DEMO) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class Counted:
    """A tokenizer whose calls are counted, and its front end."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int = 1 << 20) -> None:
        self.tokenizer, self.texts = tokenizer, list[str]()
        self.pieces = Pieces(tokenizer, self.encode, most_tokens=most_tokens)

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def test_ids_are_those_of_the_whole_text() -> None:
    found, rng = Counted(tokenizer_of()), random.Random(1)
    kept = [" ".join(rng.choices(PARTS[3:], k=600)) for _ in range(4)]
    num_kept = 0
    for _ in range(60):
        parts = rng.choices([*PARTS, *kept], k=12)
        text = "".join(part + rng.choice([*PARTS[:3], ""]) for part in parts)
        ids = found.tokenizer.encode(text, add_special_tokens=False).ids
        found.texts.clear()
        assert found.pieces.encode(text) == ids
        num_kept += len("".join(found.texts)) < len(text)
    assert num_kept > 20


def test_a_conversation_that_comes_back_tokenises_only_what_is_new() -> None:
    found = Counted(tokenizer_of())
    first = "<|im_start|>user\n" + "one two three " * 200 + "<|im_end|>\n"
    second = first + "<|im_start|>user\n" + "four five six " * 200 + "<|im_end|>\n"
    found.pieces.encode(first)
    found.texts.clear()
    found.pieces.encode(second)
    assert sum(map(len, found.texts)) == len(second) - len("user\n" + "one two three " * 200)
    found.texts.clear()
    found.pieces.encode(second, "another salt")
    assert "".join(found.texts) == second


def test_the_least_recently_used_ids_are_dropped() -> None:
    def text_of(word: str) -> str:
        return (word + " ") * LEAST_CHARS

    one = len(Counted(tokenizer_of()).encode(text_of("a")))
    found = Counted(tokenizer_of(), most_tokens=2 * one)
    for word, is_new in [("a", 1), ("b", 1), ("a", 0), ("c", 1), ("a", 0), ("b", 1)]:
        found.texts.clear()
        found.pieces.encode(text_of(word))
        assert len(found.texts) == is_new, word
    found = Counted(tokenizer_of(), most_tokens=one - 1)
    for _ in range(2):
        found.pieces.encode(text_of("a"))
    assert len(found.texts) == 2


@pytest.mark.parametrize("change", ["strips", "prefix", "normalizer", "truncation", "none"])
def test_tokenizers_that_look_across_pieces_get_whole_texts(change: str) -> None:
    tokenizer = tokenizer_of()
    if change == "strips":
        tokenizer.add_tokens([AddedToken("<|cut|>", lstrip=True, normalized=False)])
    elif change == "prefix":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("_")])
    elif change == "truncation":
        tokenizer.enable_truncation(100)
    assert (pattern_of(tokenizer) is None) == (change != "none")
    found = Counted(tokenizer)
    text = "<|im_start|>" + "one two " * LEAST_CHARS + "<|im_end|>"
    found.pieces.encode(text)
    assert (len(found.texts) == 1) == (change != "none")
