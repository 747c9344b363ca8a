"""No form of string or number has masks as slow as trying the whole vocabulary again."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import xgrammar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm.grammars.runtime.compiler import Compiler, token_table
from nanovllm.grammars.runtime.dearest import Search
from nanovllm.grammars.runtime.matching import Matcher
from tests.grammars.runtime import walk

NUM_TOKENS = 60_000
LETTERS = "etaoinsrhldcumfpgwybvkxjqz"
MARKS = " \"'.,:;-_/\\()[]{}@#=+<>0123456789"
SHARE = 2  # least factor between xgrammar's mask near a limit and ours
FORMS = (
    *("format email", "format idn-email", "format hostname", "format uri", "string"),
    *("at most 8", "at most 40", "two limits", "letters", "line", "shares", "escapes"),
    *("found", "bounded number"),
)


def words(rng: random.Random) -> set[str]:
    """Return texts as in vocabularies: words, also capitalised or after a space or a mark."""
    found: set[str] = set()
    while len(found) < NUM_TOKENS - 256:
        word = "".join(rng.choices(LETTERS, weights=range(26, 0, -1), k=rng.randint(2, 9)))
        kind = rng.random()
        if kind < 0.4:
            word = f" {word}"
        elif kind < 0.5:
            word = word.title()
        elif kind < 0.6:
            word = rng.choice(MARKS) + word
        elif kind < 0.65:
            word = "".join(rng.choices(MARKS, k=rng.randint(2, 4)))
        elif kind < 0.7:
            word = "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(2))
        found.add(word)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tokenizer with many tokens and no merges."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = ["".join(piece for piece, _ in spell.pre_tokenize_str(w)) for w in
               sorted(words(random.Random(1)))]  # fmt: skip
    vocab = {token: i for i, token in enumerate(dict.fromkeys(["<end>", *alphabet, *spelled]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = spell
    tokenizer.decoder = decoders.ByteLevel()
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@cache
def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@cache
def compiler_of(folder: Path) -> Compiler:
    made = Compiler(folder, tokenizer_of(folder).get_vocab_size(), [0])
    made.prepare()
    return made


@cache
def alone_s(folder: Path) -> float:
    """Return the CPU seconds of xgrammar's own mask four characters before a limit."""
    size = tokenizer_of(folder).get_vocab_size()
    made = xgrammar.GrammarCompiler(token_table(folder, size, [0]), cache_enabled=False)
    tag = walk.tag_of({"type": "string", "maxLength": 40})
    matcher = xgrammar.GrammarMatcher(made.compile_structural_tag(tag))
    assert matcher.accept_string('"' + "a" * 36)
    mask, costs = torch.zeros((1, -(-size // 32)), dtype=torch.int32), []
    for _ in range(5):
        begun = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        costs.append(time.thread_time() - begun)
    return min(costs)


@pytest.mark.parametrize("form", FORMS)
def test_the_dearest_mask_of_a_form(folder: Path, form: str) -> None:
    cost = walk.walk(compiler_of(folder), tokenizer_of(folder), form, cpu_s=3.0, most=150)
    assert len(cost.masks_s) > 20
    assert cost.masks_s[-1] < alone_s(folder) / SHARE, cost.text


def test_every_form_of_the_walk_compiles() -> None:
    for name, schema in walk.FORMS.items():
        assert walk.tag_of(schema), name


def test_a_search_finds_what_a_random_walk_misses(folder: Path) -> None:
    """Expensive masks come after one of many characters, or after many of one character."""
    compiler, size = compiler_of(folder), tokenizer_of(folder).get_vocab_size()
    slow = 'text ::= one text | ""\none ::= [a-z ] | "," "," one'
    for rules in (
        f'root ::= [a-z0-9]+ "@" text\n{slow}',
        f'root ::= [0-9]{{0,90}} "#" text\n{slow}',
        f'root ::= ("a" | "b" ("c" | "d"))* "-" "." text\n{slow}',
    ):
        form = {"type": "grammar", "grammar": rules}
        grammar = compiler.build(json.dumps({"type": "structural_tag", "format": form}))
        search = Search(Matcher(grammar), compiler.texts, size)
        dearest = search.run(cpu_s=3.0, most_masks=150)
        text = tokenizer_of(folder).decode(dearest.output)
        assert {"@", "#", "."} & set(text), text
        assert dearest.cost_s > 20 * search.costs_s[0]
        assert dearest.cost_s == max(search.costs_s)
