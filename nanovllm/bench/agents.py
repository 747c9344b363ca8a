"""The load "agents": conversations that grow by tool results, and its metrics.

Each session is an agent's conversation. All sessions share a system prompt with the list of tools.
A request has the whole conversation so far, which the server has mostly seen: with the default
sizes some 95 % of all prompt tokens repeat an earlier request. After an answer, a tool runs for a
while; then the next request follows with the answer and the tool's result.

Decision: answers in the conversation are words of the load, as long as the answer that was asked
for, and not the server's own text. Every server thus gets the same bytes, and the digest of a load
covers all of them. A cache of generated tokens does not help.

Decision: the messages are plain text of the roles system, user and assistant, because servers treat
"tools" and the role "tool" differently, and some refuse them. To a server's cache they are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.bench.measure import Sample
from nanovllm.bench.report import by_label
from nanovllm.bench.workload import (
    LEAD,
    WARM_UP_SEED,
    Conversation,
    Count,
    Message,
    Turn,
    Wording,
    stream_options,
    user,
)
from nanovllm.config import ConfigError

REUSE_PERCENT = (0, 50, 90, 97, 100)  # bounds of the classes by reused share of a prompt
PERCENTILES = (50, 99)
HITS, LOOKED_UP = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"  # of tiers below the GPU's memory
TIER_HITS = "nanovllm:tier_hit_tokens_total"  # of each of them, on our servers


class TurnPlan(NamedTuple):
    """Sizes of one request, in tokens."""

    prompt: int
    answer: int
    reusable: int  # leading prompt tokens that an earlier request also has
    result: int  # last message of the prompt: the task, later a tool's result
    pause_s: float  # run time of the tool before this request


class AgentLoad(Struct, frozen=True, kw_only=True):
    """Sessions of agents. Sizes are prompt tokens, and include the chat template's."""

    sessions: int = 8
    turns: int = 40  # maximum of a session
    shared_len: int = 8_000  # system prompt with the list of tools
    growth: tuple[int, int] = (200, 4_000)  # tokens per turn: an answer and a tool's result
    answers: tuple[int, int] = (50, 1_500)  # tokens of each answer; uniform, as the results are
    longest: int = 85_000  # a session ends before a prompt would be longer
    pauses: tuple[float, float] = (0.5, 20.0)  # seconds of a tool; uniform in their logarithm
    concurrency: int = 8  # sessions at a time
    seed: int = 0
    temperature: float = 0.6
    ignore_eos: bool = True
    adapters: int = 0  # sessions use this number of the server's adapters in turn; 0: none
    # Tokens of the template and LEAD: around the first two messages, and each further pair.
    frames: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        (least, most), (short, long), pauses = self.growth, self.answers, self.pauses
        for is_wrong, message in (
            (least > most, "--growth: write the smaller number first, as in 200-4000"),
            (short > long, "--answers: write the smaller number first, as in 50-1500"),
            (pauses[0] > pauses[1], "--pauses: write the smaller number first, as in 0.5-20"),
            (
                self.concurrency > self.sessions,
                "--concurrency is the number of sessions at a time: at most --sessions",
            ),
            (pauses[0] <= 0, "--pauses: the shortest pause must be above 0 s"),
            (
                least - short < 1 or most - long < least - short,
                "--growth has the answer and the tool's result: both its bounds must be above "
                "those of --answers, the upper bound by at least as much as the lower",
            ),
            (
                self.shared_len + most - long > self.longest,
                "--longest must have room for --shared-len and the first message",
            ),
        ):
            if is_wrong:
                raise ConfigError(message)

    @property
    def name(self) -> str:
        name = f"agents-{self.sessions}x{self.longest}"
        return f"{name}-lora{self.adapters}" if self.adapters else name

    @property
    def results(self) -> range:
        """Return the possible lengths of a tool's result."""
        return range(self.growth[0] - self.answers[0], self.growth[1] - self.answers[1] + 1)

    @property
    def num_requests(self) -> int:
        return sum(len([*self.planned(session)]) for session in range(self.sessions))

    @property
    def reusable_percent(self) -> float:
        """Return the share of prompt tokens that repeat an earlier request."""
        plans = [plan for session in range(self.sessions) for plan in self.planned(session)]
        return 100.0 * sum(plan.reusable for plan in plans) / sum(plan.prompt for plan in plans)

    @property
    def longest_request(self) -> tuple[str, float]:
        """Return the options that determine the longest request, and its tokens."""
        return "--longest and an answer of --answers", self.longest + self.answers[1]

    @property
    def described(self) -> dict[str, Any]:
        """Return the part of a record that describes the prompts."""
        prompts = "random words; a shared system prompt, answers and tool results of the load"
        return {
            "arrivals": "closed loop of sessions",
            "prompts": prompts,
            "requests": self.num_requests,
            "reusable_percent": self.reusable_percent,
        }

    def planned(self, session: int) -> Iterator[TurnPlan]:
        """Yield the sizes of a session's requests."""
        rng = Random(f"agents {self.seed} {session}")
        result, low, high = rng.choice(self.results), *self.pauses
        # Caches share no pages between adapters, so each one's first session computes all.
        is_shared = session >= max(1, self.adapters)
        prompt, reusable, pause_s = self.shared_len + result, self.shared_len * is_shared, 0.0
        for _ in range(self.turns):
            answer = rng.randint(*self.answers)
            yield TurnPlan(
                prompt=prompt, answer=answer, reusable=reusable, result=result, pause_s=pause_s
            )
            result, pause_s = rng.choice(self.results), low * (high / low) ** rng.random()
            prompt, reusable = prompt + answer + result, prompt
            if prompt > self.longest:
                return

    def warm_up(self, count: int) -> AgentLoad:
        """Return first requests of `count` other sessions, with another system prompt."""
        return replace(
            self,
            sessions=count,
            turns=1,
            answers=(1, 16),
            growth=(1 + self.results[0], 16 + self.results[-1]),
            concurrency=min(count, self.concurrency),
            seed=self.seed + WARM_UP_SEED,
        )

    def due_s(self) -> list[float]:
        """Return [], because a session starts when another one ends."""
        return []

    def fields(self, model: str) -> dict[str, Any]:
        """Return the fields of a request for its sampling."""
        return {"model": model, "temperature": self.temperature, "ignore_eos": self.ignore_eos}

    def fitted(self, wording: Wording, count: Count, url: str) -> AgentLoad:
        """Return the load with its `frames`, which short requests measure.

        Raise ConfigError if messages cannot have the wanted lengths.
        """

        def talk(*lengths: int) -> list[Message]:
            texts = [wording.words(Random(f"probe {at}"), n) for at, n in enumerate(lengths)]
            return [message(at, text) for at, text in enumerate(texts)]

        size = next(n for n in range(1, len(LEAD) + 64) if wording.words_reach(n))
        first = count(talk(size, size)) - 2 * size
        pair = count(talk(size, size, size, size)) - first - 4 * size
        if (counted := count(talk(*[size] * 6))) != first + 2 * pair + 6 * size:
            raise ConfigError(
                f"{url} counts {counted} tokens for six messages, where the first four suggest "
                f"{first + 2 * pair + 6 * size}; its chat template changes earlier messages, so "
                "prompts are not extensions of earlier ones"
            )
        fitted = replace(self, frames=(first, pair))
        for option, sizes in (
            ("--shared-len", range(fitted.shared_words(wording), fitted.shared_words(wording) + 1)),
            ("--answers", range(self.answers[0], self.answers[1] + 1)),
            ("--growth less --answers", range(self.results[0] - pair, self.results[-1] - pair + 1)),
            (
                "--growth less --answers",
                range(self.results[0] - wording.overhead, self.results[-1] - wording.overhead + 1),
            ),
        ):
            if wrong := [num for num in sizes if not wording.words_reach(num)]:
                raise ConfigError(
                    f"{option} is too small: a message would have {wrong[0]} tokens of words; at "
                    f"{url}, the chat template alone takes up to {max(first, pair)}"
                )
        return fitted

    def shared_words(self, wording: Wording) -> int:
        """Return the tokens of the system prompt's words, after those of its frame."""
        return self.shared_len - (self.frames[0] - wording.overhead)

    def conversations(
        self, names: Sequence[str], wording: Wording, *, counted: bool = False
    ) -> list[Conversation]:
        """Return the sessions, which have the names of a model or of adapters in turn.

        Session i of a load is the same for any number of sessions.
        """
        shared = wording.words(Random(f"agents {self.seed}"), self.shared_words(wording))
        options = {"stream": True, "stream_options": stream_options(counted)}
        system, heads = msgspec.json.encode(message(0, shared)), list[bytes]()
        for name in names:
            fields = msgspec.json.encode(self.fields(name) | options)
            heads.append(fields[:-1] + b',"messages":[' + system + b",")
        each = range(self.sessions)
        return [self._conversation(heads[at % len(heads)], at, wording) for at in each]

    def _conversation(self, head: bytes, session: int, wording: Wording) -> Conversation:
        rng, turns = Random(f"agents {self.seed} {session} words"), list[Turn]()
        answer = 0
        for plan in self.planned(session):
            frame = self.frames[1] if turns else wording.overhead
            added = [user(wording.words(rng, plan.result - frame))]
            if turns:
                added.insert(0, {"role": "assistant", "content": wording.words(rng, answer)})
            answer = plan.answer
            messages = b",".join(map(msgspec.json.encode, added))
            tail = f'],"max_tokens":{answer}}}'.encode()
            turns.append(Turn(messages, tail, plan.pause_s, plan.reusable))
        return Conversation(head, turns, session)


