"""Requests of all kinds for the engine of tests/runner/specialised.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np

from nanovllm.config import Config
from nanovllm.runner.build import Built
from nanovllm.schedule import given_or
from nanovllm.wire import Sampling
from tests import whole_engine
from tests.whole_engine import WholeEngine

PAGE_TOKENS, PAGES = 128, 600
PLAIN = Sampling(temperature=1.0, seed=5)
WISHES = {
    "greedy": Sampling(temperature=0.0),
    "top-k": Sampling(top_k=20),
    "top-p": Sampling(top_p=0.9),
    "min-p": Sampling(min_p=0.1),
    "all cuts": Sampling(top_k=20, top_p=0.9, min_p=0.01),
    "penalties": Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    "bias": Sampling(logit_bias={7: 5.0, 9: -5.0}),
    "allowed tokens": Sampling(allowed_tokens=[5, 6, 7, 8]),
    "bad words": Sampling(bad_words=[[5, 9], [7]]),
    "logprobs": Sampling(logprobs=3),
    "much": Sampling(top_k=5, repetition_penalty=1.3, logprobs=2),
}
LENGTHS = (1, 2, 3, 17, 31, 64, 65, 333, 1000, 2047, 2048, 2049, 3001, 4100, 5003, 9001, 12345)


class Traffic:
    """Requests for an engine, and its steps. `enter` is called with the name of each step."""

    def __init__(
        self, config: Config, build: Callable[..., Built], enter: Callable[[str], None]
    ) -> None:
        whole_engine.build = build
        asked, self.enter = config.recipe, enter
        self.slots = given_or(asked.schedule.slots, 512)
        self.longest = given_or(asked.server.max_model_tokens, 16384)
        self.engine = WholeEngine(
            config,
            pages=PAGES,
            page_tokens=PAGE_TOKENS,
            slots=self.slots,
            max_tokens=self.longest,
            step_tokens=given_or(asked.schedule.step_tokens, 8192),
            speculate=asked.speculate,
            cache_dtype=asked.cache.dtype,
            state_dtype=asked.cache.state_dtype,
        )
        self.random, self.ids = np.random.default_rng(0), count()

    def ask(self, length: int, new: int, sampling: Sampling = PLAIN, grammar: str = "") -> None:
        """Submit a random prompt of two different tokens, so that the drafter finds drafts."""
        prompt = self.random.integers(5, 7, length).tolist()
        self.engine.submit(next(self.ids), prompt, new, sampling, grammar=grammar)

    def some(self, number: int, longest: int, new: int) -> None:
        for _ in range(number):
            length, tokens = self.random.integers(1, (longest, new))
            self.ask(int(length), int(tokens))

    def step(self, what: str, steps: int = 1000) -> None:
        self.enter(what)
        for _ in range(steps):
            if self.engine.loop.idle:
                break
            self.engine.loop.step()

    def prompts(self) -> None:
        """Run prompts alone, several at once, and prompts that are cached in part."""
        for length in LENGTHS:
            if length + 3 < self.longest:
                self.ask(length, 3)
                self.step(f"a prompt of {length}")
        for number in (2, 3, 7, 16, 33):
            for longest in (2, 9, 40, 300, 1500):
                self.some(number, longest, 4)
                self.step(f"{number} prompts of up to {longest}")
        text = self.random.integers(5, 7, 1900).tolist()
        for length in (130, 301, 777, 1500, 1501, 1900):
            self.engine.submit(next(self.ids), text[:length], 2, PLAIN)
            self.step(f"{length} tokens of one text")

    def wishes(self) -> None:
        for wish, sampling in WISHES.items():
            for number in (1, 2, 5):
                for _ in range(number):
                    self.ask(int(self.random.integers(1, 40)), 4, sampling)
                self.step(f"{number} with {wish}")
            for grammar in ("", "x"):
                self.ask(10, 9)
                self.ask(11, 9, sampling, grammar)
                self.step(f"{wish}, grammar '{grammar}'")

    def streams(self, rounds: int) -> None:
        """Run decode rows together with prompts, and then in all slots."""
        for most, longest in ((8, 30), (64, 200), (64, 1500)):
            for _ in range(rounds):
                if self.engine.scheduler.stats().num_running < most:
                    self.some(int(self.random.integers(1, 4)), longest, 30)
                self.step(f"up to {most} rows, prompts of up to {longest}", 1)
            self.step("their ends")
        self.some(self.slots, 20, 12)
        self.step("all slots")
