"""Measures the demo model on held-out prompts of every kind, and how well its draft follows it.

    python -m recipes.demo.evaluate --model nanovllm/demo --out demo.json

Decoding is greedy, in plain torch. No prompt occurs in training word for word: values and names
come from the reserved side of corpus/draw.py. So do the wordings of templates that have enough of
them.

Three more results are counted. Word salad is any answer without a permitted form; forms.py lists
the forms. The file wild.txt has prompts written by hand; those beyond the demo must be refused. The
file first_questions.txt has questions, each with a pattern that an acceptable answer matches.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanovllm.bench import record, store
from recipes.demo import forms
from recipes.demo.corpus import render
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.mix import EVALUATED
from recipes.demo.corpus.refuse import REFUSALS
from recipes.demo.corpus.sample import Message, Sample, assistant, system, user
from recipes.demo.model import BIG, DRAFT, END_OF_TEXT, END_OF_TURN, Cache, Qwen3, load

log = logging.getLogger("evaluate")
MODES = [None, None, False, True]  # enable_thinking, in turn
MOST_NEW = 400  # tokens of an answer
BATCH = 256
NUM_DRAFTS = 3
SEED = 77_000
WILD = "wild"
FIRST = "first"


@dataclass
class Case:
    kind: str
    sample: Sample
    mode: bool | None
    prompt: str
    prompt_ids: list[int]
    written_ids: list[int]
    must: str = ""  # regular expression that the answer to a first question must match

    @property
    def written(self) -> str:
        return render.tokenizer().decode(self.written_ids, skip_special_tokens=False)

    def reply(self) -> str:
        """Return the answer without the thought before it."""
        text = self.written.removesuffix(render.END)
        if self.mode or text.startswith("<think>"):
            text = text.partition("</think>")[2]
        return text.strip()

    def acceptable(self) -> bool:
        """Return True if the answer to a first question is complete and matches `must`."""
        ended = self.written.endswith(render.END)
        return ended and re.search(self.must, self.reply(), re.DOTALL) is not None

    def salad(self) -> bool:
        """Return True if the answer is cut off or has none of the permitted forms."""
        if not self.written.endswith(render.END):
            return True
        text = self.reply()
        expected = "" if self.kind in (WILD, FIRST) else self.sample.body()
        return forms.salad(text, f"{self.prompt} {expected}")

    def says_so(self) -> bool:
        """Return True if the answer is one of the refusals."""
        return self.written.removesuffix(render.END) in REFUSALS

    def right(self) -> bool:
        """Return True if the answer is right and complete, with a think block where one belongs."""
        text = self.written
        if not text.endswith(render.END):
            return False
        text = text.removesuffix(render.END)
        thinks = self.mode or (self.mode is None and self.sample.thinks)
        if thinks:
            thought, closed, text = text.removeprefix("<think>").partition("</think>")
            if not closed or not thought.strip():
                return False
        return self.sample.judge(text)


def cases(count: int) -> list[Case]:
    cases_of_kinds: list[Case] = []
    for number, (kind, make) in enumerate(EVALUATED.items()):
        draw = Draw(SEED + number, held=True)
        for i in range(count):
            sample = make(draw)
            mode = MODES[i % len(MODES)]
            if sample.thinks and mode is False:
                mode = None
            text = render.prompt(sample, mode)
            cases_of_kinds.append(Case(kind, sample, mode, text, render.encode([text])[0], []))
    return cases_of_kinds


def wild_cases() -> list[Case]:
    """Return the prompts written by hand. They have no expected answers."""
    lines = (Path(__file__).parent / "wild.txt").read_text(encoding="utf-8").splitlines()
    prompts: list[Case] = []
    for line in lines:
        if not line.startswith("#: "):
            request = user(line.removeprefix("~ ").replace("\\n", "\n"))
            sample = Sample(WILD, [request], refuses=not line.startswith("~ "))
            text = render.prompt(sample, None)
            prompts.append(Case(WILD, sample, None, text, render.encode([text])[0], []))
    return prompts


def first_cases() -> list[Case]:
    """Return the first questions.

    A line has turns separated by " | ", maybe a system message first, and " => " before the
    pattern.
    """
    lines = (Path(__file__).parent / "first_questions.txt").read_text(encoding="utf-8").splitlines()
    questions: list[Case] = []
    for line in lines:
        if not line or line.startswith("#: "):
            continue
        turns_text, _, must = line.partition(" => ")
        turns = turns_text.replace("\\n", "\n").split(" | ")
        messages: list[Message] = []
        if turns[0].startswith("system: "):
            messages.append(system(turns.pop(0).removeprefix("system: ")))
        for number, turn in enumerate(turns):
            messages.append(assistant(turn) if number % 2 else user(turn))
        sample = Sample(FIRST, messages)
        text = render.prompt(sample, None)
        questions.append(Case(FIRST, sample, None, text, render.encode([text])[0], [], must))
    return questions


def of_first(cases: list[Case]) -> dict[str, Any]:
    failed = [case for case in cases if not case.acceptable()]
    return {
        "prompts": len(cases),
        "acceptable": len(cases) - len(failed),
        "salad": sum(case.salad() for case in cases),
        "failed": [
            {
                "asked": " | ".join(message["content"] for message in case.sample.messages),
                "must": case.must,
                "got": case.written,
            }
            for case in failed
        ],
    }


def of_wild(cases: list[Case]) -> dict[str, Any]:
    return {
        "prompts": len(cases),
        "salad": sum(case.salad() for case in cases),
        "beyond": sum(case.sample.refuses for case in cases),
        "says_so": sum(case.says_so() for case in cases if case.sample.refuses),
        "answers": [{"prompt": c.sample.messages[0]["content"], "got": c.written} for c in cases],
    }


@torch.no_grad()
def write(model: Qwen3, batch: list[Case], device: str) -> None:
    """Write greedy answers, one position of all rows at a time, prompts included."""
    lengths = torch.tensor([len(case.prompt_ids) for case in batch], device=device)
    most = int(lengths.max()) + MOST_NEW
    tokens = torch.full((len(batch), most), END_OF_TEXT, device=device)
    for row, case in enumerate(batch):
        tokens[row, : lengths[row]] = torch.tensor(case.prompt_ids, device=device)
    cache = Cache(model.shape, len(batch), most, device)
    ended = torch.zeros(len(batch), dtype=torch.bool, device=device)
    for at in range(most - 1):
        position = torch.tensor([at], device=device)
        best = model(tokens[:, at : at + 1], position, cache)[:, 0].argmax(-1)
        writing = (at + 1 >= lengths) & ~ended
        tokens[:, at + 1] = torch.where(writing, best, tokens[:, at + 1])
        ended |= writing & (best == END_OF_TURN)
        if at % 32 == 0 and bool(ended.all()):
            break
    for row, case in enumerate(batch):
        ids = tokens[row, len(case.prompt_ids) : len(case.prompt_ids) + MOST_NEW].tolist()
        end = ids.index(END_OF_TURN) + 1 if END_OF_TURN in ids else len(ids)
        case.written_ids = ids[:end]


@torch.no_grad()
def agreement(draft: Qwen3, case: Case, device: str) -> list[bool]:
    """Return for each written token whether the draft would have chosen it, too."""
    ids = torch.tensor([[*case.prompt_ids, *case.written_ids]], device=device)
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    best = draft(ids, torch.arange(length, device=device), mask)[0].argmax(-1)
    start = len(case.prompt_ids)
    same: Tensor = best[start - 1 : -1] == ids[0, start:]
    return same.tolist()


def accepted(same: list[bool]) -> tuple[int, int]:
    """Return the accepted drafts and the steps, with NUM_DRAFTS drafts in each step."""
    at = steps = total = 0
    while at < len(same):
        run = 0
        while run < NUM_DRAFTS and at + run < len(same) and same[at + run]:
            run += 1
        total, steps, at = total + run, steps + 1, at + run + 1
    return total, steps


def measure(folder: Path, count: int, device: str) -> dict[str, Any]:
    started = time.monotonic()
    big, draft = load(folder, BIG, device), load(folder / "draft", DRAFT, device)
    todo = [*cases(count), *wild_cases(), *first_cases()]
    todo.sort(key=lambda case: len(case.prompt_ids))
    for first in range(0, len(todo), BATCH):
        write(big, todo[first : first + BATCH], device)
    kinds: dict[str, Any] = {}
    wrong: list[dict[str, Any]] = []
    for kind in EVALUATED:
        mine = [case for case in todo if case.kind == kind]
        same = [agreement(draft, case, device) for case in mine]
        sums = [sum(column) for column in zip(*map(accepted, same), strict=True)]
        right = sum(case.right() for case in mine)
        kinds[kind] = {
            "prompts": len(mine),
            "right": right,
            "percent": round(100 * right / len(mine), 2),
            "salad": sum(case.salad() for case in mine),
            "tokens": sum(map(len, same)),
            "draft_agrees": sum(map(sum, same)),
            "draft_accepted": sums[0],
            "draft_steps": sums[1],
        }
        missed = [case for case in mine if not case.right()]
        wrong += [
            {
                "kind": kind,
                "prompt": case.prompt,
                "wanted": render.completion(case.sample, case.mode),
                "got": case.written,
                "salad": case.salad(),
            }
            for case in missed[:20]
        ]
        log.info("%-9s %6.2f %% right, %d salad", kind, *map(kinds[kind].get, ("percent", "salad")))
    total = {key: sum(entry[key] for entry in kinds.values()) for key in kinds["about"]}
    wild = of_wild([case for case in todo if case.kind == WILD])
    log.info("%-9s %d prompts, %d salad; %d beyond it, %d say so", WILD, *list(wild.values())[:4])
    first = of_first([case for case in todo if case.kind == FIRST])
    for failure in first["failed"]:
        log.info(
            "%-9s %r must match %r: %r", FIRST, failure["asked"], failure["must"], failure["got"]
        )
    counts = [first[key] for key in ("prompts", "acceptable", "salad")]
    log.info("%-9s %d questions, %d answers acceptable, %d salad", FIRST, *counts)
    return {
        "kinds": kinds,
        "wild": wild,
        "first": first,
        "salad_percent": round(100 * total["salad"] / total["prompts"], 2),
        "right_percent": round(100 * total["right"] / total["prompts"], 2),
        "draft_agreement": round(total["draft_agrees"] / total["tokens"], 4),
        "draft_accepted_of_3": round(total["draft_accepted"] / total["draft_steps"], 3),
        "duration_s": round(time.monotonic() - started, 1),
        "wrong": wrong,
    }


def record_of(results: dict[str, Any], started_at: str, count: int) -> record.Record:
    """Return the record of the percentages. `wrong` is only in the JSON file."""
    metrics = {
        f"right_{kind}_percent": entry["percent"] for kind, entry in results["kinds"].items()
    }
    metrics["right_percent"] = results["right_percent"]
    metrics["salad_percent"] = results["salad_percent"]
    metrics["wild_salad_percent"] = round(
        100 * results["wild"]["salad"] / results["wild"]["prompts"], 2
    )
    metrics["draft_agreement_percent"] = 100 * results["draft_agreement"]
    metrics["draft_accepted_of_3"] = results["draft_accepted_of_3"]
    first = results["first"]
    metrics["first_questions_percent"] = round(100 * first["acceptable"] / first["prompts"], 2)
    says_so = results["wild"]["says_so"] / results["wild"]["beyond"]
    metrics["wild_says_so_percent"] = round(100 * says_so, 2)
    demo_record = record.of_this_machine(
        kind="demo",
        started_at=started_at,
        duration_s=results["duration_s"],
        recipe={"model": "demo"},
        changed={},
        workload={"name": "held-out", "concurrency": 1, "prompts_per_kind": count},
        metrics=metrics,
    )
    argv = ["python", "-m", "recipes.demo.evaluate", *sys.argv[1:]]
    return msgspec.structs.replace(demo_record, argv=argv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=render.DEMO, help="folder of both models")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--count", type=int, default=200, help="prompts of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results-dir", type=Path, help="write a record there, too")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    results = measure(args.model, args.count, args.device)
    if args.results_dir is not None:
        place = store.write(record_of(results, started_at, args.count), args.results_dir)
        log.info("record: %s", place)
    args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    log.info(
        "all %.2f %% right; draft agrees on %.1f %%, %.2f of %d drafts accepted; %.0f s",
        results["right_percent"],
        100 * results["draft_agreement"],
        results["draft_accepted_of_3"],
        NUM_DRAFTS,
        results["duration_s"],
    )


if __name__ == "__main__":
    main()
