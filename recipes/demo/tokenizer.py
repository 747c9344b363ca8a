"""The demo's tokenizer: byte-level BPE over 2,048 tokens, trained on a sample of the corpus.

    python -m recipes.demo.tokenizer      (only after a large change of the corpus)

Decision: a space is a token of its own unless punctuation follows it, and digits and capitals
inside a word stand alone. A name then has the same tokens after a space and after a quote. So a
small model can copy it from a sentence into JSON. It costs longer prompts, which are cheap here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.demo.corpus import render
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.mix import document, thinking

VOCAB_SIZE = 2048
SEED, DOCUMENTS = 0, 30_000
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
MARKER = re.compile("|".join(re.escape(text) for text in CONTROL + MARKERS))
PIECES = r"\p{Lu}?\p{Ll}+|\p{L}|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain = (part for text in texts for part in MARKER.split(text))
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"too little text: only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in CONTROL,
        }
        for text in CONTROL + MARKERS
    }
    config = {
        "added_tokens_decoder": added,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train on a sample of the corpus and replace the files that ship."""
    draw = Draw(SEED)
    texts = []
    for _ in range(DOCUMENTS):
        sample = document(draw)
        mode = thinking(draw, sample)
        texts.append(render.prompt(sample, mode) + render.completion(sample, mode))
    save_tokenizer(train_tokenizer(texts), render.DEMO)


if __name__ == "__main__":
    main()
