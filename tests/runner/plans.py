"""Plans written by hand, which drive a runner without a scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from nanovllm.plan import Admit, Chunk, Masks, StepPlan, StepResult
from nanovllm.runner.runner import Runner
from nanovllm.wire import Sampling

GREEDY = Sampling(temperature=0.0)


def admit(
    slot: int,
    prompt: Sequence[int],
    pages: list[int],
    num_cached: int = 0,
    sampling: Sampling = GREEDY,
) -> Admit:
    known = array("i", prompt).tobytes()
    return Admit(slot, known, len(prompt), num_cached, pages, sampling, stop_ids=[])


class Plans:
    """Driver of a runner that numbers the steps and maps new tokens to slots."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.num_steps = 0
        self.result: StepResult | None = None  # of the latest step
        self.lines: dict[int, list[int]] = {}  # each slot's tokens in the latest step

    def step(
        self,
        admits: Sequence[Admit] = (),
        decodes: Sequence[int] = (),
        chunks: Mapping[int, int] = {},
        *,
        partial: Sequence[int] = (),
        masks: Mapping[int, Masks] = {},
        clean: Sequence[int] = (),
        copies: Sequence[tuple[int, int]] = (),
        drafts: Sequence[int] = (),
        proposes: bool = True,
    ) -> dict[int, int]:
        """Run a step and return each slot's first new token.

        `chunks` is the number of tokens to feed by slot; chunks of slots in `partial` do not
        sample. `masks` is by slot; a decode row has one mask per token. `drafts` is by decode row.
        """
        self.num_steps += 1
        sampling = [*decodes, *(slot for slot in chunks if slot not in partial)]
        plan = StepPlan(
            step=self.num_steps,
            admits=list(admits),
            grants=[],
            num_decodes=len(decodes),
            decodes=np.array(decodes, np.int32).tobytes(),
            chunks=[Chunk(slot, count, slot not in partial) for slot, count in chunks.items()],
            max_length=self.runner.slots.max_tokens,
            masked=[row for row, slot in enumerate(sampling) if slot in masks],
            clean=list(clean),
            copies=list(copies),
            drafts=np.array(drafts, np.int32).tobytes(),
            proposes=proposes,
        )
        handle = self.runner.launch(plan)
        if plan.masked:
            found = [np.atleast_2d(masks[slot]) for slot in sampling if slot in masks]
            handle.sample(np.concatenate(found))
        self.result = handle.wait()
        lines = [[t for t in line if t != -1] for line in self.result.tokens.tolist()]
        self.lines = dict(zip(sampling, lines, strict=True))
        return {slot: line[0] for slot, line in self.lines.items()}

    def text(
        self,
        slot: int,
        prompt: Sequence[int],
        pages: list[int],
        count: int,
        *,
        num_cached: int = 0,
        clean: Sequence[int] = (),
        copies: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """Return `count` greedy tokens of a request that runs alone."""
        first = admit(slot, prompt, pages, num_cached)
        feed = {slot: len(prompt) - num_cached}
        tokens = [self.step([first], (), feed, clean=clean, copies=copies)[slot]]
        while len(tokens) < count:
            tokens.append(self.step((), [slot])[slot])
        return tokens
