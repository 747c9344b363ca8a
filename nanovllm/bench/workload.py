"""Seeded loads: token prompts for the engine, text prompts and arrival times for a server.

The offline shapes are those of other engines' measurements. With the same generator and seed, token
ids are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct
from msgspec.structs import replace

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
LEAD = "Words:"
# Short, common words, which most tokenizers encode as one token each.
WORDS = tuple((FOLDER / "words.txt").read_text().split())


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

    @property
    def name(self) -> str:
        name = f"c{self.concurrency}" if self.request_rate is None else f"rate{self.request_rate:g}"
        name += "-mixed" if self.range_ratio else ""
        return f"{name}-structured" if self.structured else name

    def warm_up(self, count: int) -> Workload:
        """Return a closed loop of `count` other prompts, with at most 16 output tokens each."""
        return replace(
            self,
            num_prompts=count,
            output_len=min(self.output_len, 16),
            concurrency=min(count, self.concurrency or count),
            request_rate=None,
            seed=self.seed + 1_000_003,
        )


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
        return num_tokens > self.overhead and bool(self._words_for(num_tokens - self.overhead))

    def text(self, rng: Random, num_tokens: int) -> str:
        """Return a message whose prompt has `num_tokens` tokens. `reaches` must be True."""
        left, words = num_tokens - self.overhead, [LEAD]
        while left:
            words.append(rng.choice(self._words_for(left)))
            left -= self._costs[words[-1]]
        return " ".join(words)

    def _words_for(self, left: int) -> list[str]:
        """Return the words after which the remaining tokens can be reached."""
        fitting = self._fitting
        while len(fitting) <= left:
            rests = ((word, len(fitting) - cost) for word, cost in self._costs.items())
            words = [w for w, rest in rests if rest == 0 or (rest > 0 and fitting[rest])]
            fitting.append(fitting[-1] if words == fitting[-1] else words)
        return fitting[left]


def chat_body(load: Workload, model: str, text: str) -> dict[str, object]:
    """Return the fields of a request for its prompt and sampling."""
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": load.temperature,
        "ignore_eos": load.ignore_eos,
    }
    if load.structured:  # without thinking, which does not follow the schema
        body["response_format"] = {"type": "json_schema", "json_schema": RECORDS}
        body["chat_template_kwargs"] = {"enable_thinking": False}
        del body["ignore_eos"]  # the schema determines the end of an answer
    return body


def chat_bodies(
    load: Workload, model: str, text: Callable[[Random, int], str], *, counted: bool = False
) -> list[bytes]:
    """Return the JSON bodies of a run. `text` returns a text with a number of prompt tokens.

    With `counted`, each chunk has the number of tokens up to it.
    """
    options = {"include_usage": True} | ({"continuous_usage_stats": True} if counted else {})
    rng = Random(load.seed)
    inputs, outputs = (lengths(n, load.range_ratio) for n in (load.input_len, load.output_len))
    bodies = []
    for _ in range(load.num_prompts):
        body = chat_body(load, model, text(rng, rng.choice(inputs))) | {
            "max_tokens": rng.choice(outputs),
            "stream": True,
            "stream_options": options,
        }
        bodies.append(msgspec.json.encode(body))
    return bodies


def arrivals(load: Workload) -> list[float]:
    """Return the due time of each request in seconds; [] for a closed loop."""
    if load.request_rate is None:
        return []
    rng = Random(f"arrivals {load.seed}")
    shape, scale = load.burstiness, 1.0 / (load.request_rate * load.burstiness)
    gaps = (rng.gammavariate(shape, scale) for _ in range(load.num_prompts - 1))
    return [*accumulate(gaps, initial=0.0)]


def lengths(mean: int, ratio: float) -> range:
    return range(max(1, round(mean * (1.0 - ratio))), max(1, round(mean * (1.0 + ratio))) + 1)
