"""Rendering of samples: the shipped chat template, then tokens, then packed rows."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.mix import document, thinking
from recipes.demo.corpus.sample import Sample

DEMO = Path(__file__).resolve().parents[3] / "nanovllm" / "demo"
END = "<|im_end|>"
ANSWER = 4096  # added to the ids of tokens that the model must write itself
OPEN_ROWS = 16

Rows = npt.NDArray[np.int16]


@lru_cache(maxsize=1)
def template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((DEMO / "chat_template.jinja").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def prompt(sample: Sample, enable_thinking: bool | None) -> str:
    choice: dict[str, Any] = {}
    if enable_thinking is not None:
        choice["enable_thinking"] = enable_thinking
    return template().render(
        messages=sample.messages, tools=sample.tools, add_generation_prompt=True, **choice
    )


def completion(sample: Sample, enable_thinking: bool | None) -> str:
    body = sample.body() + END
    if enable_thinking:
        return f"{sample.thought}\n</think>\n\n{body}"
    if enable_thinking is None and sample.thinks:
        return f"<think>\n{sample.thought}\n</think>\n\n{body}"
    return body


def encode(texts: list[str]) -> list[list[int]]:
    return [
        encoding.ids for encoding in tokenizer().encode_batch_fast(texts, add_special_tokens=False)
    ]


def packed(seed: int, rows: int, length: int) -> Rows:
    """Return rows of whole documents. <|endoftext|> ends each document and pads the rows."""
    draw = Draw(seed)
    (end,) = encode(["<|endoftext|>"])[0]
    done: list[list[int]] = []
    filling: list[list[int]] = []
    while len(done) < rows:
        samples = [document(draw) for _ in range(64)]
        modes = [thinking(draw, sample) for sample in samples]
        pairs = list(zip(samples, modes, strict=True))
        questions = encode([prompt(*pair) for pair in pairs])
        answers = encode([completion(*pair) for pair in pairs])
        for question, answer in zip(questions, answers, strict=True):
            ids = [*question, *(token + ANSWER for token in answer), end]
            place(ids, length, filling, done)
    table = np.full((rows, length), end, np.int16)
    for row, ids in enumerate(done[:rows]):
        table[row, : len(ids)] = ids
    return table


def place(ids: list[int], length: int, filling: list[list[int]], done: list[list[int]]) -> None:
    """Append the document to the first open row with room. Drop it if it is longer than a row."""
    if len(ids) > length:
        return
    for row in filling:
        if len(row) + len(ids) <= length:
            row.extend(ids)
            return
    if len(filling) == OPEN_ROWS:
        fullest = max(range(OPEN_ROWS), key=lambda i: len(filling[i]))
        done.append(filling.pop(fullest))
    filling.append(list(ids))
