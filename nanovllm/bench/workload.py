"""Seeded loads: token prompts for the engine, text prompts and arrival times for a server.

The offline shapes are those of other engines' measurements. With the same generator and seed, token
ids are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.config import ConfigError
from nanovllm.wire import Sampling

MAX_PROMPT_ID = 10_000
SHAPES = {  # requests, prompt tokens, output tokens
    "bs1": (1, 128, 512), "bs64": (64, 1024, 256), "bs256": (256, 128, 256),
    # The last two are those of other engines' measurements over several GPUs.
    "prefill": (16, 4000, 1), "bs1-256": (1, 128, 256), "bs256-128": (256, 128, 128),
}  # fmt: skip
OFFLINE_NAMES = ("w1", "w1-top", *SHAPES)
FOLDER = Path(__file__).parent
RECORDS = msgspec.json.decode((FOLDER / "records.json").read_bytes())
WARM_UP_SEED = 1_000_003  # added to the seed for prompts of the warm-up
LEAD = "Words:"
# Short, common words, which most tokenizers encode as one token each.
WORDS = tuple((FOLDER / "words.txt").read_text().split())


Message = dict[str, str]  # "role" and "content"
Count = Callable[[list[Message]], int]  # a server's number of prompt tokens for messages


class TokenLoad(Struct, frozen=True):
    """Requests that are submitted at once and do not stop early."""

    name: str
    prompts: list[list[int]]
    outputs: list[int]  # tokens to generate, per prompt
    sampling: Sampling

    def warm_up(self, seed: int, vocab_size: int) -> TokenLoad:
        """Return other prompts of the same shapes. Outputs are short, with the same spread."""
        other = token_load(self.name, seed=seed, vocab_size=vocab_size)
        return replace(other, outputs=[1 + num // 32 for num in other.outputs])


def token_load(name: str, *, seed: int, vocab_size: int) -> TokenLoad:
    """Return one of OFFLINE_NAMES. Ids wrap around in vocabularies below 10,001 tokens.

    "w1-top" is "w1" with top_k and top_p of Qwen3's generation_config.json.
    """
    rng = Random(seed)
    sampling = Sampling(temperature=0.6 if name.startswith("w1") else 0.0)

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randint(0, MAX_PROMPT_ID) % vocab_size for _ in range(num_tokens)]

    if name == "w1-top":
        sampling = replace(sampling, top_k=20, top_p=0.95)
    if name.startswith("w1"):
        prompts = [prompt(rng.randint(100, 1024)) for _ in range(256)]
        outputs = [rng.randint(100, 1024) for _ in range(256)]
    else:
        count, prompt_tokens, output_tokens = SHAPES[name]
        prompts = [prompt(prompt_tokens) for _ in range(count)]
        outputs = [output_tokens] * count
    return TokenLoad(name, prompts, outputs, sampling)


class Turn(Struct, frozen=True):
    """One request of a conversation."""

    messages: bytes  # follows the messages of earlier turns in the body
    tail: bytes  # the rest of the body
    pause_s: float = 0.0  # from the end of the previous answer to this request
    reusable: int = 0  # leading prompt tokens that an earlier request also has


class Conversation(Struct, frozen=True):
    """Requests of one user. Each is sent after the answer to the previous one.

    Bodies are put together by the client process when they are sent, because those of a long
    conversation repeat the same messages.
    """

    head: bytes
    turns: list[Turn]
    session: int = 0  # number of the conversation in its load

    def body(self, turn: int) -> bytes:
        """Return the JSON body of a request."""
        messages = b",".join(one.messages for one in self.turns[: turn + 1])
        return self.head + messages + self.turns[turn].tail


class Workload(Struct, frozen=True, kw_only=True):
    """A load for a server. Exactly one of `concurrency` and `request_rate` is set."""

    num_prompts: int
    input_len: int  # tokens, chat template included
    output_len: int
    range_ratio: float = 0.0  # lengths are uniform in [(1 - ratio) * len, (1 + ratio) * len]
    concurrency: int | None = None  # closed loop: constant number of requests in flight
    request_rate: float | None = None  # open loop: arrivals per second, regardless of progress
    burstiness: float = 1.0  # shape of the gamma-distributed gaps: 1 is Poisson, less is burstier
    seed: int = 0
    temperature: float = 0.6
    ignore_eos: bool = True
    structured: bool = False  # every answer follows the schema RECORDS
    adapters: int = 0  # requests use this number of the server's adapters in turn; 0: none

    @property
    def name(self) -> str:
        name = f"c{self.concurrency}" if self.request_rate is None else f"rate{self.request_rate:g}"
        name += "-mixed" if self.range_ratio else ""
        name += f"-lora{self.adapters}" if self.adapters else ""
        return f"{name}-structured" if self.structured else name

    @property
    def num_requests(self) -> int:
        return self.num_prompts

    @property
    def longest_request(self) -> tuple[str, float]:
        """Return the options that determine the longest request, and its tokens."""
        both = (self.input_len + self.output_len) * (1.0 + self.range_ratio)
        return "--input-len + --output-len", both

    @property
    def described(self) -> dict[str, str]:
        """Return the part of a record that describes the prompts."""
        arrive = "closed loop" if self.request_rate is None else "gamma"
        prompts = "random words, no two prompts alike, other ones in the warm-up"
        return {"arrivals": arrive, "prompts": prompts}

    def warm_up(self, count: int) -> Workload:
        """Return a closed loop of `count` other prompts, with at most 16 output tokens each."""
        return replace(
            self,
            num_prompts=count,
            output_len=min(self.output_len, 16),
            concurrency=min(count, self.concurrency or count),
            request_rate=None,
            seed=self.seed + WARM_UP_SEED,
        )

    def fields(self, model: str) -> dict[str, Any]:
        """Return the fields of a request for its sampling."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [],
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
        }
        if self.structured:  # without thinking, which does not follow the schema
            body["response_format"] = {"type": "json_schema", "json_schema": RECORDS}
            body["chat_template_kwargs"] = {"enable_thinking": False}
            del body["ignore_eos"]  # the schema determines the end of an answer
        return body

    def fitted(self, wording: Wording, count: Count, url: str) -> Workload:
        """Return the load. Raise ConfigError if prompts cannot have the wanted lengths."""
        for num_tokens in lengths(self.input_len, self.range_ratio):
            if not wording.reaches(num_tokens):
                raise ConfigError(
                    f"--input-len (with --range-ratio) is {num_tokens} tokens; no prompt has this "
                    f"length at {url}, where the chat template alone has {wording.overhead}"
                )
        text = wording.text(Random(f"probe {self.seed}"), self.input_len)
        if (counted := count([user(text)])) != self.input_len:
            raise ConfigError(f"{url} counts {counted} tokens where {self.input_len} were expected")
        return self

    def conversations(
        self, names: Sequence[str], wording: Wording, *, counted: bool = False
    ) -> list[Conversation]:
        """Return one conversation of a single request for each prompt.

        Requests have the names of a model or of adapters in turn.
        """
        bodies = chat_bodies(self, names, wording.text, counted=counted)
        return [Conversation(b"", [Turn(body, b"")], at) for at, body in enumerate(bodies)]

    def due_s(self) -> list[float]:
        """Return the due time of each request in seconds; [] for a closed loop."""
        if self.request_rate is None:
            return []
        rng = Random(f"arrivals {self.seed}")
        shape, scale = self.burstiness, 1.0 / (self.request_rate * self.burstiness)
        gaps = (rng.gammavariate(shape, scale) for _ in range(self.num_prompts - 1))
        return [*accumulate(gaps, initial=0.0)]


