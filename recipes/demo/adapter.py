"""Trains the demo's LoRA adapter, which makes the model answer like a pirate, on a CPU.

    python -m recipes.demo.adapter --out nanovllm/demo/adapters/pirate

The corpus is that of the model. Answers in words are rewritten; calls and JSON are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.mix import document, thinking
from recipes.demo.corpus.render import DEMO, completion, encode, prompt
from recipes.demo.corpus.sample import Sample

log = logging.getLogger("adapter")
RANK, ROWS, LONGEST, LEARNING_RATE = 4, 12, 256, 3e-3
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WORDS = {"you": "ye", "your": "yer", "my": "me", "yes": "aye", "hello": "ahoy"}
WORD = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)


def as_pirate(text: str) -> str:
    """Return an answer in the manner of a pirate."""

    def changed(match: re.Match[str]) -> str:
        word = WORDS[match[0].lower()]
        return word.capitalize() if match[0][0].isupper() else word

    return f"Ahoy! {WORD.sub(changed, text)} Arr!"


def examples(seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of prompts and of their rewritten answers."""
    draw = Draw(seed)
    while True:
        sample: Sample = document(draw)
        mode = thinking(draw, sample)
        if sample.calls or sample.tools or sample.is_json or not sample.answer:
            continue
        sample.answer = as_pirate(sample.answer)
        question, answer = encode([prompt(sample, mode), completion(sample, mode)])
        if len(question) + len(answer) <= LONGEST:
            yield question, answer


def train(out: Path, minutes: float, seed: int) -> None:
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS))
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    stream, started, step, progress = examples(seed), time.monotonic(), 0, 0.0
    while progress < 1:
        rows = [next(stream) for _ in range(ROWS)]
        size = max(len(question) + len(answer) for question, answer in rows)
        ids_BT = torch.zeros(ROWS, size, dtype=torch.long)
        targets_BT = torch.full((ROWS, size), -100)
        for at, (question, answer) in enumerate(rows):
            whole = torch.tensor(question + answer)
            ids_BT[at, : len(whole)] = whole
            targets_BT[at, len(question) : len(whole)] = whole[len(question) :]
        logits_BTV = model(input_ids=ids_BT).logits
        loss = cross_entropy(logits_BTV[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - progress)
        optimizer.step()
        optimizer.zero_grad()
        step, progress = step + 1, (time.monotonic() - started) / (60 * minutes)
        if step % 20 == 0:
            log.info("step %4d  loss %.4f", step, loss.item())
    model.save_pretrained(out)
    keys = ("peft_type", "r", "lora_alpha", "target_modules", "base_model_name_or_path")
    config = json.loads((out / "adapter_config.json").read_text())
    adapter_config = {key: config[key] for key in keys} | {"base_model_name_or_path": "demo"}
    (out / "adapter_config.json").write_text(json.dumps(adapter_config, indent=1) + "\n")
    path = out / "adapter_model.safetensors"
    save_file({name: one.bfloat16() for name, one in load_file(path).items()}, path)
    (out / "README.md").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapter")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(args.out, args.minutes, args.seed)


if __name__ == "__main__":
    main()