def message(at: int, text: str) -> Message:
    """Return message number `at` of a conversation: system, user, assistant, user, ..."""
    role = "system" if at == 0 else "user" if at % 2 else "assistant"
    return {"role": role, "content": text}


def agent_facts(
    samples: Sequence[Sample], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
    """Return the table's lines of a load of agents.

    `before` and `after` are the server's metrics. A turn's reuse is its cached share of the prompt,
    by usage. A user's tokens per second are those of one answer after its first chunk.
    """
    done = [sample for sample in samples if not sample.error]
    if not done:
        return {}
    failed = {sample.session for sample in samples if sample.error}
    start, end = min(one.sent for one in samples), max(one.stamps[-1] for one in done)
    prompt_tokens = sum(one.input_tokens for one in done)
    rates = [1.0 / one.tpot_s for one in done if one.output_tokens > 1 and one.tpot_s > 0.0]
    facts = {
        "Sessions completed": float(len({one.session for one in done} - failed)),
        "Requests per minute": 60.0 * len(done) / max(end - start, 1e-9),
        "Reusable prompt tokens (%)": percent(done, "reusable_tokens", prompt_tokens),
        "Reused prompt tokens (%)": percent(done, "cached_tokens", prompt_tokens),
    }
    if rates:
        facts["Tokens per second of a user, P50"] = float(np.percentile(rates, 50))
        facts["Tokens per second of a user, P10"] = float(np.percentile(rates, 10))
    facts |= hits_by_tier(before, after)
    facts |= ttft_lines("First turns", [one for one in done if one.turn == 0])
    facts |= ttft_lines("Later turns", [one for one in done if one.turn > 0])
    for low, high in pairwise(REUSE_PERCENT):
        among = [one for one in done if low <= reused_percent(one) < high]
        facts |= ttft_lines(f"Turns {low} to {high} % reused", among)
    return facts


def hits_by_tier(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the share of prompt tokens found in each tier, as far as the server counts them."""
    gains = {key: value - before.get(key, 0.0) for key, value in after.items()}
    num_looked_up = by_label(gains, LOOKED_UP).get("", 0.0)
    tiers = {"Hits in GPU memory (%)": HITS, "Hits in other tiers (%)": EXTERNAL_HITS}
    hits = {label: by_label(gains, name).get("") for label, name in tiers.items()}
    by_tier = by_label(gains, TIER_HITS, "tier")
    hits |= {f"Hits in {tier} tier (%)": n for tier, n in by_tier.items() if n}
    return {
        label: 100.0 * n / num_looked_up
        for label, n in hits.items()
        if n is not None and num_looked_up
    }


def ttft_lines(which: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the number and times to the first token of these turns; {} without any."""
    if not samples:
        return {}
    ms = [1e3 * one.ttft_s for one in samples]
    lines = {f"{which}, P{at} TTFT (ms)": float(np.percentile(ms, at)) for at in PERCENTILES}
    return {which: float(len(samples))} | lines


def reused_percent(sample: Sample) -> float:
    """Return the cached share of a prompt; below 100, because one token is always computed."""
    return 100.0 * sample.cached_tokens / max(sample.input_tokens, sample.cached_tokens + 1)


def percent(samples: Sequence[Sample], field: str, total: int) -> float:
    return float(100.0 * sum(getattr(one, field) for one in samples) / max(total, 1))
