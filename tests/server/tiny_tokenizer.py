"""Folder with a small byte-level BPE tokenizer and a chat template, created on demand."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "Größe, naïve café, Straße; 日本語のテキスト と 中文; emoji 😀😃🚀 and 👩‍👩‍👧",
    "def function(argument): return {'key': [1, 2, 3]}\n\n    indented\ttabs",
]
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{%- endif -%}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    # not in the byte alphabet, like DeepSeek's
    tokenizer.add_special_tokens([AddedToken("<\uff5cUser\uff5c>", special=True)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's, whose tokens decode differently next to others."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def write_folder(folder: Path, template: str = TEMPLATE) -> Path:
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    settings = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