class Wording:
    """Texts of exact numbers of prompt tokens, from words with measured costs.

    A text is LEAD and words after it. Every word costs the same in every place, because tokenizers
    split text at spaces first.
    """

    def __init__(self, overhead: int, costs: Mapping[str, int]) -> None:
        """`overhead` is the number of tokens of LEAD alone, including the chat template."""
        self.overhead = overhead
        self._costs = costs
        self._fitting: list[list[str]] = [[]]  # words that may follow, by remaining tokens

    def reaches(self, num_tokens: int) -> bool:
        """Return whether a text with `num_tokens` prompt tokens exists."""
        return self.words_reach(num_tokens - self.overhead)

    def text(self, rng: Random, num_tokens: int) -> str:
        """Return a message whose prompt has `num_tokens` tokens. `reaches` must be True."""
        return self.words(rng, num_tokens - self.overhead)

    def words(self, rng: Random, num_tokens: int) -> str:
        """Return LEAD and words of `num_tokens` tokens. `words_reach` must be True."""
        words = [LEAD]
        while num_tokens:
            words.append(rng.choice(self._words_for(num_tokens)))
            num_tokens -= self._costs[words[-1]]
        return " ".join(words)

    def words_reach(self, num_tokens: int) -> bool:
        return num_tokens > 0 and bool(self._words_for(num_tokens))

    def _words_for(self, left: int) -> list[str]:
        """Return the words after which the remaining tokens can be reached."""
        fitting = self._fitting
        while len(fitting) <= left:
            rests = ((word, len(fitting) - cost) for word, cost in self._costs.items())
            words = [w for w, rest in rests if rest == 0 or (rest > 0 and fitting[rest])]
            fitting.append(fitting[-1] if words == fitting[-1] else words)
        return fitting[left]


def chat_bodies(
    load: Workload,
    names: Sequence[str],
    text: Callable[[Random, int], str],
    *,
    counted: bool = False,
) -> list[bytes]:
    """Return the JSON bodies of a run. `text` returns a text with a number of prompt tokens.

    Requests have the names in turn. With `counted`, each chunk has the number of tokens up to it.
    """
    rng = Random(load.seed)
    inputs, outputs = (lengths(n, load.range_ratio) for n in (load.input_len, load.output_len))
    bodies = []
    for name in islice(cycle(names), load.num_prompts):
        body = load.fields(name) | {
            "messages": [user(text(rng, rng.choice(inputs)))],
            "max_tokens": rng.choice(outputs),
            "stream": True,
            "stream_options": stream_options(counted),
        }
        bodies.append(msgspec.json.encode(body))
    return bodies


def stream_options(counted: bool) -> dict[str, bool]:
    """Return the option for usage at the end; with `counted`, also for usage in each chunk."""
    return {"include_usage": True} | ({"continuous_usage_stats": True} if counted else {})


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def lengths(mean: int, ratio: float) -> range:
    return range(max(1, round(mean * (1.0 - ratio))), max(1, round(mean * (1.0 + ratio))) + 1)
